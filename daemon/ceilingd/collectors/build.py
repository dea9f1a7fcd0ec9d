"""The daemon as a program: its version and what its process uses."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Literal

from ceilingd import __version__
from ceilingd.collectors.family import Family, Row
from ceilingd.records import Snapshot

_PYTHON_VERSION = platform.python_version()


def _build_info(snapshot: Snapshot) -> Iterator[Row]:
    yield (__version__, _PYTHON_VERSION, "true" if snapshot.demo else "false"), 1


def _process(name: str, kind: Literal["gauge", "counter"], text: str) -> Family:
    """One of the conventional `process_*` metrics, where the platform gives it."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for sample in snapshot.process:
            if sample.name == name:
                yield (), sample.value

    return Family(name, kind, text, (), rows)


FAMILIES = (
    Family(
        "ceilingd_build_info",
        "info",
        'Version of the daemon. demo="true": every other number is played, not measured.',
        ("version", "python", "demo"),
        _build_info,
    ),
    _process("process_cpu_seconds_total", "counter", "User and system CPU time of the daemon."),
    _process("process_resident_memory_bytes", "gauge", "Resident memory of the daemon."),
    _process("process_virtual_memory_bytes", "gauge", "Virtual memory of the daemon."),
    _process("process_start_time_seconds", "gauge", "Unix time at which the daemon started."),
    _process("process_open_fds", "gauge", "File descriptors that the daemon holds."),
    _process("process_max_fds", "gauge", "File descriptors that the daemon may hold."),
)
