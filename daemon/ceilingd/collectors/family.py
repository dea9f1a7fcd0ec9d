"""What a metric is: a declaration and a pure function from the snapshot to its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ceilingd.records import DurationHistogram, Snapshot

Kind = Literal["gauge", "counter", "info", "histogram"]
Value: TypeAlias = float | DurationHistogram
Row: TypeAlias = tuple[tuple[str, ...], Value]
"""Label values in the order of the family's label names, and the value in base units."""
Rows: TypeAlias = Callable[[Snapshot], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is the name of its series, with `_total` or `_info`; a histogram's series add `_bucket` and so on.

    What is not known gives no row: a family never yields 0, NaN or an old value in its place."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    rows: Rows
    deprecated: str | None = None
    """The version that deprecated it; shown in HELP and METRICS.md."""

    @property
    def documentation(self) -> str:
        """The help text as it is shown."""
        return self.help if self.deprecated is None else f"Deprecated since {self.deprecated}. {self.help}"


def flag(condition: bool) -> float:
    """1 or 0, as Prometheus spells true and false."""
    return 1.0 if condition else 0.0
