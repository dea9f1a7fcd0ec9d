"""The second signal ends the process at once, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

HANGS_WHILE_STOPPING = """
import asyncio, sys, time
import uvloop
from ceilingd import logs
from ceilingd.lifecycle import stop_on_signals

logs.configure()

async def main():
    async with stop_on_signals() as stop:
        print("ready", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        {hang}

with asyncio.Runner(loop_factory={factory}) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("factory", ["uvloop.new_event_loop", "asyncio.new_event_loop"])
@pytest.mark.parametrize("hang", ["time.sleep(60)", "await asyncio.sleep(60)"], ids=["blocked loop", "waiting loop"])
@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_process_at_once(factory: str, hang: str, second: signal.Signals, code: int) -> None:
    program = HANGS_WHILE_STOPPING.format(hang=hang, factory=factory)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == b"stopping\n"
            process.send_signal(second)
            assert process.wait(timeout=10) == code
        finally:
            process.kill()
