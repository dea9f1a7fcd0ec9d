"""A clock that moves only when told, or when somebody sleeps on it."""

from __future__ import annotations

import asyncio


class FakeClock:
    """`sleep` moves this clock forward at once and lets other tasks run: hours pass in milliseconds."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_796_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        self._monotonic += seconds
        self._wall += seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 0.0))
        await asyncio.sleep(0)
