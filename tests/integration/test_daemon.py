"""The whole daemon in this process, on real HTTP and the real NVML path, while its sources fail and come back."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from ceilingd.app import App, StartError
from ceilingd.clock import SystemClock
from ceilingd.config import Config, ServerSettings
from support.fake_nvml import TWO_A6000, FakeNvml
from support.sglang_server import HANG, Answer, FakeSglang, Reply, SimulatedEngine

INTERVAL_SECONDS = 0.1
DATA = Path(__file__).parents[1] / "data"
CALL_TIMEOUT_SECONDS = 0.15


IDLE_AT_GEN1 = {
    "0.pcie.gen": 1,
    "1.pcie.gen": 1,
    "*.util.gpu": 0,
    "*.power.mw": 22000,
    "*.clock.sm": 210,
    "*.throttle": 1,
    "*.pcie.tx_kbps": 0,
    "*.pcie.rx_kbps": 0,
}


class Daemon:
    """A running daemon and what it serves."""

    def __init__(self, app: App, session: aiohttp.ClientSession) -> None:
        self.app = app
        self._session = session

    async def get(self, path: str = "/metrics") -> str:
        async with self._session.get(path) as response:
            return await response.text()

    async def until(self, condition: Callable[[str], object], what: str) -> str:
        """Scrape until the exposition satisfies `condition`."""
        text = ""
        try:
            async with asyncio.timeout(15):
                while not condition(text := await self.get()):
                    await asyncio.sleep(INTERVAL_SECONDS / 2)
        except TimeoutError:
            pytest.fail(f"never seen: {what}\n{text}")
        return text


@asynccontextmanager
async def daemon(fake_nvml: FakeNvml, scratch: Path, *servers: ServerSettings, **settings: object) -> AsyncIterator[Daemon]:
    """`ceilingd run` at short intervals."""
    (scratch / "uptime").write_text("864000.00 1.00\n")
    config = Config.model_validate(
        {
            "listen_address": "127.0.0.1:0",
            "sample_interval_seconds": INTERVAL_SECONDS,
            "link_sample_interval_seconds": INTERVAL_SECONDS / 2,
            "nvml_call_timeout_seconds": CALL_TIMEOUT_SECONDS,
            "nvml_library": fake_nvml.library,
            "procfs_root": scratch,
            "server_timeout_seconds": 0.5,
            "servers": servers,
            "links": {"grace_seconds": 0.5, "recovery_seconds": 0.3},
            **settings,
        }
    )
    stop = asyncio.Event()
    async with App(config) as app, aiohttp.ClientSession(app.web.url) as session:
        running = asyncio.create_task(app.run(stop))
        try:
            yield Daemon(app, session)
        finally:
            stop.set()
            await running


def has(*series: str) -> Callable[[str], bool]:
    """Is each of these (regular expressions from the start of a line) served?"""
    return lambda text: all(re.search(f"^{one}", text, re.MULTILINE) for one in series)


def lacks(*series: str) -> Callable[[str], bool]:
    return lambda text: text != "" and not any(re.search(f"^{one}", text, re.MULTILINE) for one in series)


def engine_at_work() -> SimulatedEngine:
    return SimulatedEngine(SystemClock(), batch=1, accept_length=3.33, round_seconds=0.0554)


async def test_the_founding_case_live(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    engine = engine_at_work()
    info = json.loads((DATA / "sglang" / "server_info_0.5.23_qwen3.6-27b_tp2_mtp.json").read_text())
    info.update(model_path="Qwen/Qwen3.6-27B", quantization=None, internal_states=[])
    replies: dict[str, Answer] = {
        **engine.replies(),
        "/server_info": json.dumps(info).encode(),
        "/model_info": json.dumps({"model_path": "Qwen/Qwen3.6-27B"}).encode(),
    }
    async with FakeSglang(replies) as server:
        settings = ServerSettings(
            url=server.url, name="qwen", gpus=(0, 1), model_config_path=DATA / "model_configs" / "qwen3.6-27b.json"
        )
        async with daemon(fake_nvml, tmp_path, settings) as running:
            text = await running.until(has(r'ceilingd_decode_efficiency_ratio\{.*"peak"\}'), "an efficiency")
            values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
            labels = 'server="qwen",dp_rank="0"'
            perfect = values[f'ceilingd_decode_ceiling_tokens_per_second{{{labels},acceptance="perfect",bandwidth="peak"}}']
            assert perfect == pytest.approx(93.5, abs=0.5)
            observed = values[f'ceilingd_decode_round_seconds{{{labels},source="observed"}}']
            predicted = values[f'ceilingd_decode_round_seconds{{{labels},source="predicted_peak"}}']
            efficiency = values[f'ceilingd_decode_efficiency_ratio{{{labels},bandwidth="peak"}}']
            assert efficiency == pytest.approx(predicted / observed)
            assert values[f'ceilingd_decode_bottleneck{{{labels},component="weights"}}'] == 1
            components = [value for key, value in values.items() if "component_seconds" in key and '"peak"' in key]
            assert sum(components) == pytest.approx(predicted)
            assert has(r"ceilingd_pcie_link_state\{.*state=\"full\"\} 1")(text)
        assert server.count("/server_info") == 1
        assert not [request for request in server.requests if request.path.startswith("/health")]


async def test_a_link_slow_under_load_and_its_recovery(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    async with daemon(fake_nvml, tmp_path) as running:
        await running.until(has(r'ceilingd_pcie_link_state\{gpu="1".*"full"\} 1'), "the healthy link")
        fake_nvml.update({"1.pcie.gen": 1})
        text = await running.until(has(r'ceilingd_pcie_link_state\{gpu="1".*"degraded"\} 1'), "the slow link")
        assert has(r'ceilingd_pcie_link_state\{gpu="0".*"degraded"\} 0', r'ceilingd_pcie_link_generation\{gpu="1".*\} 1')(text)
        fake_nvml.update({"1.pcie.gen": 4})
        text = await running.until(has(r'ceilingd_pcie_link_state\{gpu="1".*"full"\} 1'), "the recovered link")
        assert has(r'ceilingd_gpu_busy_seconds_total\{gpu="1".*generation="1"')(text)
        # Idle at Gen1 is no fault.
        fake_nvml.update(IDLE_AT_GEN1)
        await running.until(has(r'ceilingd_pcie_link_state\{gpu="1".*"idle_downshift"\} 1'), "the idle link")


async def test_nvml_lost_and_back_while_the_servers_go_on(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    async with FakeSglang(engine_at_work().replies()) as server:
        async with daemon(fake_nvml, tmp_path, ServerSettings(url=server.url, name="s")) as running:
            await running.until(has("ceilingd_nvml_up 1", r"ceilingd_gpu_power_watts\{"), "GPUs")
            fake_nvml.update({"*.*.error": 999, "sys.*.error": 999})
            text = await running.until(has("ceilingd_nvml_up 0"), "the loss")
            text = await running.until(lacks(r"ceilingd_gpu_", r"ceilingd_pcie_"), "GPU series gone")
            assert has(r'ceilingd_server_up\{server="s"\} 1', r'ceilingd_source_errors_total\{source="nvml"')(text)
            fake_nvml.set(TWO_A6000)
            await running.until(has("ceilingd_nvml_up 1", r'ceilingd_gpu_power_watts\{gpu="1"'), "GPUs again")


async def test_a_hanging_nvml_call_holds_nothing_up(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    async with FakeSglang(engine_at_work().replies()) as server:
        async with daemon(fake_nvml, tmp_path, ServerSettings(url=server.url, name="s")) as running:
            await running.until(has("ceilingd_nvml_up 1"), "GPUs")
            fake_nvml.update({"0.nvmlDeviceGetPowerUsage.hang": 1})
            text = await running.until(has(r"ceilingd_nvml_call_stuck_seconds 0\.[3-9]"), "the stuck call")
            assert has("ceilingd_nvml_up 0", r'ceilingd_server_up\{server="s"\} 1')(text)
            began = time.perf_counter()
            for _ in range(20):
                await running.get()
            assert (time.perf_counter() - began) / 20 < 0.1  # the field cases ask for 100 ms
            calls = len(fake_nvml.calls())
            await running.until(has(r"ceilingd_nvml_call_stuck_seconds [1-9]"), "the stuck call growing")
            assert len([call for call in fake_nvml.calls()[calls:] if "Throughput" not in call.function]) == 0
            fake_nvml.set(TWO_A6000)
            await running.until(has("ceilingd_nvml_up 1", "ceilingd_nvml_call_stuck_seconds 0.0"), "GPUs again")


async def test_a_gpu_that_falls_off_the_bus_takes_only_its_own_series(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    async with daemon(fake_nvml, tmp_path) as running:
        await running.until(has(r'ceilingd_pcie_link_generation\{gpu="1"'), "both GPUs")
        fake_nvml.update({"1.*.error": 15})
        text = await running.until(lacks(r'ceilingd_gpu_power_watts\{gpu="1"', r'ceilingd_pcie_[a-z_]+\{gpu="1"'), "one GPU")
        assert has("ceilingd_nvml_up 1", r'ceilingd_gpu_power_watts\{gpu="0"', r'ceilingd_gpu_up\{gpu="1".*\} 0')(text)
        fake_nvml.set(TWO_A6000)
        await running.until(has(r'ceilingd_gpu_power_watts\{gpu="1"', r'ceilingd_pcie_link_generation\{gpu="1"'), "both again")


BAD_ANSWERS = [
    pytest.param(Reply(status=404), "metrics_disabled", id="404"),
    pytest.param(Reply(status=401), "unauthorized", id="401"),
    pytest.param(Reply(status=500), "http_status", id="500"),
    pytest.param(Reply(b"<html><body>It works!</body></html>", content_type="text/html"), "not_an_exposition", id="html"),
    pytest.param(Reply(b""), "empty_body", id="empty"),
    pytest.param(Reply(b"# junk\n" * 1024, repeat=7400), "body_too_large", id="50 MiB"),
    pytest.param(HANG, "timeout", id="nothing"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD_ANSWERS)
async def test_a_bad_server_is_counted_and_its_neighbour_goes_on(
    answer: Reply, reason: str, fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.set(TWO_A6000)
    good, bad = engine_at_work(), engine_at_work()
    async with FakeSglang(good.replies()) as alive, FakeSglang(bad.replies()) as failing:
        servers = (ServerSettings(url=alive.url, name="good"), ServerSettings(url=failing.url, name="bad"))
        async with daemon(fake_nvml, tmp_path, *servers) as running:
            await running.until(has(r'ceilingd_decode_tokens_per_second\{server="bad"'), "the server at work")
            failing.replies = dict.fromkeys(failing.replies, answer)
            text = await running.until(
                has(rf'ceilingd_source_errors_total\{{source="sglang/bad",reason="{reason}"\}} [1-9]'), f"the error {reason}"
            )
            text = await running.until(has(r'ceilingd_server_up\{server="bad"\} 0'), "the server down")
            assert lacks(r'ceilingd_decode_[a-z_]+\{server="bad"')(text)
            assert has(r'ceilingd_server_up\{server="good"\} 1', r'ceilingd_decode_tokens_per_second\{server="good"')(text)
            failing.replies = dict(bad.replies())
            await running.until(has(r'ceilingd_server_up\{server="bad"\} 1'), "the server up again")


async def test_nan_is_absent_and_not_an_error(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set(TWO_A6000)
    body = (DATA / "sglang" / "sglang_0.5.23_mtp.prom").read_bytes()
    body = re.sub(rb"(sglang:num_queue_reqs\{[^}]*\}) .*", rb"\1 NaN", body)
    async with FakeSglang({"/metrics": body}) as server:
        async with daemon(fake_nvml, tmp_path, ServerSettings(url=server.url, name="s")) as running:
            text = await running.until(has(r'ceilingd_server_up\{server="s"\} 1'), "the server")
            assert lacks(r"ceilingd_decode_queue_requests\{", r".* NaN$")(text)


async def test_a_port_in_use_stops_the_start_with_one_sentence(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    async with daemon(fake_nvml, tmp_path) as running:
        address = f"127.0.0.1:{running.app.web.port}"
        with pytest.raises(StartError, match=re.escape(address)):
            async with App(Config(listen_address=address, nvml_library=fake_nvml.library)):
                pytest.fail("listening twice on one port")


async def wait_for(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_readiness_follows_the_first_reads(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    async with FakeSglang({"/metrics": HANG, "/model_info": HANG}) as server:
        settings = ServerSettings(url=server.url, name="slow")
        async with daemon(fake_nvml, tmp_path, settings, server_timeout_seconds=1.5) as running:
            text = await running.get("/-/ready")
            assert "is ready" not in text

            async def ready() -> bool:
                return await running.get("/-/ready") == "ceilingd is ready.\n"

            await wait_for(ready)
            assert await running.get("/-/healthy") == "ceilingd is alive.\n"
