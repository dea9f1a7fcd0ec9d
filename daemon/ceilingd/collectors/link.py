"""The PCIe links: what they run at, what is expected of them, the judgement, and what they carry.

Where the platform gives no meaningful link (state `unsupported`), the series about the link's setting are absent and only the
state remains. Traffic and replays are measured by the device whatever the link says, so they are there wherever it gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ceilingd.collectors.family import Family, Row, Rows, flag
from ceilingd.collectors.gpu import GPU, each_gpu, gpu_labels, gpu_readings
from ceilingd.links.rates import GENERATIONS, WIDTHS_LANES, link_bandwidth
from ceilingd.records import LINK_STATES, GpuInfo, LinkStatus, Snapshot


def link_labels(link: LinkStatus) -> tuple[str, str]:
    """The values of `GPU`."""
    return str(link.index), link.uuid


def bandwidth(generation: int | None, width_lanes: int | None) -> float | None:
    """Bytes per second one way; `None` unless both are values that a link can have."""
    if generation not in GENERATIONS or width_lanes not in WIDTHS_LANES:
        return None
    return link_bandwidth(generation, width_lanes)


def _each_link(value: Callable[[LinkStatus], float | None]) -> Rows:
    """One row for each link with a meaningful setting that has this value."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for link in snapshot.links:
            present = value(link) if link.state != "unsupported" else None
            if present is not None:
                yield link_labels(link), present

    return rows


def _each_traffic(value: Callable[[LinkStatus], float | None]) -> Rows:
    """One row for each GPU whose traffic is measured."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for link in snapshot.links:
            present = value(link)
            if present is not None:
                yield link_labels(link), present

    return rows


def _each_limit(
    hardware: tuple[tuple[str, Callable[[GpuInfo], float | None]], ...], expected: Callable[[LinkStatus], float | None]
) -> Rows:
    """One row for each known limit of a link: those of the hardware, and what is expected of it."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        unsupported = {link.uuid for link in snapshot.links if link.state == "unsupported"}
        for gpu in gpu_readings(snapshot):
            if gpu.info.uuid in unsupported:
                continue
            for limit, value in hardware:
                present = value(gpu.info)
                if present is not None:
                    yield (*gpu_labels(gpu), limit), present
        for link in snapshot.links:
            present = expected(link)
            if present is not None and link.uuid not in unsupported:
                yield (*link_labels(link), "expected"), present

    return rows


def _states(snapshot: Snapshot) -> Iterator[Row]:
    for link in snapshot.links:
        for state in LINK_STATES:
            yield (*link_labels(link), state), flag(state == link.state)


def _busy_seconds(snapshot: Snapshot) -> Iterator[Row]:
    for link in snapshot.links:
        if link.state != "unsupported":
            for generation, width_lanes, seconds in link.busy_seconds:
                yield (*link_labels(link), str(generation), str(width_lanes)), seconds


FAMILIES = (
    Family(
        "ceilingd_pcie_link_state",
        "gauge",
        "1 for the state of the link, 0 for the others. Only degraded is a fault: below the expected link under load.",
        (*GPU, "state"),
        _states,
    ),
    Family(
        "ceilingd_pcie_link_generation",
        "gauge",
        "PCIe generation now. An idle GPU lowers it to save power.",
        GPU,
        _each_link(lambda link: link.generation),
    ),
    Family(
        "ceilingd_pcie_link_generation_max",
        "gauge",
        "Highest generation: of the GPU itself, of the GPU in this system, and what is expected under load.",
        (*GPU, "limit"),
        _each_limit(
            (("gpu", lambda info: info.link_generation_max_gpu), ("system", lambda info: info.link_generation_max_system)),
            lambda link: link.generation_expected,
        ),
    ),
    Family("ceilingd_pcie_link_width_lanes", "gauge", "Lanes in use now.", GPU, _each_link(lambda link: link.width_lanes)),
    Family(
        "ceilingd_pcie_link_width_max_lanes",
        "gauge",
        "Most lanes: of the GPU in this system (NVML tells no other), and what is expected under load.",
        (*GPU, "limit"),
        _each_limit((("system", lambda info: info.link_width_max_lanes),), lambda link: link.width_expected_lanes),
    ),
    Family(
        "ceilingd_pcie_link_bandwidth_bytes_per_second",
        "gauge",
        "Payload rate of the link one way at its present generation and width, before packet overhead.",
        GPU,
        _each_link(lambda link: bandwidth(link.generation, link.width_lanes)),
    ),
    Family(
        "ceilingd_pcie_link_bandwidth_max_bytes_per_second",
        "gauge",
        "Payload rate of the link one way: at most in this system, and as expected under load.",
        (*GPU, "limit"),
        _each_limit(
            (("system", lambda info: bandwidth(info.link_generation_max_system, info.link_width_max_lanes)),),
            lambda link: bandwidth(link.generation_expected, link.width_expected_lanes),
        ),
    ),
    Family(
        "ceilingd_pcie_link_transitions_total",
        "counter",
        "Changes of generation or width that were sampled.",
        GPU,
        _each_link(lambda link: link.transitions_total),
    ),
    Family(
        "ceilingd_pcie_link_degraded_seconds_total",
        "counter",
        "Time in the state degraded.",
        GPU,
        _each_link(lambda link: link.degraded_seconds_total),
    ),
    Family(
        "ceilingd_gpu_busy_seconds_total",
        "counter",
        "Time with work at each setting of the link: exact at any scrape interval.",
        (*GPU, "generation", "width"),
        _busy_seconds,
    ),
    Family(
        "ceilingd_pcie_transmit_bytes_per_second",
        "gauge",
        "PCIe traffic from the GPU, last reading; counts packet overhead (about 8 %).",
        GPU,
        _each_traffic(lambda link: link.transmit_bytes_per_second),
    ),
    Family(
        "ceilingd_pcie_receive_bytes_per_second",
        "gauge",
        "PCIe traffic to the GPU, last reading; counts packet overhead (about 8 %).",
        GPU,
        _each_traffic(lambda link: link.receive_bytes_per_second),
    ),
    Family(
        "ceilingd_pcie_transmit_bytes_total",
        "counter",
        "PCIe traffic from the GPU, integrated from the sampled rate since start.",
        GPU,
        _each_traffic(lambda link: link.transmit_bytes_total),
    ),
    Family(
        "ceilingd_pcie_receive_bytes_total",
        "counter",
        "PCIe traffic to the GPU, integrated from the sampled rate since start.",
        GPU,
        _each_traffic(lambda link: link.receive_bytes_total),
    ),
    Family(
        "ceilingd_pcie_replays_total",
        "counter",
        "Packets sent again, as the device counts them. Starts above 0: only growth means something.",
        GPU,
        each_gpu(lambda gpu: gpu.pcie_replays_total),
    ),
)
