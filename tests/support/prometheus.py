"""A real Prometheus on loopback: its own folder, a free port, scraping the given targets every second.

Debian 12's package is version 2.42; everything here works with 3.x as well.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.process import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_LISTENING = re.compile(r'msg="Listening on".* address=(\S+)')
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sample:
    """One series of an instant query."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus and its HTTP API."""

    url: str

    def query(self, promql: str) -> tuple[Sample, ...]:
        """The instant vector that `promql` gives now. Raises `ValueError` with Prometheus's own words for a bad query."""
        result = self._get("/api/v1/query", query=promql)["result"]
        return tuple(Sample(series["metric"], float(series["value"][1])) for series in result)

    def wait_for(self, promql: str, *, timeout_seconds: float = 60.0) -> tuple[Sample, ...]:
        """The first result of `promql` that is not empty. Raises `TimeoutError` with the state of the targets."""
        deadline = time.monotonic() + timeout_seconds
        while not (samples := self.query(promql)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{promql!r} gave nothing within {timeout_seconds:g} s; targets: {self.targets()}")
            time.sleep(0.1)
        return samples

    def targets(self) -> tuple[tuple[str, str, str], ...]:
        """(scrape URL, health, last error) of every target."""
        active = self._get("/api/v1/targets", state="active")["activeTargets"]
        return tuple((target["scrapeUrl"], target["health"], target["lastError"]) for target in active)

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with _direct.open(url, timeout=10) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{path} {parameters}: {error.read().decode(errors='replace')}") from error
        data: dict[str, Any] = body["data"]
        return data

    def wait_until_ready(self, timeout_seconds: float = 30.0) -> None:
        """Until it answers queries: it listens a little before."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                _direct.open(f"{self.url}/-/ready", timeout=10).close()
                return
            except urllib.error.HTTPError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"Prometheus was not ready after {timeout_seconds:g} s: {error}") from error
            time.sleep(0.05)


@contextmanager
def prometheus(
    targets: Sequence[str], directory: Path, *, rule_files: Sequence[Path] = (), interval_seconds: float = 1.0
) -> Iterator[Prometheus]:
    """Run Prometheus over `targets` (HOST:PORT, each scraped at /metrics) with everything it writes in `directory`.

    Ready within a second; the first samples come some 6 s later, as discovery hands targets over every 5 s."""
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("prometheus is not installed: run tests/install-system-packages")
    interval = f"{round(interval_seconds * 1000)}ms"
    settings = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [{"job_name": "ceilingd", "static_configs": [{"targets": list(targets)}]}],
    }
    configuration = directory / "prometheus.yml"
    configuration.write_text(json.dumps(settings))  # JSON is YAML
    command = [
        program,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with running(command, log=directory / "prometheus.log", ready=_listening_address) as (_, address):
        server = Prometheus(f"http://{address}")
        server.wait_until_ready()
        yield server


def _listening_address(line: str) -> str | None:
    match = _LISTENING.search(line)
    return match[1] if match else None
