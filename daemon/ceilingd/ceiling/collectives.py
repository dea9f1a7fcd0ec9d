"""Time of the communication between tensor-parallel ranks, from their number and the slowest link.

Bytes here are what one GPU puts on its link, one way; a group of one rank communicates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ceilingd.ceiling.inputs import AllreduceAlgorithm

NVLINK_ALLREDUCE_LATENCY_SECONDS = 4e-6
"""Custom all-reduce over NVLink: 2 to 5 us."""
PCIE_ALLREDUCE_LATENCY_SECONDS = 8e-6
"""PCIe with peer access, up to 4 ranks: 5 to 10 us. Without peer access, through host memory, 13 to 40 us."""
PCIE_WIDE_ALLREDUCE_LATENCY_SECONDS = 25e-6
"""PCIe with peer access, 8 ranks."""


def default_allreduce_latency(nvlink: bool, ranks: int) -> float:
    """Seconds of one small all-reduce, where nobody measured it. Mark it as assumed."""
    if nvlink:
        return NVLINK_ALLREDUCE_LATENCY_SECONDS
    return PCIE_ALLREDUCE_LATENCY_SECONDS if ranks <= 4 else PCIE_WIDE_ALLREDUCE_LATENCY_SECONDS


@dataclass(frozen=True, slots=True)
class Communication:
    """Operations of one kind: how many, and the bytes that each GPU sends for all of them."""

    count: float
    bytes: float

    def __add__(self, other: Communication) -> Communication:
        return Communication(self.count + other.count, self.bytes + other.bytes)


def allreduces(layer_count: int, hidden: int, tokens: float, ranks: int, algorithm: AllreduceAlgorithm) -> Communication:
    """All-reduces of one forward pass: two per layer and one for the embedding, each of `tokens x hidden` bf16 numbers.

    64 layers, 5120 wide, 4 tokens, 2 ranks: 129 operations of 40,960 bytes; a ring sends 2(n-1)/n = 1 time that."""
    if ranks == 1:
        return Communication(0, 0)
    factor = 2 * (ranks - 1) / ranks if algorithm == "ring" else ranks - 1
    count = 2 * layer_count + 1
    return Communication(count, count * tokens * hidden * 2 * factor)


def logits_gather(vocabulary: int, tokens: float, ranks: int) -> Communication:
    """The gather of the sharded logits at the end of one pass: `tokens x vocabulary` bf16 numbers, (n-1)/n of them sent.

    A vocabulary of 248,320, 4 tokens, 2 ranks: 1 operation, 993,280 bytes."""
    if ranks == 1:
        return Communication(0, 0)
    return Communication(1, tokens * vocabulary * 2 * (ranks - 1) / ranks)


def link_seconds(communication: Communication, link_bandwidth_bytes_per_second: float | None) -> float:
    """Time the bytes take at the link's one-way rate, latency apart: 993,280 bytes over Gen4 x16 (31.5e9): 31.5 us.

    Infinite when there are bytes to send over a link that is not known."""
    if communication.bytes == 0:
        return 0.0
    if link_bandwidth_bytes_per_second is None:
        return math.inf
    return communication.bytes / link_bandwidth_bytes_per_second
