"""Asks each source at its own cadence, with a time limit, on our clock; keeps the account of each. Nobody waits for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from ceilingd.clock import Clock
from ceilingd.records import SourceHealth
from ceilingd.sources.source import Source, SourceError

QUIET_SECONDS = 30.0
"""A source that fails for the same reason again within this time is counted instead of logged: flapping must not flood."""


class Sink(Protocol):
    """Who gets the readings. Both methods return at once and never raise."""

    def accept(self, source: str, reading: Any) -> None:
        """A reading of this source replaces its last one."""
        ...

    def lose(self, source: str) -> None:
        """The source gave nothing: what it said before is no longer true."""
        ...


class Sampler:
    """One task per source. `health` is the account that survives failures."""

    def __init__(self, sources: Sequence[Source[Any]], sink: Sink, clock: Clock) -> None:
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise ValueError(f"sources: names must be unique, got {names}")
        self._sources = tuple(sources)
        self._sink = sink
        self._clock = clock
        self._health = {source.name: SourceHealth(source.name, source.interval_seconds) for source in sources}
        self._lines = {source.name: _Lines(clock, source.name) for source in sources}
        self.all_attempted = asyncio.Event()
        """Set once the first read of every source has ended."""
        if not sources:
            self.all_attempted.set()

    def health(self) -> tuple[SourceHealth, ...]:
        """One per source, in the order given."""
        return tuple(self._health.values())

    async def run(self) -> None:
        """Sample until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._repeat(source), name=f"sample {source.name}")

    async def close(self) -> None:
        """Close all sources, side by side."""
        await asyncio.gather(*(source.close() for source in self._sources))

    async def _repeat(self, source: Source[Any]) -> None:
        start = self._clock.monotonic()
        while True:
            await self.sample(source)
            failures = self._health[source.name].consecutive_failures
            start += pause_seconds(source, failures)
            now = self._clock.monotonic()
            if start < now:  # a read that took longer than its interval: keep the cadence, never catch up in a burst
                start = now
            await self._clock.sleep(start - now)

    async def sample(self, source: Source[Any]) -> None:
        """One read of one source, its account and its reading passed on. Never raises but on cancellation."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(source.timeout_seconds):
                reading = await source.read()
        except SourceError as error:
            self._failed(source, error.reason, str(error), consequence=error.consequence)
        except TimeoutError:
            self._failed(source, "timeout", f"no answer within {source.timeout_seconds:g} s")
        except Exception as error:
            message = f"{type(error).__name__} inside ceilingd while reading this source: please report it"
            self._failed(source, "defect", message, defect=error)
        else:
            self._succeeded(source, began)
            self._sink.accept(source.name, reading)
        if not self.all_attempted.is_set() and all(health.attempted for health in self._health.values()):
            self.all_attempted.set()

    def _succeeded(self, source: Source[Any], began: float) -> None:
        before = self._health[source.name]
        now = self._clock.monotonic()
        self._health[source.name] = replace(
            before,
            up=True,
            attempted=True,
            samples_total=before.samples_total + 1,
            consecutive_failures=0,
            last_success_monotonic_seconds=now,
            last_success_timestamp_seconds=self._clock.wall(),
            last_error=None,
            last_error_reason=None,
            durations=before.durations.observe(now - began),
        )
        if before.last_error_reason is not None:
            self._lines[source.name].recovered(before.consecutive_failures)

    def _failed(
        self,
        source: Source[Any],
        reason: str,
        message: str,
        *,
        consequence: bool = False,
        defect: Exception | None = None,
    ) -> None:
        before = self._health[source.name]
        errors = dict(before.errors_total)
        errors[reason] = errors.get(reason, 0) + 1
        self._health[source.name] = replace(
            before,
            up=False,
            attempted=True,
            errors_total=tuple(errors.items()),
            consecutive_failures=before.consecutive_failures + 1,
            last_error=message,
            last_error_reason=reason,
        )
        self._sink.lose(source.name)
        if before.last_error_reason != reason and not consequence:
            self._lines[source.name].failed(reason, message, defect)


def pause_seconds(source: Source[Any], consecutive_failures: int) -> float:
    """Seconds from the start of one read to the start of the next: the interval, doubled per failure up to the source's bound.

    An interval of 1 s and a bound of 60 s give 1, 2, 4, 8, 16, 32, 60, 60, ... seconds.
    """
    longest = max(source.backoff_max_seconds, source.interval_seconds)
    return float(min(source.interval_seconds * 2 ** min(consecutive_failures, 30), longest))


class _Lines:
    """The log lines of one source: one per change of state, and few of those when it flaps."""

    def __init__(self, clock: Clock, source: str) -> None:
        self._clock = clock
        self._log = structlog.get_logger("ceilingd.sampler").bind(source=source)
        self._quiet_until: dict[str, float] = {}
        self._unsaid = 0
        self._failure_said = False

    def failed(self, reason: str, message: str, defect: Exception | None) -> None:
        now = self._clock.monotonic()
        if now < self._quiet_until.get(reason, now):
            self._unsaid += 1
            return
        self._quiet_until[reason] = now + QUIET_SECONDS
        self._log.warning("source failed", reason=reason, error=message, exc_info=defect, **self._take_unsaid())
        self._failure_said = True

    def recovered(self, failures: int) -> None:
        # The end of a failure that was reported is always reported too: the last line must not be a lie.
        if self._failure_said:
            self._log.info("source recovered", failures=failures, **self._take_unsaid())
            self._failure_said = False

    def _take_unsaid(self) -> dict[str, int]:
        unsaid, self._unsaid = self._unsaid, 0
        return {"unsaid_changes": unsaid} if unsaid else {}
