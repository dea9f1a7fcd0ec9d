"""All-reduces, the gather of the logits, and their default latency."""

from __future__ import annotations

import math

import pytest

from ceilingd.ceiling.collectives import Communication, allreduces, default_allreduce_latency, link_seconds, logits_gather


def test_allreduces_of_the_founding_case() -> None:
    assert allreduces(64, 5120, tokens=4, ranks=2, algorithm="ring") == Communication(129, 129 * 40_960)


@pytest.mark.parametrize(("ranks", "ring", "one_shot"), [(2, 1.0, 1), (4, 1.5, 3), (8, 1.75, 7)])
def test_a_ring_sends_less_than_one_shot_from_three_ranks_on(ranks: int, ring: float, one_shot: float) -> None:
    message = 1 * 4096 * 2
    assert allreduces(1, 4096, 1, ranks, "ring").bytes == 3 * message * ring
    assert allreduces(1, 4096, 1, ranks, "one_shot").bytes == 3 * message * one_shot


def test_logits_gather() -> None:
    assert logits_gather(248_320, tokens=4, ranks=2) == Communication(1, 993_280)


def test_one_rank_communicates_nothing() -> None:
    assert allreduces(64, 5120, 4, 1, "ring") == logits_gather(248_320, 4, 1) == Communication(0, 0)


def test_link_seconds() -> None:
    assert link_seconds(Communication(1, 993_280), 31.5e9) == pytest.approx(31.5e-6, rel=2e-3)
    assert link_seconds(Communication(0, 0), None) == 0
    assert link_seconds(Communication(1, 993_280), None) == math.inf


def test_default_latency() -> None:
    assert default_allreduce_latency(nvlink=False, ranks=2) == 8e-6
    assert default_allreduce_latency(nvlink=False, ranks=8) == 25e-6
    assert 2e-6 <= default_allreduce_latency(nvlink=True, ranks=8) <= 5e-6
