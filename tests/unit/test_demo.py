"""The demo's whole cycle through sampler-less production code: sources, monitor, model, judgement."""

from __future__ import annotations

import asyncio
import doctest

import pytest

from ceilingd.config import Config
from ceilingd.gpus import load_gpus
from ceilingd.models import Models
from ceilingd.monitor import Monitor
from ceilingd.records import Ceiling, NoCeiling, Snapshot, SourceHealth
from ceilingd.sources import demo
from support.clock import FakeClock


async def play(seconds: float, speed: float = 1.0) -> list[tuple[float, Snapshot]]:
    """A snapshot a second of the demo, at the default intervals."""
    clock = FakeClock()
    config = demo.demo_config(Config())
    sources = demo.demo_sources(config, clock, speed)
    links = next(source for source in sources if source.name == "nvml_links")
    slow = [source for source in sources if source is not links]
    monitor = Monitor(config, clock, Models(None, clock), load_gpus(), demo=True)
    health = tuple(SourceHealth(source.name, up=True, attempted=True) for source in sources)
    snapshots = []
    for second in range(round(seconds)):
        for source in slow:
            monitor.accept(source.name, await source.read())
        for _ in range(5):
            monitor.accept(links.name, await links.read())
            clock.advance(0.2)
        if second == 1:  # the model's config.json is read behind the first snapshot
            async with asyncio.timeout(10):
                while isinstance(ceiling := monitor.snapshot(health).servers[0].ranks[0].ceiling, NoCeiling):
                    if ceiling.reason == "not_decoding":
                        break
                    await asyncio.sleep(0.01)
        snapshots.append((second + 1.0, monitor.snapshot(health)))
    return snapshots


def test_docstring_examples() -> None:
    assert doctest.testmod(demo).attempted > 0
    assert doctest.testmod(demo).failed == 0


async def test_numbers_within_five_seconds() -> None:
    snapshot = (await play(5))[-1][1]
    rank = snapshot.servers[0].ranks[0]
    assert isinstance(rank.ceiling, Ceiling)
    assert rank.ceiling.perfect_peak == pytest.approx(93.5, abs=0.2)
    assert rank.ceiling.peak.bottleneck == "weights"
    assert rank.observation is not None
    assert rank.observation.round_seconds == pytest.approx(0.0554, rel=0.01)
    assert rank.observation.accept_length == pytest.approx(3.08, rel=0.01)
    assert rank.observation.tokens_per_second == pytest.approx(55.6, rel=0.03)
    assert snapshot.demo


async def test_the_cycle_shows_idle_load_fault_and_recovery() -> None:
    snapshots = await play(demo.CYCLE_SECONDS + 30)
    states = {second: {link.index: link.state for link in snapshot.links} for second, snapshot in snapshots}
    generations = {second: {link.index: link.generation for link in snapshot.links} for second, snapshot in snapshots}
    assert states[30.0] == {0: "full", 1: "full"}
    assert (states[85.0], generations[85.0]) == ({0: "idle_downshift", 1: "idle_downshift"}, {0: 1, 1: 1})
    assert states[120.0] == {0: "full", 1: "full"}
    fault = [second for second, by_gpu in states.items() if by_gpu[1] == "degraded"]
    # 5 s of grace from the beginning of the fault at 134 s, 3 s of recovery from its end at 186 s
    assert fault[0] == pytest.approx(134 + 5, abs=1.5)
    assert fault[-1] == pytest.approx(186 + 3, abs=1.5)
    assert len(fault) == fault[-1] - fault[0] + 1
    assert all(by_gpu[0] != "degraded" for by_gpu in states.values())
    assert states[demo.CYCLE_SECONDS + 29] == {0: "full", 1: "full"}


async def test_observed_values_move_as_in_the_founding_case_and_vanish_when_idle() -> None:
    snapshots = dict(await play(186))
    lengths, rates = [], []
    for second in range(15, 72):
        observation = snapshots[float(second)].servers[0].ranks[0].observation
        assert observation is not None
        assert observation.accept_length is not None
        assert observation.tokens_per_second is not None
        lengths.append(observation.accept_length)
        rates.append(observation.tokens_per_second)
    assert 3.05 < min(lengths) < 3.3
    assert 3.9 < max(lengths) < 4.0
    assert min(rates) > 54
    assert max(rates) < 74
    idle = snapshots[85.0].servers[0].ranks[0]
    assert idle.observation is not None
    assert (idle.observation.running_requests, idle.observation.round_seconds) == (0, None)
    assert isinstance(idle.ceiling, NoCeiling)
    assert idle.ceiling.reason == "not_decoding"
    stuck = snapshots[180.0].servers[0].ranks[0]
    healthy = snapshots[120.0].servers[0].ranks[0]
    assert stuck.observation is not None
    assert healthy.observation is not None
    assert stuck.observation.round_seconds == pytest.approx(0.0624, rel=0.01)
    assert isinstance(stuck.ceiling, Ceiling)
    assert isinstance(healthy.ceiling, Ceiling)
    # The slow link is in the prediction too: its price is the difference of two ceilings.
    assert stuck.ceiling.perfect_peak < healthy.ceiling.perfect_peak - 2


async def test_speed_compresses_the_timeline_and_not_the_rates() -> None:
    snapshots = dict(await play(20, speed=10))
    assert snapshots[9.0].links[0].generation == 1
    first = snapshots[5.0].servers[0].ranks[0].observation
    assert first is not None
    assert first.tokens_per_second is not None
    assert 50 < first.tokens_per_second < 80
