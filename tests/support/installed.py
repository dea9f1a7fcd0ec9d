"""The installed console script, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.process import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CEILINGD = Path(sys.executable).with_name("ceilingd")
"""The script that pip made beside the interpreter that runs the tests."""


@dataclass(frozen=True)
class Daemon:
    """A running `ceilingd`; what it logs is in `log`."""

    process: subprocess.Popen[bytes]
    url: str
    """Where it listens, with the port it really got: http://127.0.0.1:41234."""
    log: Path

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.url.removeprefix("http://")

    @property
    def output(self) -> str:
        """What it wrote to stdout so far."""
        return self.log.with_suffix(".out").read_text()

    def events(self) -> tuple[dict[str, Any], ...]:
        """Everything logged so far: every line of stderr is one JSON object, as stderr is no terminal."""
        return tuple(json.loads(line) for line in self.log.read_text().splitlines())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal and wait for the end: (exit code, seconds it took)."""
        start = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=30), time.monotonic() - start


@contextmanager
def daemon(*arguments: str, directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run `ceilingd` with `arguments` until the block ends; its log goes to `directory`, `environment` is added to ours."""
    log = directory / "ceilingd.log"
    with running([str(CEILINGD), *arguments], log=log, ready=_listening_url, environment=environment) as (process, url):
        yield Daemon(process, url, log)


def run(*arguments: str, timeout_seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run `ceilingd` to its end, as on a pipe: without colours and 100 columns wide."""
    return subprocess.run(
        [str(CEILINGD), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )


def _listening_url(line: str) -> str | None:
    if not line.startswith("{"):
        return None
    event = json.loads(line)
    return str(event["url"]).rstrip("/") if event.get("event") == "listening" else None
