"""Captures replayed through the whole daemon: real HTTP from a stand-in server, the real NVML path, a clock that is stepped."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from ceilingd.app import App
from ceilingd.config import Config, ServerSettings
from support.clock import SteppedClock
from support.fake_nvml import FakeNvml
from support.sglang_server import Answer, FakeSglang

DATA = Path(__file__).parents[1] / "data"
LINK_SAMPLES_PER_SECOND = 5


@dataclass(frozen=True)
class Capture:
    """What one server answered, step by step, on which hardware."""

    name: str
    """`<gpu>__<driver>__<engine>__<state>`."""
    hardware: Mapping[str, object]
    """The state of the fake NVML library."""
    steps: Sequence[Mapping[str, Answer]]
    """The answers that change, one mapping a step: path -> answer."""
    step_seconds: float = 1.0
    fixed: Mapping[str, Answer] = field(default_factory=dict)
    """The answers that stay: /model_info, /server_info."""
    gpus: tuple[int, ...] = (0,)
    model_config: Path | None = None
    draft_model_config: Path | None = None


@dataclass(frozen=True)
class Replayed:
    """What the daemon served at the end of a capture."""

    text: str
    openmetrics: str
    page: str
    server_requests: tuple[str, ...]
    """Paths asked of the stand-in server, in order."""


async def replay(capture: Capture, fake_nvml: FakeNvml, scratch: Path) -> Replayed:
    """Run the daemon on a capture, on port 0, and scrape it over HTTP."""
    fake_nvml.set(capture.hardware)
    clock = SteppedClock()
    # An uptime far beyond the settle time: the links of this machine count as trained.
    procfs = scratch / "proc"
    procfs.mkdir()
    (procfs / "uptime").write_text("864000.00 1.00\n")
    async with FakeSglang({**capture.fixed, **capture.steps[0]}) as server:
        settings = ServerSettings(
            url=server.url,
            name="engine",
            gpus=capture.gpus,
            model_config_path=capture.model_config,
            draft_model_config_path=capture.draft_model_config,
        )
        config = Config(
            listen_address="127.0.0.1:0",
            nvml_library=fake_nvml.library,
            procfs_root=procfs,
            servers=(settings,),
            discovery=False,
        )
        async with App(config, clock=clock) as app:
            await app.sampler.sample(app.sources[0])  # NVML, without which there are no links to sample
            for answers in capture.steps:
                server.replies.update(answers)
                await _one_step(app, clock, capture.step_seconds)
            app.publish()
            headers = {"Accept": "application/openmetrics-text;version=1.0.0"}
            async with aiohttp.ClientSession(app.web.url) as session:
                text = await (await session.get("/metrics")).text()
                openmetrics = await (await session.get("/metrics", headers=headers)).text()
                page = await (await session.get("/")).text()
        paths = tuple(request.path for request in server.requests)
    port = server.url.rpartition(":")[2]
    return Replayed(*(body.replace(f":{port}", ":30000") for body in (text, openmetrics, page)), paths)


async def _one_step(app: App, clock: SteppedClock, seconds: float) -> None:
    """The links at their own rate while the time passes, then every other source once, and to its end whatever they started."""
    links = next(source for source in app.sources if source.name == "nvml_links")
    samples = round(seconds * LINK_SAMPLES_PER_SECOND)
    for _ in range(samples):
        clock.advance(seconds / samples)
        await app.sampler.sample(links)
    for source in app.sources:
        if source is not links:
            await app.sampler.sample(source)
    app.publish()
    await settle()


async def settle() -> None:
    """Wait for identity fetches and config.json reads that are under way."""
    names = ("identity of", "read model config")
    background = [task for task in asyncio.all_tasks() if task.get_name().startswith(names)]
    if background:
        await asyncio.wait(background, timeout=10)


UNREPEATABLE = re.compile(r"^(# (HELP|TYPE) )?(process_|ceilingd_event_loop_lag_seconds|ceilingd_build_info)")
"""Series whose values belong to the process and the machine. Everything else comes out the same on every run."""


def repeatable(text: str) -> str:
    """An exposition without the lines that differ from run to run."""
    return "".join(line for line in text.splitlines(keepends=True) if not UNREPEATABLE.match(line))


def advanced(body: bytes, seconds: float, *, steps_per_second: float = 18.0, tokens_per_second: float = 55.0) -> bytes:
    """A body of `/metrics` as it would read later, with the engine decoding at this rate on every rank: counters grown,
    decode report gauges refreshed. The captures made by SGLang's own classes hold a single instant."""
    growth = {
        rb'(sglang[:_]cuda_graph_passes_total\{[^}]*mode="decode[^}]*\} )([0-9.e+]+)': steps_per_second * seconds,
        rb'(sglang[:_]realtime_tokens_total\{[^}]*mode="decode"[^}]*\} )([0-9.e+]+)': tokens_per_second * seconds,
        rb"(sglang[:_]gen_throughput\{[^}]*\} )([0-9.e+]+)": 1e-3 * seconds,
    }
    for pattern, amount in growth.items():
        body = re.sub(pattern, lambda match, more=amount: _grown(match, more), body)  # type: ignore[misc]
    return body


def _grown(match: re.Match[bytes], amount: float) -> bytes:
    value = float(match[2])
    return match[0] if value == 0 else match[1] + repr(value + amount).encode()
