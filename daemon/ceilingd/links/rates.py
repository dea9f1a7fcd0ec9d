"""One-way payload rate of a PCIe link from its generation and width."""

from __future__ import annotations

_LANE_BYTES_PER_SECOND = {
    # Transfers per second x share of payload bits / 8. PCI Express Base Specification: 8b/10b up to Gen2, 128b/130b from
    # Gen3 to Gen5, FLIT mode with 242 of 256 bytes usable in Gen6 (PAM4).
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
WIDTHS_LANES = (1, 2, 4, 8, 12, 16, 32)
"""Widths that a PCIe link can train to."""
GENERATIONS = tuple(_LANE_BYTES_PER_SECOND)


def link_bandwidth(generation: int, width_lanes: int) -> float:
    """Bytes per second one way, before packet overhead: Gen4 x16 is 31.5e9, Gen1 x16 is 4.0e9.

    Raises `ValueError` for a generation that is not 1 to 6 or a width that no link has."""
    if generation not in _LANE_BYTES_PER_SECOND:
        raise ValueError(f"generation: PCIe has generations 1 to 6, not {generation}")
    if width_lanes not in WIDTHS_LANES:
        raise ValueError(f"width_lanes: a PCIe link has 1, 2, 4, 8, 12, 16 or 32 lanes, not {width_lanes}")
    return _LANE_BYTES_PER_SECOND[generation] * width_lanes
