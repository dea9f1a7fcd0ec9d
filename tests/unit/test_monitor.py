"""The join in time: tokens of an engine as evidence for the link of the GPU that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog

from ceilingd.config import Config, ServerSettings
from ceilingd.gpus import load_gpus
from ceilingd.models import Models
from ceilingd.monitor import Monitor, server_source_name
from ceilingd.records import (
    DecodeMoments,
    EngineIdentity,
    EngineRank,
    EngineReading,
    GpuInfo,
    GpuReading,
    LinkReading,
    LinkReadings,
    NvmlReading,
    Snapshot,
    SourceHealth,
    TrafficReading,
    TrafficReadings,
)
from support.clock import FakeClock

INFO = GpuInfo(
    index=0,
    uuid="GPU-0",
    name="NVIDIA RTX A6000",
    pci_bus_id="0000:41:00.0",
    link_generation_max_gpu=4,
    link_generation_max_system=4,
    link_width_max_lanes=16,
    power_limit_watts=300.0,
    sm_clock_max_hertz=2100e6,
)
IDLE = LinkReading(0, "GPU-0", 1, 16, 0.0, 22.0, 210e6, gpu_idle=True)
SILENT = replace(IDLE, gpu_idle=False)
"""Gen1, and the driver says nothing about idleness: only tokens can tell."""
SERVER = ServerSettings(url="http://127.0.0.1:30000", name="s", gpus=(0,))
SOURCES = ("nvml", "nvml_links", "nvml_traffic", server_source_name(SERVER))


class Host:
    """One GPU and one server, read at the default intervals on a clock that is stepped."""

    def __init__(self, **settings: float) -> None:
        self.clock = FakeClock()
        config = Config.model_validate({"servers": (SERVER,), **settings})
        self.monitor = Monitor(config, self.clock, Models(None, self.clock), load_gpus())

    def snapshot(self) -> Snapshot:
        return self.monitor.snapshot(tuple(SourceHealth(name, up=True, attempted=True) for name in SOURCES))

    def run(self, seconds: int, link: LinkReading, rank: Callable[[float], EngineRank]) -> list[str]:
        """The state of the link at the end of each second; `rank` gives the engine's numbers at a time of this run."""
        states = []
        start = self.clock.monotonic()
        for _ in range(seconds):
            now = self.clock.monotonic()
            self.monitor.accept("nvml", NvmlReading(now, "575", "12", None, (GpuReading(INFO, power_limit_watts=300.0),)))
            identity = EngineIdentity()  # no model is looked for
            reading = EngineReading(now, "decode_moments", identity, (rank(now - start),), 500, 0.01)
            self.monitor.accept(server_source_name(SERVER), reading)
            for _ in range(5):
                self.monitor.accept("nvml_links", LinkReadings(self.clock.monotonic(), (link,)))
                self.clock.advance(0.2)
            states.append(self.snapshot().links[0].state)
        return states


def moments(steps: float, *, batch: int, round_seconds: float) -> DecodeMoments:
    tokens = steps * batch
    return DecodeMoments(steps, tokens, steps * round_seconds, tokens * batch, tokens * round_seconds, tokens)


def test_short_requests_now_and_then_are_no_load() -> None:
    def sixteen_tokens_every_2500_ms(seconds: float) -> EngineRank:
        running = seconds % 2.5 < 0.3
        return EngineRank("0", float(running), moments=moments(100 + 16 * (seconds // 2.5 + 1), batch=1, round_seconds=0.019))

    assert "degraded" not in Host().run(60, IDLE, sixteen_tokens_every_2500_ms)


def test_one_request_of_three_seconds_is_no_load() -> None:
    def one_request(seconds: float) -> EngineRank:
        steps = 100 + min(seconds, 3.05) / 0.02
        return EngineRank("0", float(seconds < 3.05), moments=moments(steps, batch=1, round_seconds=0.02))

    assert "degraded" not in Host().run(20, IDLE, one_request)


def test_an_engine_that_reports_every_few_seconds_is_at_work_in_between() -> None:
    def slow_rounds(seconds: float) -> EngineRank:
        return EngineRank("0", 4.0, moments=moments(100 + 15 * (seconds // 4.5), batch=4, round_seconds=0.3))

    states = Host().run(40, SILENT, slow_rounds)
    assert states[-1] == "degraded"
    assert set(states[states.index("degraded") :]) == {"degraded"}


def test_a_running_gauge_that_is_stuck_is_no_load() -> None:
    assert "degraded" not in Host().run(
        60, SILENT, lambda _: EngineRank("0", 24.0, moments=moments(100, batch=24, round_seconds=0.03))
    )


def test_what_a_lost_source_said_is_gone_and_counters_stay() -> None:
    host = Host()
    host.run(3, replace(SILENT, generation=4, utilization_ratio=0.98, power_watts=250.0), lambda _: EngineRank("0", 0.0))
    now = host.clock.monotonic()
    for seconds in range(3):
        host.monitor.accept("nvml_traffic", TrafficReadings(now + seconds, (TrafficReading(0, "GPU-0", 1e6, 2e6),)))
    link = host.snapshot().links[0]
    assert (link.transmit_bytes_total, link.receive_bytes_total) == (pytest.approx(2e6), pytest.approx(4e6))
    host.monitor.lose("nvml_traffic")
    assert host.snapshot().links[0].transmit_bytes_total is None
    host.monitor.lose("nvml_links")
    assert host.snapshot().links == ()
    host.monitor.lose("nvml")
    assert host.snapshot().nvml.reading is None
    host.monitor.lose(server_source_name(SERVER))
    assert host.snapshot().servers[0].reading is None
    states = host.run(1, replace(SILENT, generation=4), lambda _: EngineRank("0", 0.0))
    assert states == ["full"]
    assert host.snapshot().links[0].busy_seconds[0][2] > 2


def test_a_gap_in_the_traffic_is_not_filled() -> None:
    host = Host()
    host.run(1, IDLE, lambda _: EngineRank("0", 0.0))
    now = host.clock.monotonic()
    host.monitor.accept("nvml_traffic", TrafficReadings(now, (TrafficReading(0, "GPU-0", 1e9, None),)))
    host.monitor.accept("nvml_traffic", TrafficReadings(now + 600, (TrafficReading(0, "GPU-0", 1e9, None),)))
    link = host.snapshot().links[0]
    assert (link.transmit_bytes_total, link.receive_bytes_total) == (0, None)


def test_a_hanging_server_is_stale_long_before_its_time_limit() -> None:
    host = Host(server_timeout_seconds=600.0)
    host.run(5, IDLE, lambda seconds: EngineRank("0", 1.0, moments=moments(100 + 50 * seconds, batch=1, round_seconds=0.02)))
    assert host.snapshot().servers[0].reading is not None
    host.clock.advance(11)  # still within the limit: a server may be slow
    assert host.snapshot().servers[0].reading is not None
    host.clock.advance(3)
    server = host.snapshot().servers[0]
    assert (server.reading, server.health.up) == (None, False)
    assert host.snapshot().links == ()
    assert not host.snapshot().nvml.up


def test_a_degraded_link_and_a_lost_gpu_are_said_once() -> None:
    host = Host()
    busy = replace(SILENT, utilization_ratio=0.98, power_watts=250.0)
    with structlog.testing.capture_logs() as lines:
        host.run(12, busy, lambda _: EngineRank("0", 0.0))
        host.run(6, replace(busy, generation=4), lambda _: EngineRank("0", 0.0))
        now = host.clock.monotonic()
        for _ in range(3):
            host.monitor.accept("nvml", NvmlReading(now, "575", "12", None, (), unreadable=((0, "nvml_gpu_lost"),)))
        host.run(1, busy, lambda _: EngineRank("0", 0.0))
    assert [line["event"] for line in lines] == [
        "link degraded",
        "link no longer degraded",
        "gpu unreadable",
        "gpu readable again",
    ]
    assert (lines[0]["generation"], lines[0]["generation_expected"], lines[0]["gpu"]) == (1, 4, 0)
