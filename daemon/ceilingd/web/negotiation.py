"""Which format and encoding a client gets, from its Accept and Accept-Encoding headers (RFC 9110, section 12.5). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ceilingd.exposition import Format

_OPENMETRICS_VERSIONS = ("", "1.0.0")
_TEXT_VERSIONS = ("", "0.0.4")


def choose_format(accept: str | None) -> Format:
    """OpenMetrics for a client that names it and likes it no less than text; else text, even for a client that named neither.

    >>> choose_format("application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    'openmetrics'
    >>> choose_format("text/html,*/*;q=0.8")
    'text'
    """
    openmetrics, text = 0.0, 0.0
    for media_type, parameters, quality in _elements(accept or ""):
        version = parameters.get("version", "")
        if media_type == "application/openmetrics-text" and version in _OPENMETRICS_VERSIONS:
            openmetrics = max(openmetrics, quality)
        elif media_type == "text/plain" and version in _TEXT_VERSIONS:
            text = max(text, quality)
    return "openmetrics" if openmetrics > 0 and openmetrics >= text else "text"


def accepts_gzip(accept_encoding: str | None) -> bool:
    """True for a client that takes gzip and does not like the plain body better."""
    qualities = {coding: quality for coding, _, quality in _elements(accept_encoding or "")}
    gzip = qualities.get("gzip", qualities.get("*", 0.0))
    return gzip > 0 and gzip >= qualities.get("identity", 0.0)


def _elements(header: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """(value, parameters, quality 0 to 1) of each element, in lower case. A quality that is none counts as 0."""
    for element in header.lower().split(","):
        value, *rest = (part.strip() for part in element.split(";"))
        parameters = {name.strip(): text.strip().strip('"') for name, _, text in (part.partition("=") for part in rest)}
        yield value, parameters, _quality(parameters.get("q", "1"))


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
