"""METRICS.md: every metric, from its declaration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ceilingd.collectors import SUBJECTS
from ceilingd.collectors.family import Family

_HEAD = """\
# Metrics

Generated from the code by `ceilingd metrics --markdown`. Names and labels do not change once released.

Units are in the names: seconds, bytes, watts, joules, celsius, hertz; a ratio is from 0 to 1. A value that is not known is an
absent series, never 0, NaN or the last value; an info label that is not known is empty. GPU series carry `gpu` (the NVML index)
and `uuid`; the rest of a GPU's identity is in `ceilingd_gpu_info`. Server series carry `server` and, where they are about one
data-parallel rank, `dp_rank`; the rest is in `ceilingd_server_info`. Which GPU serves what is in `ceilingd_server_gpu`.
"""


def metrics_markdown() -> str:
    """The whole document, with its last newline."""
    return "\n".join((_HEAD, *(line for title, families in SUBJECTS for line in _section(title, families))))


def _section(title: str, families: Iterable[Family]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| metric | type | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        yield f"| `{family.name}` | {family.kind} | {labels} | {_cell(family.documentation)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
