"""What the daemon costs: CPU, memory, scrape latency, event-loop lag, size of the exposition.

The installed `ceilingd run` at its default intervals, on 8 GPUs of the fake NVML library and 2 fake SGLang servers in a process
of their own: first with `/v1/loads` as the servers' source, then with the `/metrics` of SGLang 0.5.23 alone. CPU and lag are
measured while it is scraped once a second, latency afterwards by 20 scrapes a second, every other one gzipped. A report, not a
test: nothing fails when a target is missed.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support import installed
from support.fake_nvml import TWO_A6000, FakeNvml
from support.process import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCES = ("/v1/loads", "/metrics")
MODEL_CONFIG = Path(__file__).parents[1] / "data" / "model_configs" / "qwen3.6-27b.json"
EIGHT_A6000: dict[str, object] = {
    **TWO_A6000,
    "count": 8,
    **{f"{index}.uuid": f"GPU-a6000000-0000-4000-8000-00000000000{index}" for index in range(8)},
    **{f"{index}.bus_id": f"00000000:{index + 1}1:00.0" for index in range(8)},
}
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    """One run. CPU in share of one core."""

    source: str
    cpu_share: float
    rss_mebibytes: float
    plain_p50_seconds: float
    plain_p99_seconds: float
    gzip_p50_seconds: float
    gzip_p99_seconds: float
    lag_max_seconds: float
    series: int
    body_bytes: int
    gzip_bytes: int


ROWS = (
    # (field, name, factor to the unit shown, unit, target in that unit)
    ("cpu_share", "CPU, scraped at 1 Hz", 100, "% of a core", 2),
    ("rss_mebibytes", "RSS", 1, "MiB", 80),
    ("plain_p50_seconds", "/metrics p50", 1e3, "ms", None),
    ("plain_p99_seconds", "/metrics p99", 1e3, "ms", 5),
    ("gzip_p50_seconds", "/metrics gzip p50", 1e3, "ms", None),
    ("gzip_p99_seconds", "/metrics gzip p99", 1e3, "ms", 5),
    ("lag_max_seconds", "event-loop lag, highest", 1e3, "ms", 5),
    ("series", "series", 1, "", 1500),
    ("body_bytes", "body", 1e-3, "kB", None),
    ("gzip_bytes", "body, gzip", 1e-3, "kB", None),
)


class Scraper:
    """One kept-alive connection to the daemon, as Prometheus holds it."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=10)

    def scrape(self, *, encoding: str = "identity") -> tuple[bytes, float]:
        """The body as sent, and the seconds until its last byte."""
        start = time.perf_counter()
        self._connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
        response = self._connection.getresponse()
        body = response.read()
        seconds = time.perf_counter() - start
        if response.status not in (200, 503):  # 503: no snapshot yet
            raise RuntimeError(f"/metrics answered {response.status}")
        return body, seconds

    def text(self) -> str:
        """The body."""
        return self.scrape()[0].decode()


def values_of(name: str, text: str) -> list[float]:
    """The values of all series of a metric."""
    return [float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)]


def measure(daemon: installed.Daemon, source: str, seconds: float) -> Figures:
    """The figures of a running daemon that already sees everything."""
    scraper = Scraper(daemon.address)
    lags = []
    cpu, start = cpu_seconds(daemon.process.pid), time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        lags += values_of("ceilingd_event_loop_lag_seconds", scraper.text())
        time.sleep(1 - elapsed % 1)
    cpu_share = (cpu_seconds(daemon.process.pid) - cpu) / (time.monotonic() - start)

    plain, zipped = [], []
    for _ in range(round(seconds * 10)):
        plain.append(scraper.scrape())
        time.sleep(0.05)
        zipped.append(scraper.scrape(encoding="gzip"))
        time.sleep(0.05)
    body = plain[-1][0]
    gzip.decompress(zipped[-1][0])  # raises if the daemon did not compress
    return Figures(
        source=source,
        cpu_share=cpu_share,
        rss_mebibytes=rss_bytes(daemon.process.pid) / 2**20,
        plain_p50_seconds=quantile([seconds for _, seconds in plain], 0.5),
        plain_p99_seconds=quantile([seconds for _, seconds in plain], 0.99),
        gzip_p50_seconds=quantile([seconds for _, seconds in zipped], 0.5),
        gzip_p99_seconds=quantile([seconds for _, seconds in zipped], 0.99),
        lag_max_seconds=max(lags),
        series=sum(1 for line in body.splitlines() if line and not line.startswith(b"#")),
        body_bytes=len(body),
        gzip_bytes=len(zipped[-1][0]),
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads so far (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_SECONDS


def rss_bytes(pid: int) -> int:
    """Resident set now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@contextmanager
def servers(source: str, directory: Path) -> Iterator[list[str]]:
    """Two fake SGLang servers at work, in a process of their own: their URLs."""
    command = [sys.executable, str(Path(__file__).with_name("servers.py")), source]
    with running(command, log=directory / "servers.log", ready=json.loads) as (_, urls):
        yield urls


@contextmanager
def watching(urls: Sequence[str], directory: Path) -> Iterator[installed.Daemon]:
    """The installed daemon on 8 fake GPUs and these servers, once it has everything it can see."""
    nvml = FakeNvml(directory)
    nvml.set(EIGHT_A6000)
    configuration = directory / "ceilingd.toml"
    configuration.write_text(
        "".join(
            f'[[servers]]\nurl = "{url}"\ngpus = {list(range(first, first + 4))}\nmodel_config = "{MODEL_CONFIG}"\n'
            for url, first in zip(urls, (0, 4), strict=True)
        )
    )
    arguments = ("run", "--config", str(configuration), "--listen-address", "127.0.0.1:0")
    environment = {key: value for key, value in nvml.environment.items() if key != "FAKE_NVML_CALLS"}  # the log costs more
    with installed.daemon(*arguments, directory=directory, environment=environment) as daemon:
        scraper = Scraper(daemon.address)
        deadline = time.monotonic() + 60
        while not sees_everything(scraper.text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the daemon does not see everything:\n{daemon.log.read_text()}")
            time.sleep(0.2)
        yield daemon


def sees_everything(text: str) -> bool:
    """Are both servers decoding below a known ceiling (two efficiencies each), and all links read?"""
    return (
        len(values_of("ceilingd_decode_efficiency_ratio", text)) == 4 and len(values_of("ceilingd_pcie_link_state", text)) >= 8
    )


def table(runs: Sequence[Figures]) -> str:
    """All figures side by side, each with what it should stay below."""
    lines = [f"{'':26}" + "".join(f"{run.source:>16}" for run in runs) + f"{'target':>12}"]
    for name, title, factor, unit, target in ROWS:
        values = "".join(f"{getattr(run, name) * factor:16.4g}" for run in runs)
        lines.append(f"{title:26}{values}{'' if target is None else f'< {target}':>12}  {unit}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; the exit code says only that it ran."""
    parser = argparse.ArgumentParser(description="CPU, memory, latency and size of the daemon with 8 GPUs and 2 servers.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two parts of a run (default: 30)")
    parser.add_argument(
        "--source", choices=SOURCES, action="append", help="what the servers offer (default: one after the other)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    runs = []
    for source in arguments.source or SOURCES:
        with tempfile.TemporaryDirectory(prefix="ceilingd-benchmark-") as folder:
            directory = Path(folder)
            with servers(source, directory) as urls, watching(urls, directory) as daemon:
                runs.append(measure(daemon, source, arguments.seconds))
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "runs": [asdict(run) for run in runs]}, indent=2))
    else:
        print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
