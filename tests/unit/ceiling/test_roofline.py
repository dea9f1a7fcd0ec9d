"""What binds a term, and how long it takes."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.roofline import Flops, Term, compute_seconds

A6000 = {"bf16": 154.8e12}
H200 = {"bf16": 989e12, "fp8": 1978e12}


def test_compute_seconds() -> None:
    assert compute_seconds(Flops((("bf16", 1e12),)), A6000) == pytest.approx(6.46e-3, rel=1e-3)


def test_a_gpu_without_fp8_multiplies_in_bf16_and_one_with_it_does_not() -> None:
    flops = Flops((("fp8", 1e12), ("bf16", 1e12)))
    assert compute_seconds(flops, A6000) == 2e12 / 154.8e12
    assert compute_seconds(flops, H200) == pytest.approx(1e12 / 1978e12 + 1e12 / 989e12)


def test_a_format_whose_rate_is_unknown_is_never_the_bound() -> None:
    assert compute_seconds(Flops((("int8", 1e30),)), H200) == 0
    assert compute_seconds(Flops((("bf16", 1e30),)), {}) == 0


def test_memory_and_compute_overlap_and_the_longer_binds() -> None:
    by_memory = Term("weights", "memory", memory_bytes=25.625e9, compute_seconds=0.69e-3).at(768e9)
    assert by_memory.seconds == pytest.approx(33.37e-3, rel=1e-3)
    assert by_memory.bound == "memory"
    by_compute = Term("weights", "memory", memory_bytes=1e9, compute_seconds=5e-3).at(768e9)
    assert (by_compute.seconds, by_compute.bound) == (5e-3, "compute")


def test_communication_comes_on_top() -> None:
    term = Term("draft", "memory", memory_bytes=768e6, link_seconds=1e-4, latency_seconds=2e-4).at(768e9)
    assert term.seconds == pytest.approx(1.3e-3)
    assert (term.bound, term.bytes_per_gpu) == ("memory", 768e6)


@pytest.mark.parametrize(("link", "latency", "bound"), [(2e-3, 1e-3, "link"), (1e-3, 2e-3, "latency"), (0.0, 0.0, "latency")])
def test_what_binds_communication(link: float, latency: float, bound: str) -> None:
    component = Term("allreduce", "link", link_bytes=5e6, link_seconds=link, latency_seconds=latency).at(768e9)
    assert (component.seconds, component.bound, component.bytes_per_gpu) == (link + latency, bound, 5e6)


def test_an_explicit_time_depends_on_nothing() -> None:
    term = Term("weights", "memory", memory_bytes=1e9, compute_seconds=1, given_seconds=2e-3)
    assert term.at(768e9).seconds == term.at(1.0).seconds == 2e-3
    assert term.at(768e9).bound == "fixed"
    assert Term("fixed", "fixed").at(768e9).bound == "fixed"
