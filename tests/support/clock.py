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


class SteppedClock(FakeClock):
    """Sleepers wake only when `advance` passes their time: for code that races a sleep against real work on a thread."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_796_000_000.0) -> None:
        super().__init__(monotonic, wall)
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.monotonic()]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper not in due]
        for _, woken in due:
            if not woken.done():
                woken.set_result(None)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.monotonic() + seconds, woken))
        await woken
