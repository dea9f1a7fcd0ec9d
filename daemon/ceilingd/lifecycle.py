"""Signals: the first SIGTERM or SIGINT asks the daemon to stop, the second ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

import structlog

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """An event that is set by the first SIGTERM or SIGINT; the previous handlers are back when the block is left.

    A second signal ends the process at once with 128 + its number (143, 130), whatever the event loop is doing. SIGHUP is
    logged and ignored. Main thread only."""
    log = structlog.get_logger("ceilingd.lifecycle")
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def ask_to_stop(number: signal.Signals) -> None:
        if stop.is_set():  # the second came before the loop had seen to the first
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        stop.set()
        for each in STOP_SIGNALS:
            # Not through the loop, which may be what hangs; not SIG_DFL, which does nothing in a container's first process.
            signal.signal(each, _end_at_once)

    def hang_up() -> None:
        log.warning("SIGHUP ignored", reason="the configuration is read at start only; restart ceilingd to apply changes")

    previous = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, ask_to_stop, number)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
