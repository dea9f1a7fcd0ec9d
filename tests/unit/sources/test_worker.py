"""One thread, one call limit: what the caller sees when a call does not return, and when it does again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ceilingd.sources.worker import CallStuckError, Worker
from support.clock import SteppedClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT = 2.0
PATIENCE_SECONDS = 10.0


class Gate:
    """A call that blocks until it is let go."""

    def __init__(self) -> None:
        self.entries = 0
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> str:
        self.entries += 1
        self._entered.set()
        assert self._open.wait(PATIENCE_SECONDS)
        return "returned"

    @property
    def __name__(self) -> str:
        return "gate"

    def release(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, PATIENCE_SECONDS)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def worker(clock: SteppedClock) -> AsyncIterator[Worker]:
    worker = Worker("test", call_timeout_seconds=LIMIT, clock=clock)
    yield worker
    await worker.close()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def stuck(worker: Worker, clock: SteppedClock, gate: Gate) -> CallStuckError:
    """Run `gate` on `worker` until its caller gives up."""
    reading = asyncio.create_task(worker.run(lambda: worker.call(gate)))
    await gate.entered()
    clock.advance(LIMIT)
    with pytest.raises(CallStuckError) as caught:
        await reading
    return caught.value


async def recovered(worker: Worker, clock: SteppedClock, gate: Gate) -> None:
    """Let the stuck call return and wait until the worker has noticed and is idle."""
    gate.release()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while worker.stuck_seconds(clock.monotonic()):
            await asyncio.sleep(0.001)
    await worker.drain()


async def test_gives_what_the_job_returns(worker: Worker) -> None:
    assert await worker.run(lambda: worker.call(max, 3, 7)) == 7


async def test_raises_what_the_job_raises(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: worker.call(divmod, 1, 0))
    assert await worker.run(lambda: 1) == 1


async def test_jobs_run_one_after_the_other_on_one_daemon_thread(worker: Worker) -> None:
    running: list[int] = []
    threads: set[threading.Thread] = set()

    def job(number: int) -> int:
        threads.add(threading.current_thread())
        running.append(number)
        assert len(running) == 1
        running.remove(number)
        return number

    assert await asyncio.gather(*(worker.run(partial(job, number)) for number in range(20))) == list(range(20))
    [thread] = threads
    assert thread.daemon
    assert thread is not threading.current_thread()


async def test_a_call_past_its_limit_is_given_up_with_its_name_and_age(worker: Worker, clock: SteppedClock) -> None:
    gate = Gate()
    error = await stuck(worker, clock, gate)
    assert (error.call, error.seconds) == ("gate", LIMIT)
    assert str(error) == "gate has not returned for 2 s"
    gate.release()


async def test_stuck_seconds_is_zero_within_the_limit_and_counts_from_the_start_beyond_it(
    worker: Worker, clock: SteppedClock
) -> None:
    gate = Gate()
    reading = asyncio.create_task(worker.run(lambda: worker.call(gate)))
    await gate.entered()
    clock.advance(LIMIT - 0.5)
    assert worker.stuck_seconds(clock.monotonic()) == 0.0
    clock.advance(1.0)
    assert worker.stuck_seconds(clock.monotonic()) == LIMIT + 0.5
    assert worker.stuck_seconds(clock.monotonic() + 300) == LIMIT + 300.5
    with pytest.raises(CallStuckError):
        await reading
    await recovered(worker, clock, gate)
    assert worker.stuck_seconds(clock.monotonic()) == 0.0


async def test_the_limit_is_for_each_call_and_not_for_the_job(worker: Worker, clock: SteppedClock) -> None:
    gates = [Gate(), Gate(), Gate()]
    reading = asyncio.create_task(worker.run(lambda: [worker.call(gate) for gate in gates]))
    for gate in gates:
        await gate.entered()
        await settle()
        clock.advance(LIMIT * 0.9)
        await settle()
        gate.release()
    assert await reading == ["returned"] * 3


async def test_while_a_call_is_stuck_further_jobs_fail_at_once_and_never_run(worker: Worker, clock: SteppedClock) -> None:
    gate = Gate()
    await stuck(worker, clock, gate)
    ran: list[bool] = []
    clock.advance(5.0)
    with pytest.raises(CallStuckError, match="gate has not returned for 7 s"):
        await worker.run(lambda: ran.append(True))
    await recovered(worker, clock, gate)
    assert ran == []
    assert gate.entries == 1


async def test_a_job_waiting_behind_a_call_that_gets_stuck_is_withdrawn(worker: Worker, clock: SteppedClock) -> None:
    gate, ran = Gate(), []
    first = asyncio.create_task(worker.run(lambda: worker.call(gate)))
    await gate.entered()
    second = asyncio.create_task(worker.run(lambda: ran.append(True)))
    await settle()
    clock.advance(LIMIT)
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CallStuckError, CallStuckError]
    await recovered(worker, clock, gate)
    assert ran == []


async def test_works_again_once_the_call_returns(worker: Worker, clock: SteppedClock) -> None:
    gate = Gate()
    await stuck(worker, clock, gate)
    await recovered(worker, clock, gate)
    assert await worker.run(lambda: worker.call(str, 5)) == "5"


async def test_a_job_given_up_makes_no_further_call(worker: Worker, clock: SteppedClock) -> None:
    gate, later = Gate(), Gate()
    reading = asyncio.create_task(worker.run(lambda: (worker.call(gate), worker.call(later))))
    await gate.entered()
    clock.advance(LIMIT)
    with pytest.raises(CallStuckError):
        await reading
    await recovered(worker, clock, gate)
    assert later.entries == 0


async def test_a_cancelled_caller_ends_its_job_at_the_next_call(worker: Worker) -> None:
    gate, later = Gate(), Gate()
    reading = asyncio.create_task(worker.run(lambda: (worker.call(gate), worker.call(later))))
    await gate.entered()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    gate.release()
    await worker.drain()
    assert later.entries == 0


async def test_closing_ends_the_thread(clock: SteppedClock) -> None:
    worker = Worker("test", call_timeout_seconds=LIMIT, clock=clock)
    thread = await worker.run(threading.current_thread)
    assert await worker.close()
    await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert await worker.close()
    with pytest.raises(RuntimeError, match="the worker test is closed"):
        await worker.run(lambda: None)


async def test_closing_does_not_wait_for_a_stuck_call(clock: SteppedClock) -> None:
    worker = Worker("test", call_timeout_seconds=LIMIT, clock=clock)
    gate = Gate()
    thread = await worker.run(threading.current_thread)
    await stuck(worker, clock, gate)
    assert not await worker.close()
    assert thread.is_alive()
    gate.release()
    await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_stuck_call_does_not_keep_the_process_from_ending() -> None:
    program = """
import asyncio, contextlib, time
from ceilingd.clock import SystemClock
from ceilingd.sources.worker import CallStuckError, Worker

async def main():
    worker = Worker("test", call_timeout_seconds=0.05, clock=SystemClock())
    with contextlib.suppress(CallStuckError):
        await worker.run(lambda: worker.call(time.sleep, 600))
    print("closed" if await worker.close() else "left")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
