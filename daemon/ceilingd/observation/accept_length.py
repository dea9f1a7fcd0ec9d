"""Which accept lengths are possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ceilingd.records import EngineIdentity


def accept_limit(identity: EngineIdentity | None) -> float:
    """Most tokens a request can gain in one step: 1 without speculation, infinite where nobody says."""
    if identity is None or not identity.complete:
        return float("inf")
    if identity.speculative_algorithm is None:
        return 1.0
    drafted, steps = identity.speculative_num_draft_tokens, identity.speculative_num_steps
    return min(drafted or float("inf"), steps + 1 if steps else float("inf"))


def within(accept_length: float, limit: float, slack: float = 1e-6) -> float | None:
    """The accept length if it is possible; at the edges, within the relative `slack`, the possible one; else `None`."""
    if not 1 - slack <= accept_length <= limit * (1 + slack):
        return None
    return min(max(accept_length, 1.0), limit)
