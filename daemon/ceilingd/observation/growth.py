"""What two readings of one rank, or of one server, show to have happened between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ceilingd.records import DecodeSource, EngineRank, EngineReading


def tokens_moved(before: EngineReading, after: EngineReading) -> bool:
    """Was any token generated between two readings of one server, as far as its numbers show?"""
    if not _same_sums(before.decode_source, after.decode_source):
        return False
    return any(decoded(one, two, after.decode_source) or ended(one, two) for one, two in _paired(before.ranks, after.ranks))


def sums_fell(
    before_source: DecodeSource, before: Sequence[EngineRank], after_source: DecodeSource, after: Sequence[EngineRank]
) -> bool:
    """Is any sum of any rank smaller than it was? Then the engine started anew between these two readings."""
    return _same_sums(before_source, after_source) and any(_fell(one, two) for one, two in _paired(before, after))


def _same_sums(one: DecodeSource, two: DecodeSource) -> bool:
    """Do these sources count the same things? Counters and gauges both come from `/metrics`; `/v1/loads` has its own sums."""
    return (one == "decode_moments") == (two == "decode_moments")


def _paired(before: Sequence[EngineRank], after: Sequence[EngineRank]) -> list[tuple[EngineRank, EngineRank]]:
    ranks = {rank.dp_rank: rank for rank in before}
    return [(ranks[rank.dp_rank], rank) for rank in after if rank.dp_rank in ranks]


def growth(before: float | None, after: float | None) -> float:
    """How much a sum grew; one that was absent before had not begun to count."""
    return 0.0 if after is None else after - (before or 0.0)


def decoded(before: EngineRank, after: EngineRank, source: DecodeSource) -> bool:
    """Do these two readings prove that the rank decoded between them?"""
    match source:
        case "decode_moments":
            steps = None if before.moments is None else before.moments.steps
            return after.moments is not None and growth(steps, after.moments.steps) > 0
        case "counters":
            return growth(before.decode_tokens_total, after.decode_tokens_total) > 0
        case "gauges":
            return reported(before, after)


def was_decoding(before: EngineRank, after: EngineRank, source: DecodeSource) -> bool:
    """Of two readings with growth between them: was the rank decoding at the first one already?"""
    if not before.running_requests or source == "gauges":
        return False
    if source == "decode_moments":
        return before.moments is not None  # written on idle too: this running count is true
    # A counter's running gauge may be a stale one of an idle engine. But without a prefill nothing starts to decode.
    return before.prefill_tokens_total is not None and not prefilled(before, after)


def reported(before: EngineRank, after: EngineRank) -> bool:
    """Did the engine refresh its decode gauges? A throughput with 15 digits does not repeat itself by chance."""
    return bool(after.tokens_per_second) and (before.tokens_per_second, before.accept_length) != (
        after.tokens_per_second,
        after.accept_length,
    )


def prefilled(before: EngineRank, after: EngineRank) -> bool:
    """Was a prompt begun? The counter moves when a prefill starts: the time it takes may lie after both readings."""
    return growth(before.prefill_tokens_total, after.prefill_tokens_total) > 0


def ended(before: EngineRank, after: EngineRank) -> bool:
    """Did a request end, as far as a counter shows?"""
    return growth(before.finished_tokens_total, after.finished_tokens_total) > 0


def rewritten(before: EngineRank, after: EngineRank) -> bool:
    """Did the scheduler write its snapshot (`/v1/loads`) anew?"""
    return (before.snapshot_timestamp, before.moments) != (after.snapshot_timestamp, after.moments)


def _fell(before: EngineRank, after: EngineRank) -> bool:
    """Is any sum smaller than it was?"""
    sums = ("decode_steps_total", "decode_tokens_total", "finished_tokens_total", "prefill_tokens_total")
    if any(growth(getattr(before, name), getattr(after, name)) < 0 for name in sums):
        return True
    if before.moments is None:
        return False
    if after.moments is None:  # null again: no step since the start
        return before.snapshot_timestamp is not None and after.snapshot_timestamp != before.snapshot_timestamp
    was, now = before.moments, after.moments
    return (
        now.steps < was.steps or now.sum_batch < was.sum_batch or now.sum_seconds < was.sum_seconds
        or now.sum_batch_squared < was.sum_batch_squared or now.sum_batch_seconds < was.sum_batch_seconds
        or now.sum_tokens < was.sum_tokens
    )  # fmt: skip
