"""From consecutive readings of one server, what each of its DP ranks does: accept length, batch, tokens per second, round.

SGLang offers three sources of different worth (`records.DecodeSource`), and none of them tells by itself whether it is still
true. So everything here is a difference between readings over a sliding window, on the clock of the readings, and the rule
is: absent rather than wrong. A rank that does not provably decode has no observation; a quantity that cannot be told apart
from prefill, from idleness or from a batch that changed is `None`.

- Decode moments: SGLang sums batch, seconds and tokens over its decode steps only. Round, batch and accept length are ratios
  of growths, exact whatever else the engine did.
- Counters: steps and tokens, no time and no batch. The round is our time over their steps, which is true only where nothing
  but decoding happened; the batch comes from a gauge that is up to 40 steps old, and is trusted only where no request came or
  went since.
- Gauges: refreshed every 40 decode steps and otherwise sticky. One counts only when it has just been refreshed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ceilingd.records import DecodeObservation

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
    quiet_seconds: float = 2.5
    """Without growth for longer than this, and than the engine needs between two reports, a rank is idle."""
    spacing_seconds: float = 0.25
    """Readings closer together than this share a place in the window, which bounds its size."""


DEFAULTS = ObservationSettings()


@dataclass(frozen=True, slots=True)
class Point:
    """One reading of one rank."""

    seconds: float
    rank: EngineRank
    batch_known: bool = False
    """The running gauge was refreshed since a request last came or went."""


@dataclass(frozen=True, slots=True)
class RankWindow:
    """One rank's readings, oldest first. While it is idle only the newest, to compare the next one with."""

    points: tuple[Point, ...]
    grown_seconds: float | None = None
    """When decoding was last proven; `None` while it is idle."""


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """What is remembered of one server between readings; bounded. The caller drops it when the server goes silent."""

    decode_source: DecodeSource | None = None
    start_time: float | None = None
    ranks: tuple[RankWindow, ...] = ()


def observe(
    window: ObservationWindow, reading: EngineReading, settings: ObservationSettings = DEFAULTS
) -> tuple[ObservationWindow, tuple[DecodeObservation, ...], tuple[str, ...]]:
    """The window with `reading` in it, one observation per rank that provably decodes, and why others were rejected.

    Reasons, each at most once per rank and reading: `counter_reset`, `too_few_steps`, `accept_length_out_of_range`,
    `mixed_with_prefill`, `stale` (gauges that show work nobody sees progress).
    """
    before = {rank_window.points[-1].rank.dp_rank: rank_window for rank_window in window.ranks}
    if _started_anew(window, reading):
        before, rejected = {}, ["counter_reset"]
    else:
        rejected = []
    if reading.decode_source != window.decode_source:
        before = {}
    ranks = []
    observations = []
    for rank in reading.ranks:
        advanced = _advance(before.get(rank.dp_rank), rank, reading, settings)
        ranks.append(advanced)
        observation, reasons = _observation(advanced, reading, settings)
        rejected += reasons
        if observation is not None:
            observations.append(observation)
    return ObservationWindow(reading.decode_source, reading.start_time, tuple(ranks)), tuple(observations), tuple(rejected)


def _started_anew(window: ObservationWindow, reading: EngineReading) -> bool:
    """Did the engine restart since the window's newest reading: another start time, or any sum that fell?"""
    if window.start_time is not None and reading.start_time is not None and window.start_time != reading.start_time:
        return True
    if window.decode_source is None:
        return False
    newest = tuple(rank_window.points[-1].rank for rank_window in window.ranks)
    return sums_fell(window.decode_source, newest, reading.decode_source, reading.ranks)


def tokens_moved(before: EngineReading, after: EngineReading) -> bool:
    """Was any token generated between two readings of one server, as far as its numbers show?"""
    if not _same_sums(before.decode_source, after.decode_source):
        return False
    return any(
        _grew(one, two, after.decode_source) or _growth(one.finished_tokens_total, two.finished_tokens_total) > 0
        for one, two in _paired(before.ranks, after.ranks)
    )


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


# ----------------------------------------------------------------------------------------------- one rank, reading to reading


def _growth(before: float | None, after: float | None) -> float:
    """How much a sum grew; one that was absent before had not begun to count."""
    return 0.0 if after is None else after - (before or 0.0)


def _grew(before: EngineRank, after: EngineRank, source: DecodeSource) -> bool:
    """Do these two readings prove that the rank decoded between them?"""
    match source:
        case "decode_moments":
            steps = None if before.moments is None else before.moments.steps
            return after.moments is not None and _growth(steps, after.moments.steps) > 0
        case "counters":
            return _growth(before.decode_tokens_total, after.decode_tokens_total) > 0
        case "gauges":
            return _reported(before, after)


def _was_decoding(before: EngineRank, after: EngineRank, source: DecodeSource) -> bool:
    """Of two readings with growth between them: was the rank decoding at the first one already?"""
    if not before.running_requests or source == "gauges":
        return False
    if source == "decode_moments":
        return before.moments is not None  # written on idle too: this running count is true
    # A counter's running gauge may be a stale one of an idle engine. But without a prefill nothing starts to decode.
    return before.prefill_tokens_total is not None and before.prefill_tokens_total == after.prefill_tokens_total


def _reported(before: EngineRank, after: EngineRank) -> bool:
    """Did the engine refresh its decode gauges? A throughput with 15 digits does not repeat itself by chance."""
    return bool(after.tokens_per_second) and (before.tokens_per_second, before.accept_length) != (
        after.tokens_per_second,
        after.accept_length,
    )


def _batch_changed(before: EngineRank, after: EngineRank) -> bool:
    """Did a request come or go, as far as the counters show?"""
    joined = _growth(before.prefill_tokens_total, after.prefill_tokens_total) > 0
    return joined or _growth(before.finished_tokens_total, after.finished_tokens_total) > 0


def _fell(before: EngineRank, after: EngineRank) -> bool:
    """Is any sum smaller than it was?"""
    sums = ("decode_steps_total", "decode_tokens_total", "finished_tokens_total", "prefill_tokens_total")
    if any(_growth(getattr(before, name), getattr(after, name)) < 0 for name in sums):
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


def _advance(before: RankWindow | None, rank: EngineRank, reading: EngineReading, settings: ObservationSettings) -> RankWindow:
    """The rank's window with one more reading. It begins anew when the rank was idle, and ends when it falls idle."""
    if before is None:
        return RankWindow((Point(reading.monotonic_seconds, rank),))
    last = before.points[-1]
    # Beside other DP ranks nobody says that a request of this one ended: then only a gauge just refreshed is believed.
    still_known = last.batch_known and rank.finished_tokens_total is not None
    known = not _batch_changed(last.rank, rank) and (still_known or _reported(last.rank, rank))
    point = Point(reading.monotonic_seconds, rank, known)
    source = reading.decode_source
    grew = _grew(last.rank, point.rank, source)
    # The counters alone can disprove a running gauge of 0: a lone request reads 0 until the first report after its prefill.
    if point.rank.running_requests == 0 and not (grew and source == "counters"):
        return RankWindow((point,))
    if before.grown_seconds is None:
        if not grew:
            return RankWindow((point,))
        # Where in an interval decoding began is not known, so the window begins behind it, unless it went on all the time.
        return RankWindow((last, point) if _was_decoding(last.rank, point.rank, source) else (point,), point.seconds)
    if not grew and point.seconds - before.grown_seconds > _quiet_limit(before.points[-1].rank, reading, settings):
        return RankWindow((point,))
    points = before.points
    if len(points) > 1 and points[-1].seconds - points[-2].seconds < settings.spacing_seconds:
        points = points[:-1]
    return RankWindow(_trim((*points, point), source, settings), point.seconds if grew else before.grown_seconds)


def _quiet_limit(rank: EngineRank, reading: EngineReading, settings: ObservationSettings) -> float:
    """Seconds without growth after which a rank is idle: twice what its engine needs between two signs of life, bounded."""
    expected = 0.0
    if reading.decode_source == "decode_moments" and rank.moments is not None and rank.moments.steps:
        expected = STEPS_PER_SNAPSHOT * rank.moments.sum_seconds / rank.moments.steps
    elif reading.decode_source == "gauges" and rank.tokens_per_second:
        steps = (reading.identity and reading.identity.decode_log_interval) or STEPS_PER_REPORT
        tokens_per_step = (rank.running_requests or 1.0) * max(rank.accept_length or 1.0, 1.0)
        expected = steps * tokens_per_step / rank.tokens_per_second
    return min(max(settings.quiet_seconds, 2 * expected), settings.window_max_seconds)


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
            return _growth(first.decode_steps_total, last.decode_steps_total) >= settings.steps_min
        case "gauges":
            return sum(_reported(one.rank, two.rank) for one, two in pairwise(points)) >= 2


# ----------------------------------------------------------------------------------------------- from a window, an observation


def _observation(
    window: RankWindow, reading: EngineReading, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    points = window.points
    if window.grown_seconds is None:
        shows_work = bool(points[-1].rank.running_requests and points[-1].rank.tokens_per_second)
        return None, ["stale"] if shows_work and reading.decode_source == "gauges" else []
    while len(points) > 1 and not _grew(points[-2].rank, points[-1].rank, reading.decode_source):
        points = points[:-1]  # the engine has not reported since: its sums belong to an earlier instant
    if points[-1].seconds - points[0].seconds < settings.warm_up_seconds:
        return None, []
    limit = _accept_limit(reading.identity)
    match reading.decode_source:
        case "decode_moments":
            return _from_moments(points, limit, settings)
        case "counters":
            return _from_counters(points, limit, settings)
        case "gauges":
            return _from_gauges(points, limit)


def _accept_limit(identity: EngineIdentity | None) -> float:
    """Most tokens a request can gain in one step: 1 without speculation, infinite where nobody says."""
    if identity is None or not identity.complete:
        return float("inf")
    if identity.speculative_algorithm is None:
        return 1.0
    drafted, steps = identity.speculative_num_draft_tokens, identity.speculative_num_steps
    return min(drafted or float("inf"), steps + 1 if steps else float("inf"))


def _within(accept_length: float, limit: float, slack: float = 1e-6) -> float | None:
    """The accept length if it is possible; at the edges, within the relative `slack`, the possible one; else `None`."""
    if not 1 - slack <= accept_length <= limit * (1 + slack):
        return None
    return min(max(accept_length, 1.0), limit)


def _from_moments(
    points: Sequence[Point], limit: float, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    first, last = points[0].rank, points[-1].rank
    if first.moments is None or last.moments is None:
        return None, []
    steps = last.moments.steps - first.moments.steps
    batches = last.moments.sum_batch - first.moments.sum_batch
    decoding_seconds = last.moments.sum_seconds - first.moments.sum_seconds
    tokens = last.moments.sum_tokens - first.moments.sum_tokens
    if batches <= 0:
        return None, []
    reasons = []
    accept_length: float | None = 1.0
    if limit > 1:
        accept_length = _within(tokens / batches, limit) if steps >= settings.steps_min else None
        if accept_length is None:
            reasons.append("too_few_steps" if steps < settings.steps_min else "accept_length_out_of_range")
    seconds = points[-1].seconds - points[0].seconds
    share = _growth(first.prefill_busy_seconds_total, last.prefill_busy_seconds_total) / seconds
    written = _written_seconds(first, last, seconds)
    if written is not None:
        # The engine counts a prefill as busy only between two prefill launches, so that a lone one shows as time missing
        # from the decode steps; one step is left out next to it.
        seconds = written
        missing = seconds - decoding_seconds
        share = max(share, missing / seconds if missing > 2 * decoding_seconds / steps else 0.0)
    observation = DecodeObservation(
        dp_rank=last.dp_rank,
        decode_source="decode_moments",
        window_seconds=seconds,
        steps=steps,
        running_requests=batches / steps,
        context_tokens=_mean_context(points),
        accept_length=accept_length,
        tokens_per_second=tokens / seconds,
        round_seconds=decoding_seconds / steps,
        prefill_share_ratio=None if last.prefill_busy_seconds_total is None else min(share, 1.0),
    )
    return observation, reasons


def _written_seconds(first: EngineRank, last: EngineRank, seconds: float) -> float | None:
    """Seconds between the two instants at which the engine wrote these sums, on its own clock.

    Sharper than ours, which sees a snapshot up to 15 steps after it was written. `None` where it gives no instants or its
    wall clock was set meanwhile."""
    if first.snapshot_timestamp is None or last.snapshot_timestamp is None:
        return None
    written = last.snapshot_timestamp - first.snapshot_timestamp
    return written if 0.5 * seconds <= written <= 2 * seconds else None


def _from_counters(
    points: Sequence[Point], limit: float, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    first, last = points[0], points[-1]
    seconds = last.seconds - first.seconds
    spans = [_Span(one, two) for one, two in pairwise(points)]
    steps, tokens = sum(span.steps for span in spans), sum(span.tokens for span in spans)
    reasons = []
    pure = _pure_decode(spans)
    pure_steps = sum(span.steps for span in pure)
    round_seconds = None
    if pure_steps >= settings.steps_min:
        round_seconds = sum(span.seconds for span in pure) / pure_steps
    elif steps >= settings.steps_min:
        reasons.append("mixed_with_prefill")
    accept_length: float | None = 1.0
    if limit > 1:
        accept_length, reason = _accept_length_from_counters(spans, limit, settings)
        reasons += [reason] if reason is not None else []
    if accept_length is not None and steps > 0:
        measured = pure if round_seconds is not None else spans
        batch = sum(span.tokens for span in measured) / sum(span.steps for span in measured) / accept_length
    else:
        batch = fmean([point.rank.running_requests for point in points if point.rank.running_requests] or (1.0,))
    observation = DecodeObservation(
        dp_rank=last.rank.dp_rank,
        decode_source="counters",
        window_seconds=seconds,
        steps=steps,
        running_requests=max(batch, 1.0),
        context_tokens=_mean_context(points),
        accept_length=accept_length,
        tokens_per_second=tokens / seconds,
        round_seconds=round_seconds,
        prefill_share_ratio=_prefill_share(first.rank, last.rank, seconds),
    )
    return observation, reasons


def _prefill_share(first: EngineRank, last: EngineRank, seconds: float) -> float | None:
    """Share of the time in prefill: 0 where no prompt was processed, measured where the engine's device timer is on."""
    if last.prefill_tokens_total is not None and first.prefill_tokens_total == last.prefill_tokens_total:
        return 0.0
    if last.prefill_busy_seconds_total is None:
        return None
    return min(_growth(first.prefill_busy_seconds_total, last.prefill_busy_seconds_total) / seconds, 1.0)


class _Span:
    """What the counters show between two readings."""

    def __init__(self, one: Point, two: Point) -> None:
        before, after = one.rank, two.rank
        self.seconds = two.seconds - one.seconds
        self.steps = _growth(before.decode_steps_total, after.decode_steps_total)
        self.tokens = _growth(before.decode_tokens_total, after.decode_tokens_total)
        self.prefilled = _growth(before.prefill_tokens_total, after.prefill_tokens_total) > 0
        self.reported = _reported(before, after)
        agreed = two.batch_known and not _batch_changed(before, after) and after.running_requests == before.running_requests
        self.batch = after.running_requests if agreed else None
        """Requests that ran, where that is known for sure."""
        self.accept_length = after.accept_length


def _pure_decode(spans: Sequence[_Span]) -> list[_Span]:
    """The spans in which the engine did nothing but decode: no prompt was processed, and steps ran at the full rate.

    A prefill still running from the span before, or a request that ended, shows as a rate below that of the others."""
    candidates = [span for span in spans if not span.prefilled and span.steps > 0]
    if not candidates:
        return []
    usual = median(span.steps / span.seconds for span in candidates)
    return [span for span in candidates if span.steps + 1 >= 0.8 * usual * span.seconds]


def _accept_length_from_counters(
    spans: Sequence[_Span], limit: float, settings: ObservationSettings
) -> tuple[float | None, str | None]:
    """Tokens per step and running request where the batch is known for sure; else the engine's own reports in the window."""
    tokens = request_steps = steps = 0.0
    for span in spans:
        if span.batch:
            tokens += span.tokens
            steps += span.steps
            request_steps += span.steps * span.batch
    if steps >= settings.steps_min:
        # The two counters are not read at the same instant: they may be a step or so apart.
        accept_length = _within(tokens / request_steps, limit, slack=1.5 / steps)
        return accept_length, None if accept_length is not None else "accept_length_out_of_range"
    reports = [span.accept_length for span in spans if span.reported and span.accept_length]
    if not reports:
        return None, "too_few_steps"
    accept_length = _within(fmean(reports), limit)
    return accept_length, None if accept_length is not None else "accept_length_out_of_range"


def _from_gauges(points: Sequence[Point], limit: float) -> tuple[DecodeObservation | None, list[str]]:
    # The first report after idleness divides by the idle time: it opened the window and is not used.
    reports = [
        two.rank for one, two in pairwise(points)
        if _reported(one.rank, two.rank) and two.rank.running_requests and two.rank.tokens_per_second
    ]  # fmt: skip
    if not reports:
        return None, []
    throughput = median(rank.tokens_per_second or 0.0 for rank in reports)
    batch = median(rank.running_requests or 0.0 for rank in reports)
    reasons = []
    accept_length: float | None = 1.0
    if limit > 1:
        lengths = [rank.accept_length for rank in reports if rank.accept_length]
        accept_length = _within(fmean(lengths), limit) if lengths else None
        if lengths and accept_length is None:
            reasons.append("accept_length_out_of_range")
    observation = DecodeObservation(
        dp_rank=points[-1].rank.dp_rank,
        decode_source="gauges",
        window_seconds=points[-1].seconds - points[0].seconds,
        steps=None,
        running_requests=batch,
        context_tokens=_mean_context(points),
        accept_length=accept_length,
        tokens_per_second=throughput,
        round_seconds=None if accept_length is None else batch * accept_length / throughput,
    )
    return observation, reasons


def _mean_context(points: Sequence[Point]) -> float | None:
    """Context tokens over the window, which grow while requests decode."""
    known = [point.rank.context_tokens for point in points if point.rank.context_tokens]
    return fmean(known) if known else None
