"""The renderer against prometheus_client, which parses what we print and prints the same families itself, and promtool."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_latest_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ceilingd.collectors import FAMILIES
from ceilingd.collectors.family import Family, Row
from ceilingd.exposition import Format, render
from ceilingd.records import DurationHistogram, Snapshot
from support import snapshots

SNAPSHOTS = {"founding": snapshots.founding(), "large": snapshots.large(), "bare": snapshots.bare()}
PARSERS = {"text": parse_text, "openmetrics": parse_openmetrics}
GENERATORS = {"text": generate_latest, "openmetrics": generate_latest_openmetrics}
NASTY = 'C:\\new\n"quoted" {a="b"} , # é 漢 🚀\t'

parametrize_format = pytest.mark.parametrize("format", ["text", "openmetrics"])
parametrize_snapshot = pytest.mark.parametrize("snapshot", SNAPSHOTS.values(), ids=SNAPSHOTS)


class Oracle(Collector):
    """Our families as prometheus_client's own objects."""

    def __init__(self, families: Iterable[Family], snapshot: Snapshot) -> None:
        self._families, self._snapshot = tuple(families), snapshot

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            name = family.name
            if family.kind in ("counter", "info"):
                name = name.removesuffix("_total" if family.kind == "counter" else "_info")
            metric = Metric(name, family.documentation, family.kind)
            for values, value in family.rows(self._snapshot):
                labels = dict(zip(family.labels, values, strict=True))
                if isinstance(value, DurationHistogram):
                    bounds = (*value.bounds, math.inf)
                    for bound, count in zip(bounds, value.counts, strict=True):
                        metric.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
                    metric.add_sample(f"{name}_count", labels, value.counts[-1])
                    metric.add_sample(f"{name}_sum", labels, value.sum_seconds)
                else:
                    metric.add_sample(family.name, labels, value)
            if metric.samples:
                yield metric


def families_of(text: bytes, format: Format) -> list[tuple[object, ...]]:
    """(name, type, help, samples) of each family, in order."""
    return [
        (metric.name, metric.type, metric.documentation, [(s.name, s.labels, s.value) for s in metric.samples])
        for metric in PARSERS[format](text.decode())
    ]


def one(rows: Iterable[Row], labels: tuple[str, ...] = (), **declaration: str) -> tuple[Family, ...]:
    """One family with these rows."""
    kept = tuple(rows)
    return (
        Family(declaration.get("name", "ceilingd_x_ratio"), "gauge", declaration.get("help", "X."), labels, lambda _: kept),
    )


@parametrize_format
@parametrize_snapshot
def test_prometheus_client_prints_the_same(snapshot: Snapshot, format: Format) -> None:
    registry = CollectorRegistry()
    registry.register(Oracle(FAMILIES, snapshot))
    ours = families_of(render(FAMILIES, snapshot, format), format)
    assert len(ours) > 5
    assert ours == families_of(GENERATORS[format](registry), format)


@parametrize_snapshot
def test_both_formats_hold_the_same_samples(snapshot: Snapshot) -> None:
    text, openmetrics = (
        [line for line in render(FAMILIES, snapshot, format).splitlines() if not line.startswith(b"#")]
        for format in ("text", "openmetrics")
    )
    assert text == openmetrics


@parametrize_snapshot
def test_promtool_finds_nothing_to_complain_about(snapshot: Snapshot) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is not installed: `make test` installs it (Debian package prometheus)"
    result = subprocess.run(
        [promtool, "check", "metrics"], input=render(FAMILIES, snapshot, "text"), capture_output=True, check=False
    )
    assert (result.returncode, result.stdout.decode(), result.stderr.decode()) == (0, "", "")


def test_eight_gpus_and_two_servers_stay_below_1500_series() -> None:
    lines = render(FAMILIES, SNAPSHOTS["large"], "text").splitlines()
    assert 500 < sum(not line.startswith(b"#") for line in lines) < 1500


def test_openmetrics_ends_with_its_mark_and_text_does_not() -> None:
    assert render((), SNAPSHOTS["bare"], "openmetrics") == b"# EOF\n"
    assert render((), SNAPSHOTS["bare"], "text") == b""


def test_a_family_without_rows_is_left_out() -> None:
    assert render(one(()), SNAPSHOTS["bare"], "text") == b""


@parametrize_format
def test_any_label_value_survives(format: Format) -> None:
    [(_, _, _, samples)] = families_of(render(one([((NASTY, ""), 1)], ("a", "b")), SNAPSHOTS["bare"], format), format)
    assert samples == [("ceilingd_x_ratio", {"a": NASTY, "b": ""}, 1)]


@parametrize_format
def test_any_help_survives(format: Format) -> None:
    [(_, _, text, _)] = families_of(render(one([((), 1)], help='A "b" \\ c.'), SNAPSHOTS["bare"], format), format)
    assert text == 'A "b" \\ c.'


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert b'{a="/models/?"} 1.0\n' in render(one([(("/models/\udcff",), 1)], ("a",)), SNAPSHOTS["bare"], "text")


@parametrize_format
@pytest.mark.parametrize("value", [0, -0.0, 1, 31.5e9, 1e22, 5e-324, -1234567.875, 2**53, 0.1, 1 / 3])
def test_numbers_keep_every_digit(value: float, format: Format) -> None:
    [(_, _, _, [(_, _, parsed)])] = families_of(render(one([((), value)]), SNAPSHOTS["bare"], format), format)
    assert parsed == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_absent(value: float) -> None:
    assert render(one([((), value)]), SNAPSHOTS["bare"], "text") == b""


def test_the_same_labels_of_another_metric_are_another_series() -> None:
    first, second = one([(("1",), 1)], ("a",)), one([(("1",), 2)], ("a",), name="ceilingd_y_ratio")
    assert b'ceilingd_y_ratio{a="1"} 2.0\n' in render((*first, *second), SNAPSHOTS["bare"], "text")
