"""A thread for calls that may block for ever, awaited from the event loop with a limit on each single call.

A `ThreadPoolExecutor` does not do: the interpreter joins its threads at exit, so that one call stuck in a driver would
keep the process from ending, and it cannot tell which of many calls in a function is the one that hangs.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from ceilingd.clock import Clock

T = TypeVar("T")


class CallStuckError(Exception):
    """The call in flight has passed its limit and still has not returned."""

    def __init__(self, call: str, seconds: float) -> None:
        super().__init__(f"{call} has not returned for {seconds:.3g} s")
        self.call = call
        self.seconds = seconds


class _AbandonedError(Exception):
    """Ends a job whose caller has gone away, at its next call; seen by nobody."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    name: str
    started: float


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)
    abandoned: bool = False


class Worker:
    """One daemon thread that runs jobs one after the other. A job makes its blocking calls through `call`."""

    def __init__(self, name: str, *, call_timeout_seconds: float, clock: Clock) -> None:
        self._name = name
        self._limit = call_timeout_seconds
        self._clock = clock
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._job: _Job[Any] | None = None
        self._call: _Call | None = None

    def stuck_seconds(self, now: float) -> float:
        """How long the call in flight has been running, once it has passed the limit; 0 otherwise. `now` is monotonic."""
        call = self._call
        if call is None or now - call.started < self._limit:
            return 0.0
        return now - call.started

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns or raises, run after those submitted before it.

        Raises `CallStuckError` as soon as the call in flight, this job's or another's, has passed the limit: then `job`
        is withdrawn, or ends at its next call. While that call is stuck, every further job fails so at once."""
        if self._closed:
            raise RuntimeError(f"the worker {self._name} is closed")
        self._raise_if_stuck()
        submitted = _Job(job)
        self._submit(submitted)
        done = asyncio.wrap_future(submitted.future)
        try:
            while not done.done():
                await self._wait_for_limit(done)
                if not done.done():
                    self._raise_if_stuck()
            return done.result()
        finally:
            submitted.abandoned = True
            done.cancel()

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(*arguments)`, watched. Only on this worker's thread, from within a job."""
        if self._job is not None and self._job.abandoned:
            raise _AbandonedError
        self._call = _Call(function.__name__, self._clock.monotonic())
        try:
            return function(*arguments)
        finally:
            self._call = None

    async def drain(self) -> None:
        """Return when every job submitted before has ended. Raises `CallStuckError` as `run` does."""
        await self.run(_nothing)

    async def close(self) -> bool:
        """Take no more jobs and let the thread end. True when it is idle; False when a call has held it for the limit:
        then the thread ends when that call returns, or with the process."""
        if self._closed or self._thread is None:
            self._closed = True
            return True
        try:
            await self.drain()
        except CallStuckError:
            return False
        finally:
            self._closed = True
            self._jobs.put(None)
        return True

    def _raise_if_stuck(self) -> None:
        call, now = self._call, self._clock.monotonic()
        if call is not None and now - call.started >= self._limit:
            raise CallStuckError(call.name, now - call.started)

    async def _wait_for_limit(self, done: asyncio.Future[Any]) -> None:
        """Return when `done` is, or when the call now in flight reaches its limit."""
        call = self._call
        seconds = self._limit if call is None else call.started + self._limit - self._clock.monotonic()
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({done, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _submit(self, job: _Job[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            self._job = job
            try:
                result = job.function()
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)


def _nothing() -> None:
    pass
