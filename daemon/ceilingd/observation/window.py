"""What is remembered of a server between readings, and when a rank begins to decode, pauses and rests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ceilingd.observation.growth import decoded, ended, growth, prefilled, reported, rewritten, was_decoding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ceilingd.records import DecodeSource, EngineIdentity, EngineRank, EngineReading

STEPS_PER_SNAPSHOT = 15
"""Decode steps between two writes of the decode moments (SGLang 0.5.17 to 0.5.23)."""
STEPS_PER_REPORT = 40
"""Decode steps between two refreshes of the gauges, where `decode_log_interval` is not known."""


@dataclass(frozen=True, slots=True)
class ObservationSettings:
    """How long the window is and what is enough to speak."""

    window_seconds: float = 10.0
    window_max_seconds: float = 30.0
    """The window grows up to this while it holds too few steps: rounds of a second exist."""
    warm_up_seconds: float = 1.9
    """No observation from a shorter window; just under two of the default sample intervals."""
    steps_min: int = 20
    """An accept length from fewer verify steps is noise."""
    rate_steps_min: int = 10
    """A rate from fewer steps is noise: where they begin and end in the window is known to one step."""
    quiet_seconds: float = 2.5
    """Without growth for longer than this, and than the engine needs between two reports, a rank is idle."""
    still_seconds: float = 0.9
    """The same where the engine counts every step; just under the default sample interval."""
    recent_seconds: float = 1.4
    """A window cut short because the batch changed is not shorter than this: at least two of the default sample intervals."""
    batch_tolerance: float = 0.1
    """Batches that differ by less, relative, count as one."""
    spacing_seconds: float = 0.25
    """Readings closer together than this share a place in the window, which bounds its size."""


DEFAULTS = ObservationSettings()


@dataclass(frozen=True, slots=True)
class Point:
    """One reading of one rank, and what happened between the point before and this one."""

    seconds: float
    """When the rank had these sums, on our clock."""
    rank: EngineRank
    sharp: bool = False
    """`seconds` is when the engine wrote the sums, not when they were read."""
    mixed: bool = False
    """A prompt was being processed for some of the time."""
    changed: bool = False
    """A request came or went."""
    prefilling: bool = False
    """A prompt was begun, and no step since shows that it is through."""
    batch_known: bool = False
    """The running gauge was refreshed since a request last came or went."""


@dataclass(frozen=True, slots=True)
class RankWindow:
    """One rank's readings, oldest first. While it is idle only the newest, to compare the next one with."""

    points: tuple[Point, ...]
    stirred_seconds: float
    """When any of its numbers last moved."""
    grown_seconds: float | None = None
    """When decoding was last proven; `None` while it is idle."""
    idle: bool = False
    """Provably idle, as opposed to nobody knows."""


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """What is remembered of one server between readings; bounded. The caller drops it when the server goes silent."""

    decode_source: DecodeSource | None = None
    start_time: float | None = None
    ranks: tuple[RankWindow, ...] = ()


def advance(
    before: RankWindow | None, rank: EngineRank, reading: EngineReading, settings: ObservationSettings, *, waited: bool = False
) -> RankWindow:
    """The rank's window with one more reading. It begins anew when the rank was idle, and ends when it falls idle.

    `waited`: a prompt was begun on this rank or on one that it steps together with."""
    now, source = reading.monotonic_seconds, reading.decode_source
    if before is None:
        return RankWindow((_first_point(rank, now, settings),), now)
    last = before.points[-1]
    point = _next_point(last, rank, reading, waited)
    grew = decoded(last.rank, rank, source)
    stirred = now if grew or _stirred(last.rank, rank) else before.stirred_seconds
    alone = RankWindow((point,), stirred, idle=not grew and _rests(point, now - stirred, reading, settings))
    # The counters alone can disprove a running gauge of 0: a lone request reads 0 until the first report after its prefill.
    says_idle = rank.running_requests == 0 and not (grew and source == "counters")
    if before.grown_seconds is None:
        if says_idle or not grew:
            return alone
        # Where in an interval decoding began is not known, so the window begins behind it, unless it went on all the time.
        return RankWindow((last, point) if was_decoding(last.rank, rank, source) else (point,), stirred, now)
    if says_idle and source != "decode_moments":
        return alone
    if not grew and now - before.grown_seconds > _quiet_limit(before.points, point, reading, settings):
        return alone
    # The moments leave idle time out: their window outlives a short pause, in which nothing is shown.
    points = before.points
    if len(points) > 1 and points[-1].seconds - points[-2].seconds < settings.spacing_seconds:
        points = points[:-1]
        point = replace(point, mixed=point.mixed or last.mixed, changed=point.changed or last.changed)
    grown = now if grew else before.grown_seconds
    return RankWindow(_trim((*points, point), source, settings), stirred, grown, idle=says_idle and alone.idle)


def _first_point(rank: EngineRank, now: float, settings: ObservationSettings) -> Point:
    age = rank.snapshot_age_seconds
    if age is not None and age <= settings.quiet_seconds:
        return Point(now - age, rank, sharp=True)
    return Point(now, rank)


def _next_point(last: Point, rank: EngineRank, reading: EngineReading, waited: bool) -> Point:
    """The point after `last`."""
    source = reading.decode_source
    seconds, sharp = _instant(last, rank, reading)
    began = prefilled(last.rank, rank)
    match source:
        case "decode_moments":
            through = rewritten(last.rank, rank)
        case "counters":
            # The step under way when a prefill starts is counted after it.
            under_way = 1 if last.changed else 0
            through = growth(last.rank.decode_steps_total, rank.decode_steps_total) > under_way
        case "gauges":
            through = reported(last.rank, rank)
    changed = began or ended(last.rank, rank)
    if not changed and last.rank.running_requests != rank.running_requests:
        # The gauge says it late, and again, where counters said it before. Beside other DP ranks no counter says that a
        # request of this one ended, and for one that was aborted none does anywhere.
        changed = last.batch_known or rank.finished_tokens_total is None
    # Beside other DP ranks only a gauge just refreshed is believed.
    still_known = last.batch_known and rank.finished_tokens_total is not None
    happened = began or last.prefilling or ended(last.rank, rank)
    return Point(
        seconds,
        rank,
        sharp,
        mixed=began or waited or last.prefilling,
        changed=changed,
        prefilling=began or (waited and rank.running_requests != 0) or (last.prefilling and not through),
        batch_known=not happened and (reported(last.rank, rank) or (still_known and not changed)),
    )


def _instant(last: Point, rank: EngineRank, reading: EngineReading) -> tuple[float, bool]:
    """When the rank had these sums, and whether that is when the engine wrote them.

    A snapshot is read up to 15 steps after it was written. Its age is told by one clock of the engine's host; if that clock
    was set in between, the age is wrong, and betrays itself: what is new was written after the reading before."""
    now = reading.monotonic_seconds
    if reading.decode_source != "decode_moments":
        return now, False
    if not rewritten(last.rank, rank):
        return last.seconds, last.sharp
    age = rank.snapshot_age_seconds
    if age is not None and now - age >= last.seconds:
        return now - age, True
    return now, False


def _stirred(before: EngineRank, after: EngineRank) -> bool:
    """Did anything move that work moves?"""
    return (
        prefilled(before, after)
        or ended(before, after)
        or reported(before, after)
        or (before.running_requests, before.context_tokens) != (after.running_requests, after.context_tokens)
    )


def _rests(point: Point, still_seconds: float, reading: EngineReading, settings: ObservationSettings) -> bool:
    """Is an engine that says 0 running requests believed?

    A prefill reports the batch before its requests join: 0 for a lone one, until the next report. Tokens in the KV cache, or
    a prompt begun of which nothing was seen since, give such a report away; after the longest window it is believed. A server
    that only prefills never decodes."""
    if point.rank.running_requests != 0:
        return False
    prefills_only = reading.identity is not None and reading.identity.disaggregation_mode == "prefill"
    if prefills_only or still_seconds > settings.window_max_seconds:
        return True
    if reading.decode_source == "decode_moments":
        return not point.prefilling
    told = not point.prefilling if point.rank.context_tokens is None else point.rank.context_tokens == 0
    # Where no counter of tokens would disprove it, it has to stand for a while.
    return told and still_seconds > (settings.still_seconds if reading.decode_source == "counters" else settings.quiet_seconds)


def _quiet_limit(points: Sequence[Point], newest: Point, reading: EngineReading, settings: ObservationSettings) -> float:
    """Seconds without growth after which a rank is idle: a little more than its engine needs between two signs of life."""
    rank = points[-1].rank
    expected = 0.0
    match reading.decode_source:
        case "decode_moments":
            if newest.rank.running_requests and rank.moments is not None and rank.moments.steps:
                expected = STEPS_PER_SNAPSHOT * rank.moments.sum_seconds / rank.moments.steps
        case "counters":
            steps = growth(points[0].rank.decode_steps_total, rank.decode_steps_total)
            if steps > 0 and not newest.prefilling:
                return max(settings.still_seconds, 3 * (points[-1].seconds - points[0].seconds) / steps)
        case "gauges":
            expected = report_seconds(rank, reading.identity)
    return min(max(settings.quiet_seconds, 1.25 * expected), settings.window_max_seconds)


def report_seconds(rank: EngineRank, identity: EngineIdentity | None) -> float:
    """How long the decode steps took that the gauges of this rank tell about; 0 where they tell nothing."""
    if not rank.tokens_per_second:
        return 0.0
    steps = (identity and identity.decode_log_interval) or STEPS_PER_REPORT
    tokens_per_step = (rank.running_requests or 1.0) * max(rank.accept_length or 1.0, 1.0)
    return steps * tokens_per_step / rank.tokens_per_second


def _trim(points: tuple[Point, ...], source: DecodeSource, settings: ObservationSettings) -> tuple[Point, ...]:
    """Without the oldest points that neither the window's length nor the number of steps still needs."""
    newest = points[-1]
    while len(points) > 2 and newest.seconds - points[1].seconds >= settings.window_seconds:
        too_long = newest.seconds - points[0].seconds > settings.window_max_seconds
        if not too_long and not _enough(points[1:], source, settings):
            break
        points = points[1:]
    return points


def _enough(points: Sequence[Point], source: DecodeSource, settings: ObservationSettings) -> bool:
    first, last = points[0].rank, points[-1].rank
    match source:
        case "decode_moments":
            if first.moments is None or last.moments is None:
                return False
            return last.moments.steps - first.moments.steps >= settings.steps_min
        case "counters":
            return growth(first.decode_steps_total, last.decode_steps_total) >= settings.steps_min
        case "gauges":
            return sum(reported(one.rank, two.rank) for one, two in pairwise(points)) >= 2


def mean_context(points: Sequence[Point]) -> float | None:
    """Context tokens over these readings, which grow while requests decode; `None` where none tells."""
    known = [point.rank.context_tokens for point in points if point.rank.context_tokens]
    return sum(known) / len(known) if known else None
