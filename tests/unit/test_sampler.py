from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from ceilingd.sampler import Sampler
from ceilingd.sources.source import SourceError
from support.clock import FakeClock


class Script:
    """A source that does what its list of steps says, then repeats the last one."""

    def __init__(self, name: str, steps: list[Any], *, interval: float = 1.0, timeout: float = 5.0, backoff: float = 60.0):
        self.name = name
        self.interval_seconds = interval
        self.timeout_seconds = timeout
        self.backoff_max_seconds = backoff
        self.steps = steps
        self.starts: list[float] = []
        self.clock: FakeClock | None = None

    async def read(self) -> Any:
        if self.clock is not None:
            self.starts.append(self.clock.monotonic())
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        return await step() if callable(step) else step

    async def close(self) -> None: ...


class Kept:
    """The sink: the last reading of each source, absent once lost."""

    def __init__(self) -> None:
        self.readings: dict[str, Any] = {}

    def accept(self, source: str, reading: Any) -> None:
        self.readings[source] = reading

    def lose(self, source: str) -> None:
        self.readings.pop(source, None)


async def run_until(sampler: Sampler, done: Callable[[], bool]) -> None:
    """Let the sampler run on its fake clock until something holds."""
    task = asyncio.create_task(sampler.run())
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_each_source_keeps_its_own_cadence() -> None:
    clock = FakeClock()
    fast, slow = Script("fast", [1], interval=0.2), Script("slow", [2], interval=1.0)
    fast.clock = slow.clock = clock
    await run_until(Sampler([fast, slow], Kept(), clock), lambda: len(slow.starts) >= 3)
    assert len(fast.starts) >= 3


async def test_failures_back_off_to_the_bound_and_success_resets() -> None:
    clock = FakeClock()
    failing = [SourceError("dns", "no such host") for _ in range(8)]
    source = Script("s", [*failing, "fine", "fine"], interval=1.0, backoff=10.0)
    source.clock = clock
    await run_until(Sampler([source], Kept(), clock), lambda: len(source.starts) >= 11)
    gaps = [later - earlier for earlier, later in zip(source.starts, source.starts[1:], strict=False)]
    assert gaps[:10] == pytest.approx([2, 4, 8, 10, 10, 10, 10, 10, 1, 1])


async def test_a_failed_source_keeps_its_account_and_loses_its_data() -> None:
    clock, kept = FakeClock(), Kept()
    source = Script("s", ["reading", SourceError("timeout", "no answer"), SourceError("dns", "no such host")])
    sampler = Sampler([source], kept, clock)
    await sampler.sample(source)
    assert kept.readings == {"s": "reading"}
    await sampler.sample(source)
    await sampler.sample(source)
    (health,) = sampler.health()
    assert kept.readings == {}
    assert (health.up, health.samples_total, health.consecutive_failures) == (False, 1, 2)
    assert dict(health.errors_total) == {"timeout": 1, "dns": 1}
    assert health.last_error == "no such host"
    assert health.last_success_monotonic_seconds == 1000.0


async def test_a_hanging_source_delays_nobody_and_is_given_up() -> None:
    clock, kept = FakeClock(), Kept()

    async def hang() -> None:
        await asyncio.Event().wait()

    hanging = Script("hanging", [hang], timeout=0.05)
    other = Script("other", ["fine"])
    other.clock = clock
    sampler = Sampler([hanging, other], kept, clock)
    await run_until(sampler, lambda: sampler.all_attempted.is_set() and len(other.starts) > 5)
    health = {entry.name: entry for entry in sampler.health()}
    assert health["hanging"].last_error_reason == "timeout"
    assert health["other"].up
    assert kept.readings == {"other": "fine"}


async def test_a_defect_is_counted_and_logged_and_sampling_goes_on() -> None:
    clock = FakeClock()
    source = Script("s", [KeyError("boom"), "fine"])
    sampler = Sampler([source], Kept(), clock)
    with structlog.testing.capture_logs() as lines:
        await sampler.sample(source)
        await sampler.sample(source)
    assert [line["event"] for line in lines] == ["source failed", "source recovered"]
    assert lines[0]["reason"] == "defect"
    assert isinstance(lines[0]["exc_info"], KeyError)


async def test_one_line_per_change_of_state_and_few_when_it_flaps() -> None:
    clock = FakeClock()
    steady = Script("steady", [SourceError("dns", "no such host")])
    sampler = Sampler([steady], Kept(), clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            await sampler.sample(steady)
            clock.advance(1)
    assert len(lines) == 1
    flapping = Script("flapping", [step for _ in range(50) for step in (SourceError("dns", "no such host"), "fine")])
    sampler = Sampler([flapping], Kept(), clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            await sampler.sample(flapping)
            clock.advance(1)
    assert [line["event"] for line in lines] == ["source failed", "source recovered"] * 4
    assert lines[2]["unsaid_changes"] == 14


async def test_a_failure_that_turns_into_another_is_said() -> None:
    clock = FakeClock()
    source = Script("s", [SourceError("stuck", "no answer"), SourceError("unknown_error", "restart the container")])
    sampler = Sampler([source], Kept(), clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(10):
            await sampler.sample(source)
            clock.advance(1)
    assert [line["error"] for line in lines] == ["no answer", "restart the container"]


async def test_a_consequence_is_counted_and_not_said() -> None:
    clock = FakeClock()
    source = Script("s", [SourceError("waiting", "another source says why", consequence=True), "fine"])
    sampler = Sampler([source], Kept(), clock)
    with structlog.testing.capture_logs() as lines:
        await sampler.sample(source)
        assert dict(sampler.health()[0].errors_total) == {"waiting": 1}
        await sampler.sample(source)
    assert lines == []


def test_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        Sampler([Script("same", [1]), Script("same", [2])], Kept(), FakeClock())
