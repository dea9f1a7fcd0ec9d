"""Every metric is declared the way Prometheus users expect, and what was released stays as it is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from ceilingd.collectors import FAMILIES
from ceilingd.collectors.family import Family
from ceilingd.collectors.markdown import metrics_markdown
from ceilingd.records import DurationHistogram, Snapshot
from support import snapshots

ROOT = Path(__file__).parents[3]
UNITS = ("seconds", "bytes", "watts", "joules", "celsius", "hertz", "ratio", "lanes", "tokens", "requests")
WITHOUT_UNIT = (
    "process_open_fds",
    "process_max_fds",
    "ceilingd_config_last_reload_successful",
    "ceilingd_decode_accept_length",
    "ceilingd_decode_bottleneck",
    "ceilingd_decode_ceiling_unavailable",
    "ceilingd_gpu_clocks_event_reason",
    "ceilingd_gpu_nvlink_active_links",
    "ceilingd_gpu_performance_state",
    "ceilingd_gpu_up",
    "ceilingd_nvml_up",
    "ceilingd_observation_rejected_total",
    "ceilingd_pcie_link_generation",
    "ceilingd_pcie_link_generation_max",
    "ceilingd_pcie_link_state",
    "ceilingd_pcie_link_transitions_total",
    "ceilingd_pcie_replays_total",
    "ceilingd_server_gpu",
    "ceilingd_server_up",
    "ceilingd_source_errors_total",
    "ceilingd_source_samples_total",
    "ceilingd_source_up",
)
"""Flags, states and counts: a new metric with a quantity has its unit in its name."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_declaration_follows_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"(ceilingd|process)_[a-z0-9]+(_[a-z0-9]+)*", family.name)
    assert (family.kind == "counter") == family.name.endswith("_total")
    assert (family.kind == "info") == family.name.endswith("_info")
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in family.labels)
    assert "le" not in family.labels
    assert len(set(family.labels)) == len(family.labels)
    assert family.help[0].isupper() or family.help[0].isdigit()
    assert family.help.endswith(".")
    assert "\n" not in family.help
    if family.kind != "info":
        stem = re.sub(r"_(total|per_second)$|(?<=_hertz)$", "", family.name)
        has_unit = stem.rpartition("_")[2] in UNITS
        assert has_unit != (family.name in WITHOUT_UNIT)


def test_names_are_unique_also_without_their_suffix() -> None:
    names = [re.sub(r"_(total|info)$", "", family.name) for family in FAMILIES]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize(
    "snapshot", [snapshots.founding(), snapshots.large(), snapshots.bare()], ids=["founding", "large", "bare"]
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_match_their_declaration_and_no_series_appears_twice(family: Family, snapshot: Snapshot) -> None:
    rows = list(family.rows(snapshot))
    assert all(len(values) == len(family.labels) for values, _ in rows)
    assert all(isinstance(text, str) for values, _ in rows for text in values)
    assert all(isinstance(value, DurationHistogram) == (family.kind == "histogram") for _, value in rows)
    assert [values for values, count in Counter(values for values, _ in rows).items() if count > 1] == []


def test_the_large_host_has_a_row_of_every_metric() -> None:
    assert [family.name for family in FAMILIES if family.name != "ceilingd_decode_ceiling_unavailable"] == [
        family.name for family in FAMILIES if list(family.rows(snapshots.large()))
    ]


def test_names_kinds_and_labels_are_those_released() -> None:
    declared = sorted(f"{family.name} {family.kind} {','.join(family.labels)}".rstrip() for family in FAMILIES)
    assert declared == (ROOT / "tests/golden/metric_names.txt").read_text().splitlines()


def test_the_document_is_the_one_that_the_code_makes() -> None:
    assert (ROOT / "daemon/METRICS.md").read_text() == metrics_markdown(), (
        "run: ceilingd metrics --markdown > daemon/METRICS.md"
    )


def test_a_deprecated_metric_says_so() -> None:
    family = Family("ceilingd_x_ratio", "gauge", "Share.", (), lambda _: (), deprecated="0.4")
    assert family.documentation == "Deprecated since 0.4. Share."
