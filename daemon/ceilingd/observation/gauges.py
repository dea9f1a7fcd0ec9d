"""An observation from gauges that SGLang refreshes every 40 decode steps, all of them together: one such report tells how
fast those steps were, and how large the batch was at the last of them."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median, median_low
from typing import TYPE_CHECKING

from ceilingd.observation.accept_length import within
from ceilingd.observation.growth import reported
from ceilingd.observation.window import report_seconds
from ceilingd.records import DecodeObservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ceilingd.observation.window import Point
    from ceilingd.records import EngineIdentity, EngineRank


def from_gauges(
    points: Sequence[Point], limit: float, identity: EngineIdentity | None
) -> tuple[DecodeObservation | None, list[str]]:
    """Round and tokens per second come from reports of steps in which no request came or went, of one batch. While there is
    none since the last change, only the batch, context and accept length of the newest report are told."""
    # The first report after idleness divides by the idle time: it opened the window and is not used.
    reports = [
        index for index in range(1, len(points))
        if reported(points[index - 1].rank, points[index].rank)
        and points[index].rank.running_requests and points[index].rank.tokens_per_second
    ]  # fmt: skip
    if not reports:
        return None, []
    newest = points[reports[-1]].rank
    pure: list[Point] = []
    for index in reversed(reports):
        if points[index].rank.running_requests != newest.running_requests or _disturbed(points, index, identity):
            break
        pure.append(points[index])
    used = pure or [points[reports[-1]]]
    reasons = [] if pure else ["mixed_with_prefill"]
    accept_length: float | None = 1.0
    if limit > 1:
        lengths = [point.rank.accept_length for point in used if point.rank.accept_length]
        accept_length = within(fmean(lengths), limit) if lengths else None
        if lengths and accept_length is None:
            reasons.append("accept_length_out_of_range")
    round_seconds = tokens_per_second = None
    if pure:
        tokens_per_second = median(point.rank.tokens_per_second or 0.0 for point in pure)
        rounds = [seconds for seconds in (_round_seconds(point.rank, limit) for point in pure) if seconds is not None]
        if accept_length is not None and newest.running_requests and rounds:
            round_seconds = median(rounds)
            tokens_per_second = newest.running_requests * accept_length / round_seconds
    observation = DecodeObservation(
        dp_rank=newest.dp_rank,
        decode_source="gauges",
        window_seconds=points[-1].seconds - points[0].seconds,
        steps=None,
        running_requests=newest.running_requests,
        context_tokens=_context(used),
        accept_length=accept_length,
        tokens_per_second=tokens_per_second,
        round_seconds=round_seconds,
    )
    return observation, reasons


def _context(points: Sequence[Point]) -> float | None:
    """Tokens held by the running requests: a prefill behind the report has added its prompt to some of these readings."""
    known = [point.rank.context_tokens for point in points if point.rank.context_tokens]
    return median_low(known) if known else None


def _round_seconds(rank: EngineRank, limit: float) -> float | None:
    """Seconds per step of one report; `None` where it lacks what that takes."""
    accept_length = rank.accept_length if limit > 1 else 1.0
    if not (accept_length and rank.running_requests and rank.tokens_per_second):
        return None
    return rank.running_requests * accept_length / rank.tokens_per_second


def _disturbed(points: Sequence[Point], index: int, identity: EngineIdentity | None) -> bool:
    """Did a request come or go during the steps that the report at `index` tells about, as far as anything shows?

    They ended between the reading before and this one, and began so much earlier as they take."""
    began = points[index - 1].seconds - report_seconds(points[index].rank, identity)
    return any(
        two.changed or _prompt_shows(one.rank, two.rank)
        for one, two in pairwise(points[: index + 1])
        if two.seconds > began
    )  # fmt: skip


def _prompt_shows(before: EngineRank, after: EngineRank) -> bool:
    """A prefill refreshes the gauges of load, and not the throughput."""
    return not reported(before, after) and before.context_tokens != after.context_tokens
