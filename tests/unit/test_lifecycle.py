"""Signals while the event loop runs; what needs a process of its own is in tests/e2e."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from structlog.testing import capture_logs

from ceilingd.lifecycle import STOP_SIGNALS, stop_on_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
async def test_the_first_signal_asks_to_stop(number: signal.Signals) -> None:
    with capture_logs() as logged:
        async with stop_on_signals() as stop:
            assert not stop.is_set()
            os.kill(os.getpid(), number)
            async with asyncio.timeout(5):
                await stop.wait()
    assert [(event["event"], event["signal"]) for event in logged] == [("stopping", number.name)]


async def test_sighup_is_ignored_with_one_warning() -> None:
    with capture_logs() as logged:
        async with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(5):
                while not logged:  # the handler runs in an iteration of the loop soon after
                    await asyncio.sleep(0)
            assert not stop.is_set()
    assert [(event["log_level"], event["event"]) for event in logged] == [("warning", "SIGHUP ignored")]


async def test_the_handlers_of_before_are_back_afterwards() -> None:
    def of_before(number: int, frame: object) -> None: ...

    original = signal.signal(signal.SIGTERM, of_before)
    try:
        interrupt = signal.getsignal(signal.SIGINT)
        async with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(5):
                await stop.wait()
            assert signal.getsignal(signal.SIGINT) is not interrupt
        assert signal.getsignal(signal.SIGTERM) is of_before
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, original)
