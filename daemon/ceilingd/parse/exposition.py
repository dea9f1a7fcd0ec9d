"""Prometheus text and OpenMetrics bodies, of which only a few wanted names are parsed.

A full parse of a 240 KB body takes 300 ms of the event loop. Looking at the name of each line first and parsing the labels of
the wanted ones only takes about 1 ms.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class NotAnExpositionError(ValueError):
    """The body is something else altogether: empty, HTML, JSON, prose. The message is one sentence."""


class Sample(NamedTuple):
    """One line. `value` may be NaN or infinite, as the format allows."""

    name: str
    labels: dict[str, str]
    value: float


class Exposition(NamedTuple):
    """The wanted samples in the order of the body, and how many lines with a wanted name could not be read."""

    samples: tuple[Sample, ...]
    malformed_lines: int


# `*+` gives nothing back, so that a hostile line costs time in proportion to its length and no more.
_LINE = re.compile(
    r"""\s*[a-zA-Z_:][a-zA-Z0-9_:]*\s*
        (?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?
        \s*(?P<value>[^\s#]+)
        (?:\s+(?P<timestamp>[-+.\deE]+))?
        \s*(?:\#.*)?\Z""",  # OpenMetrics puts an exemplar behind the value
    re.VERBOSE,
)
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"(?P<value>(?:[^"\\]|\\.)*+)"\s*(?:,|\Z)')
_ESCAPE = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n", '"': '"', "\\": "\\"}

_COMMENT = re.compile(rb"\s*#\s*(HELP|TYPE|UNIT|EOF)\b")
_LINES_LOOKED_AT = 50
"""How far down a body may start with lines nobody understands and still count as an exposition."""


def parse_exposition(body: bytes, wanted: Mapping[str, str]) -> Exposition:
    """The samples whose name is a key of `wanted`, under the name that the key maps to.

    Sample names are compared as they stand on the line (`x_total`, `x_bucket`). Lines with a wanted name that are not
    well-formed are counted and skipped. Raises `NotAnExpositionError` for a body that is none.
    """
    _require_exposition(body)
    names = {name.encode(): canonical for name, canonical in wanted.items()}
    samples = []
    malformed = 0
    for line in body.split(b"\n"):
        words = line.partition(b"{")[0].split(None, 1)
        if not words or (canonical := names.get(words[0])) is None:
            continue
        sample = _parse_line(canonical, line)
        if sample is None:
            malformed += 1
        else:
            samples.append(sample)
    return Exposition(tuple(samples), malformed)


def _parse_line(name: str, line: bytes) -> Sample | None:
    """The sample of a line, `None` where the line is malformed."""
    match = _LINE.match(line.decode(errors="replace").rstrip())
    if match is None:
        return None
    labels = _parse_labels(match["labels"] or "")
    text = match["value"]
    if labels is None or "_" in text:  # Python reads "1_000" as a number, the format does not
        return None
    try:
        return Sample(name, labels, float(text))
    except ValueError:
        return None


def _parse_labels(text: str) -> dict[str, str] | None:
    """Label values by name, unescaped; `None` where they are malformed or repeated."""
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None or match["name"] in labels:
            return None
        value = match["value"]
        labels[match["name"]] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        position = match.end()
    return labels


def _unescape(match: re.Match[str]) -> str:
    return _UNESCAPED.get(match[1], match[0])


def _require_exposition(body: bytes) -> None:
    """Raise `NotAnExpositionError` unless one of the first lines is a comment or a sample of the format."""
    head = body[:65536].strip()
    if not head:
        raise NotAnExpositionError("the body is empty")
    if (kind := {b"<": "HTML or XML", b"{": "JSON", b"[": "JSON"}.get(head[:1])) is not None:
        raise NotAnExpositionError(f"the body is {kind}, not Prometheus metrics")
    lines = head.split(b"\n", _LINES_LOOKED_AT)[:_LINES_LOOKED_AT]
    if not any(_COMMENT.match(line) or _parse_line("", line) for line in lines):
        raise NotAnExpositionError("the body is not Prometheus metrics")
