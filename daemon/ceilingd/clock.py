"""Time, injected: everything that waits or subtracts instants gets a `Clock`, so that tests run without sleeping."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks and a wait. Rates and ages use `monotonic`; only timestamps shown to people use `wall`."""

    def monotonic(self) -> float:
        """Seconds that never jump back; the origin is arbitrary."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump when somebody sets the clock."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock (at once for zero or less)."""
        ...


class SystemClock:
    """The machine's clocks and the event loop's timer."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))
