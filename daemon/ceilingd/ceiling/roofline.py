"""One term of a round, and how long it takes: the longer of moving its bytes and doing its FLOPs, plus its communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ceilingd.records import Component

if TYPE_CHECKING:
    from collections.abc import Mapping

Bound: TypeAlias = Literal["memory", "compute", "link", "latency", "fixed"]


@dataclass(frozen=True, slots=True)
class Flops:
    """Work of one term on one GPU, by the number format it is done in."""

    by_format: tuple[tuple[str, float], ...] = ()

    @property
    def total(self) -> float:
        return sum(flops for _, flops in self.by_format)


def compute_seconds(flops: Flops, matrix_flops_per_second: Mapping[str, float]) -> float:
    """Time of the FLOPs at the GPU's dense peak of each format.

    A GPU without fp8 or fp4 units widens such weights and multiplies them in bf16; a format whose rate is not known
    takes no time here, so it is never the bound. 1e12 bf16 FLOPs on an A6000 (154.8e12): 6.46 ms."""
    seconds = 0.0
    for number_format, count in flops.by_format:
        rate = matrix_flops_per_second.get(number_format)
        if rate is None and number_format in ("fp8", "fp4"):
            rate = matrix_flops_per_second.get("bf16")
        if rate is not None:
            seconds += count / rate
    return seconds


@dataclass(frozen=True, slots=True)
class Term:
    """One component before the memory bandwidth is fixed. All quantities are per GPU and round."""

    name: str
    kind: Literal["memory", "link", "fixed"]
    """Which bytes it reports: those through memory, or those over the link."""
    count: float = 1
    memory_bytes: float = 0.0
    flops: float = 0.0
    compute_seconds: float = 0.0
    link_bytes: float = 0.0
    link_seconds: float = 0.0
    latency_seconds: float = 0.0
    given_seconds: float | None = None
    """An explicit time, which replaces the model's and depends on no hardware."""

    def at(self, memory_bandwidth_bytes_per_second: float) -> Component:
        """The component at this memory bandwidth: `max(bytes / bandwidth, compute) + link + latency`.

        25.625e9 bytes at 768e9 bytes/s, 0.69 ms of compute: 33.37 ms, bound by memory."""
        memory_seconds = self.memory_bytes / memory_bandwidth_bytes_per_second
        seconds = max(memory_seconds, self.compute_seconds) + self.link_seconds + self.latency_seconds
        return Component(
            name=self.name,
            bytes_per_gpu=self.link_bytes if self.kind == "link" else self.memory_bytes,
            flops_per_gpu=self.flops,
            count=self.count,
            seconds=seconds if self.given_seconds is None else self.given_seconds,
            bound=self._bound(memory_seconds),
        )

    def _bound(self, memory_seconds: float) -> Bound:
        if self.kind == "fixed" or self.given_seconds is not None:
            return "fixed"
        if self.kind == "memory" and max(memory_seconds, self.compute_seconds) >= self.link_seconds + self.latency_seconds:
            return "memory" if memory_seconds >= self.compute_seconds else "compute"
        return "link" if self.link_seconds > self.latency_seconds else "latency"
