"""An observation from SGLang's decode moments: sums over decode steps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ceilingd.observation.accept_length import within
from ceilingd.observation.growth import growth, prefilled
from ceilingd.observation.window import STEPS_PER_SNAPSHOT, mean_context
from ceilingd.records import DecodeObservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ceilingd.observation.window import ObservationSettings, Point


def from_moments(
    points: Sequence[Point], limit: float, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    """Batch, round and accept length are ratios of growths. Tokens per second are those of wall-clock time: prefill, and a
    pause too short to end the window, are in it."""
    points = _since_the_batch_changed(points, settings)
    first, last = points[0].rank, points[-1].rank
    if first.moments is None or last.moments is None:
        return None, []
    steps = last.moments.steps - first.moments.steps
    batches = last.moments.sum_batch - first.moments.sum_batch
    decoding_seconds = last.moments.sum_seconds - first.moments.sum_seconds
    tokens = last.moments.sum_tokens - first.moments.sum_tokens
    if batches <= 0 or decoding_seconds <= 0:
        return None, []
    reasons = []
    accept_length: float | None = 1.0
    if limit > 1:
        accept_length = within(tokens / batches, limit) if steps >= settings.steps_min else None
        if accept_length is None:
            reasons.append("too_few_steps" if steps < settings.steps_min else "accept_length_out_of_range")
    seconds, share = _time(points, steps, decoding_seconds)
    observation = DecodeObservation(
        dp_rank=last.dp_rank,
        decode_source="decode_moments",
        window_seconds=decoding_seconds if seconds is None else seconds,
        steps=steps,
        running_requests=batches / steps,
        context_tokens=mean_context(points),
        accept_length=accept_length,
        tokens_per_second=None if seconds is None else tokens / seconds,
        round_seconds=decoding_seconds / steps,
        prefill_share_ratio=share,
    )
    return observation, reasons


def settled(points: Sequence[Point], settings: ObservationSettings) -> bool:
    """Are there moments of enough steps? They are exact however short the time: a lone request of some seconds is seen."""
    return _batch(points[0], points[-1])[0] >= settings.steps_min


def _since_the_batch_changed(points: Sequence[Point], settings: ObservationSettings) -> Sequence[Point]:
    """The newest points over which the batch stayed the same; where it never does, as few as are enough to speak."""
    start = len(points) - 2
    while start > 0 and not (
        points[-1].seconds - points[start].seconds >= settings.recent_seconds
        and _batch(points[start], points[-1])[0] >= settings.steps_min
    ):
        start -= 1
    _, recent = _batch(points[start], points[-1])
    while start > 0:
        steps, batch = _batch(points[start - 1], points[start])
        if steps > 0 and abs(batch - recent) > settings.batch_tolerance * recent:
            break
        start -= 1
    return points[start:]


def _batch(one: Point, two: Point) -> tuple[float, float]:
    """Steps between two points, and their mean batch."""
    before, after = one.rank.moments, two.rank.moments
    if before is None or after is None or after.steps <= before.steps:
        return 0.0, 0.0
    steps = after.steps - before.steps
    return steps, (after.sum_batch - before.sum_batch) / steps


def _time(points: Sequence[Point], steps: float, decoding_seconds: float) -> tuple[float | None, float | None]:
    """Seconds of wall-clock time that the window covers, and the share of prefill in it; `None` where they are not known."""
    first, last = points[0], points[-1]
    told = last.rank.prefill_tokens_total is not None
    paused = any(point.rank.running_requests == 0 for point in points)
    if told and not paused and not prefilled(first.rank, last.rank):
        return decoding_seconds, None if last.rank.prefill_busy_seconds_total is None else 0.0
    sharp = first.sharp and last.sharp
    # Seen up to 15 steps late at either end, the time is no good unless it is much longer.
    known = sharp or steps >= 4 * STEPS_PER_SNAPSHOT
    seconds = max(last.seconds - first.seconds, decoding_seconds)
    if last.rank.prefill_busy_seconds_total is None or paused:
        return seconds if known else None, None
    share = growth(first.rank.prefill_busy_seconds_total, last.rank.prefill_busy_seconds_total) / seconds
    # The engine counts a prefill as busy only between two prefill launches, so that a lone one shows as time missing from
    # the decode steps; one step is left out next to it.
    missing = seconds - decoding_seconds
    if sharp and told and missing > 2 * decoding_seconds / steps:
        share = max(share, missing / seconds)
    return seconds if known else None, min(max(share, 0.0), 1.0)
