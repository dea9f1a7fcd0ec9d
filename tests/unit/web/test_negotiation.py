"""What a client gets for the headers that clients really send, and for those that nobody should."""

from __future__ import annotations

import pytest

from ceilingd.web.negotiation import accepts_gzip, choose_format

PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3_5 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_5_PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7," + PROMETHEUS_3_5
)
PROMETHEUS_TEXT_ONLY = "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        (PROMETHEUS_2_42, "openmetrics"),
        (PROMETHEUS_3_5, "openmetrics"),
        (PROMETHEUS_3_5_PROTOBUF, "openmetrics"),
        (PROMETHEUS_TEXT_ONLY, "text"),
        (BROWSER, "text"),
        (None, "text"),
        ("", "text"),
        ("*/*", "text"),
        ("application/openmetrics-text", "openmetrics"),
        ("Application/OpenMetrics-Text; Version=1.0.0; Charset=UTF-8", "openmetrics"),
        ('application/openmetrics-text; version="1.0.0"', "openmetrics"),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.8", "text"),
        ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0", "openmetrics"),
        ("application/openmetrics-text;version=2.0.0", "text"),
        ("application/openmetrics-text;q=0", "text"),
        ("application/openmetrics-text;q=nan", "text"),
        ("application/openmetrics-text;q=x", "text"),
        ("application/openmetrics-text;q=7", "text"),
        (";;,=;q,,;=", "text"),
    ],
)
def test_the_format(accept: str | None, format: str) -> None:
    assert choose_format(accept) == format


@pytest.mark.parametrize(
    ("accept_encoding", "gzip"),
    [
        ("gzip", True),
        ("gzip, deflate, br, zstd", True),
        ("GZIP;q=0.5", True),
        ("*", True),
        ("identity", False),
        ("identity, gzip;q=0.5", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("br", False),
        ("", False),
        (None, False),
    ],
)
def test_the_encoding(accept_encoding: str | None, gzip: bool) -> None:
    assert accepts_gzip(accept_encoding) is gzip
