"""Builds all objects of one daemon, starts them in order, and stops them in reverse."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog
from prometheus_client import ProcessCollector

from ceilingd import __version__
from ceilingd.clock import Clock, SystemClock
from ceilingd.collectors import FAMILIES
from ceilingd.config import Config
from ceilingd.gpus import load_gpus
from ceilingd.lifecycle import stop_on_signals
from ceilingd.models import Models
from ceilingd.monitor import Monitor, server_source_name
from ceilingd.records import ProcessSample
from ceilingd.sampler import Sampler
from ceilingd.sources.source import Source
from ceilingd.web.server import ListenError, WebServer

PUBLISH_SECONDS_MAX = 1.0
"""A snapshot is made this often at least: links are sampled faster than servers, and ages must be seen to grow."""
FIRST_SNAPSHOT_SECONDS = 1.0
"""The first snapshot waits for the first read of every source, but no longer than this."""
PUBLISH_DELAY_SHARE = 0.15
LAG_PROBE_SECONDS = 0.1
SWITCH_SECONDS = 0.0005
"""How long the loop may wait for the interpreter while rendering or a driver's worker computes: 5 ms by default."""
STOP_SECONDS = 1.0
"""Sources get this long to close."""


class StartError(Exception):
    """The daemon cannot start as asked. One sentence for a person."""


def run(config: Config, demo: bool = False, speed: float = 1.0) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code. Raises `StartError`."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run_until_signalled(config, demo, speed))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # uvloop is not built for every platform; asyncio's own loop does the same, slower
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _run_until_signalled(config: Config, demo: bool, speed: float) -> int:
    async with stop_on_signals() as stop, App(config, demo=demo, speed=speed) as app:
        await app.run(stop)
    return 0


class App:
    """One daemon. An async context manager: entered it listens, left it has released everything.

    `sources` replaces the sources made from the configuration (tests)."""

    def __init__(
        self,
        config: Config,
        *,
        demo: bool = False,
        speed: float = 1.0,
        clock: Clock | None = None,
        sources: Sequence[Source[Any]] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._log = structlog.get_logger("ceilingd.app")
        self._demo = demo
        self._stack = AsyncExitStack()
        self._lag_seconds = 0.0
        self._process = ProcessCollector(registry=None)
        self._loaded_timestamp = self._clock.wall()
        self._stuck_seconds: Callable[[], float] = lambda: 0.0
        if demo:
            from ceilingd.sources.demo import demo_config, demo_sources

            config = demo_config(config)
            sources = demo_sources(config, self._clock, speed)
        self._config = config
        self._publish_seconds = min(config.sample_interval_seconds, PUBLISH_SECONDS_MAX)
        self.sources = tuple(self._real_sources() if sources is None else sources)
        self.monitor = Monitor(
            config,
            self._clock,
            Models(config.hf_cache, self._clock),
            load_gpus(),
            demo=demo,
            settled_monotonic_seconds=0.0 if demo else self._settled_monotonic_seconds(),
            stuck_seconds=self._stuck_seconds,
        )
        self.sampler = Sampler(self.sources, self.monitor, self._clock)
        self.web = WebServer(config.listen_address, FAMILIES, self._clock, self._publish_seconds)

    def _real_sources(self) -> list[Source[Any]]:
        from ceilingd.sources.nvml import Nvml
        from ceilingd.sources.sglang import SglangServer

        config, clock = self._config, self._clock
        nvml = Nvml(
            clock,
            library=config.nvml_library,
            sample_interval_seconds=config.sample_interval_seconds,
            link_sample_interval_seconds=config.link_sample_interval_seconds,
            call_timeout_seconds=config.nvml_call_timeout_seconds,
            procfs_root=config.procfs_root,
        )
        self._stuck_seconds = lambda: nvml.stuck_seconds(clock.monotonic())
        servers = [SglangServer(server_source_name(server), server, config, clock) for server in config.servers]
        return [nvml.gpus, nvml.links, nvml.traffic, *servers]

    def _settled_monotonic_seconds(self) -> float:
        """When the links of this machine count as trained: some time after boot."""
        try:
            uptime = float((self._config.procfs_root / "uptime").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0
        return self._clock.monotonic() - uptime + self._config.links.settle_seconds

    async def __aenter__(self) -> App:
        try:
            await self.web.start()
        except ListenError as error:
            raise StartError(str(error)) from None
        self._stack.push_async_callback(self.web.stop)
        self._stack.push_async_callback(self._close_sources)
        self._log.info("listening", url=self.web.url, version=__version__, demo=self._demo)
        if self._demo:
            self._log.info(
                "demo",
                note="a played deployment: every number is invented or recorded, none is measured here",
                page=f"{self.web.url}/",
                metrics=f"{self.web.url}/metrics",
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._log.info("stopped")

    async def _close_sources(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.sampler.close()
        except TimeoutError:
            self._log.warning("sources did not close in time", seconds=STOP_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Sample and publish until `stop` is set."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.sampler.run(), name="sampler"),
                tasks.create_task(self._publish_repeatedly(), name="publisher"),
                tasks.create_task(self._measure_lag(), name="event loop lag"),
            ]
            await stop.wait()
            for task in running:
                task.cancel()

    async def _publish_repeatedly(self) -> None:
        try:
            async with asyncio.timeout(FIRST_SNAPSHOT_SECONDS):
                await self.sampler.all_attempted.wait()
        except TimeoutError:
            pass
        settle_memory()
        # Sources start their reads together; a snapshot just behind them shows values that are young.
        await self._clock.sleep(PUBLISH_DELAY_SHARE * self._publish_seconds)
        while True:
            began = self._clock.monotonic()
            try:
                self.publish()
            except Exception:
                # Scrapes go on with the last snapshot until readiness calls it stale; the defect is in the log.
                self._log.exception("defect while making the snapshot")
            await self._clock.sleep(self._publish_seconds - (self._clock.monotonic() - began))

    def publish(self) -> None:
        """Make a snapshot of what is known now and hand it to the web side."""
        lag, self._lag_seconds = self._lag_seconds, 0.0
        snapshot = self.monitor.snapshot(
            self.sampler.health(),
            event_loop_lag_seconds=lag,
            config_loaded_timestamp_seconds=self._loaded_timestamp,
            process=tuple(process_samples(self._process)),
        )
        self.web.publish(snapshot)

    async def _measure_lag(self) -> None:
        """The longest delay of a timer since the last snapshot: what a callback blocked the loop for."""
        while True:
            due = time.monotonic() + LAG_PROBE_SECONDS  # the loop's own time is that of its last wake-up, in milliseconds
            await asyncio.sleep(LAG_PROBE_SECONDS)
            self._lag_seconds = max(self._lag_seconds, time.monotonic() - due)


def settle_memory() -> None:
    """Once everything is imported: give back what importing took and will not be needed again, and keep the rest out of
    the garbage collector's way. Saves 11 of 73 MiB, and the tens of milliseconds that a full collection holds the loop."""
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def process_samples(collector: ProcessCollector) -> list[ProcessSample]:
    """The daemon's own `process_*` figures, from prometheus_client's collector."""
    return [
        ProcessSample(sample.name, "counter" if family.type == "counter" else "gauge", family.documentation, sample.value)
        for family in collector.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


__all__ = ["App", "StartError", "run"]
