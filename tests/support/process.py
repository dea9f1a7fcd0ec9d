"""Programs that tests start: wait until they say that they are ready, stop them whatever happens."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

T = TypeVar("T")


@contextmanager
def running(
    command: Sequence[str],
    *,
    log: Path,
    ready: Callable[[str], T | None],
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 30.0,
) -> Iterator[tuple[subprocess.Popen[bytes], T]]:
    """Start `command` with its stderr in `log` and its stdout beside it (`.out`); yield the process and the first thing
    that `ready` makes of a line of stderr. Terminated at the end if it still runs, killed if it does not listen to that.

    Raises `RuntimeError` with the end of the log when the program ends, or says nothing for `timeout_seconds`."""
    with log.open("wb") as stderr, log.with_suffix(".out").open("wb") as stdout:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env={**os.environ, **(environment or {})}
        )
    try:
        yield process, _wait_until_ready(process, log, ready, timeout_seconds)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], log: Path, ready: Callable[[str], T | None], timeout_seconds: float
) -> T:
    deadline = time.monotonic() + timeout_seconds
    while True:
        status = process.poll()
        text = log.read_text(errors="replace")
        for line in text.rpartition("\n")[0].splitlines():  # whole lines only: the last may still be growing
            if (found := ready(line)) is not None:
                return found
        if status is not None:
            raise RuntimeError(f"{process.args!r} ended with status {status} before it was ready:\n{text[-4000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} was not ready after {timeout_seconds:g} s:\n{text[-4000:]}")
        time.sleep(0.02)
