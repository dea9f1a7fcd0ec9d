from __future__ import annotations

import pytest

from ceilingd.links.rates import link_bandwidth


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes_per_second"),
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.754), (4, 16, 31.508), (4, 8, 15.754), (5, 16, 63.015), (6, 16, 121.0)],
)
def test_one_way_payload_rate(generation: int, width: int, gigabytes_per_second: float) -> None:
    assert link_bandwidth(generation, width) / 1e9 == pytest.approx(gigabytes_per_second, abs=1e-3)


@pytest.mark.parametrize(
    ("generation", "width", "field"), [(0, 16, "generation"), (7, 16, "generation"), (4, 3, "width_lanes")]
)
def test_impossible_links_are_refused_by_name(generation: int, width: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        link_bandwidth(generation, width)
