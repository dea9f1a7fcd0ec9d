"""An observation from SGLang's counters of steps and tokens, and the gauge of the batch beside them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ceilingd.observation.accept_length import within
from ceilingd.observation.growth import growth, reported
from ceilingd.observation.window import mean_context
from ceilingd.records import DecodeObservation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ceilingd.observation.window import ObservationSettings, Point


@dataclass(frozen=True, slots=True)
class _Span:
    """What the counters show between two readings."""

    one: Point
    two: Point

    @property
    def seconds(self) -> float:
        return self.two.seconds - self.one.seconds

    @property
    def steps(self) -> float:
        return growth(self.one.rank.decode_steps_total, self.two.rank.decode_steps_total)

    @property
    def tokens(self) -> float:
        return growth(self.one.rank.decode_tokens_total, self.two.rank.decode_tokens_total)

    @property
    def reported(self) -> bool:
        return reported(self.one.rank, self.two.rank)

    @property
    def batch(self) -> float | None:
        """Requests that ran, where that is known for sure."""
        before, after = self.one.rank.running_requests, self.two.rank.running_requests
        return after if self.two.batch_known and not self.two.changed and before == after else None


def from_counters(
    points: Sequence[Point], limit: float, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    """All figures are those since a request last came or went, once enough steps ran since; then there is a round. Before
    that, and where that never lasts, they are those of the whole window, wall-clock time with prefill in it, without a round.
    """
    spans = _while_it_ran([_Span(one, two) for one, two in pairwise(points)])
    steady = _steady(spans)
    pure = _at_full_rate(steady)
    pure_steps = sum(span.steps for span in pure)
    reasons = []
    round_seconds = one_batch = None
    if pure_steps >= settings.steps_min:
        round_seconds = sum(span.seconds for span in pure) / pure_steps
        spans = steady
        one_batch = _told_batch(steady[-1].two)
    elif any(span.two.mixed for span in spans) and sum(span.steps for span in spans) >= settings.steps_min:
        reasons.append("mixed_with_prefill")
    seconds, steps, tokens = (sum(getattr(span, name) for span in spans) for name in ("seconds", "steps", "tokens"))
    accept_length: float | None = 1.0
    if limit > 1:
        accept_length, reason = _accept_length(spans, one_batch, limit, settings)
        reasons += [reason] if reason is not None else []
    shown = _shown(spans, one_batch=round_seconds is not None)
    batch = tokens / steps / accept_length if accept_length is not None and shown and steps > 0 else None
    last = points[-1].rank
    observation = DecodeObservation(
        dp_rank=last.dp_rank,
        decode_source="counters",
        window_seconds=seconds,
        steps=steps,
        running_requests=batch or None,
        context_tokens=mean_context(shown),
        accept_length=accept_length,
        tokens_per_second=tokens / seconds if steps >= settings.rate_steps_min and tokens > 0 else None,
        round_seconds=round_seconds,
        prefill_share_ratio=_prefill_share(spans, seconds),
    )
    return observation, reasons


def _while_it_ran(spans: list[_Span]) -> list[_Span]:
    """Without a last span in which the last request ended: steps grow faster when one of several ends, never slower."""
    last = spans[-1].two
    fell_idle = last.changed and not last.mixed and spans[-1] not in _at_full_rate(spans)
    return spans[:-1] if fell_idle and len(spans) > 1 else spans


def _steady(spans: Sequence[_Span]) -> list[_Span]:
    """The newest spans in which no request came or went and no prompt was processed, without a slow one at the end: there
    the last request ended, or a prompt is being processed that no counter has shown yet."""
    steady: list[_Span] = []
    for span in reversed(spans):
        if span.two.changed or span.two.mixed:
            break
        steady.insert(0, span)
    pure = _at_full_rate(steady)
    while steady and steady[-1] not in pure:
        steady.pop()
    return steady


def _at_full_rate(spans: Sequence[_Span]) -> list[_Span]:
    """The spans whose steps ran as fast as usual: in the others something was going on that no counter shows."""
    stepping = [span for span in spans if span.steps > 0]
    if not stepping:
        return []
    usual = median(span.steps / span.seconds for span in stepping)
    return [span for span in stepping if span.steps + 1 >= 0.8 * usual * span.seconds]


def _told_batch(point: Point) -> float | None:
    """The batch of a time in which it did not change, once the gauge has told it; with a counter of requests that ended."""
    return point.rank.running_requests if point.batch_known and point.rank.finished_tokens_total is not None else None


def _accept_length(
    spans: Sequence[_Span], one_batch: float | None, limit: float, settings: ObservationSettings
) -> tuple[float | None, str | None]:
    """Tokens per step and running request where the batch is known for sure; else the engine's own reports in the window.

    `one_batch`: that of all spans, where it did not change."""
    tokens = request_steps = steps = 0.0
    for span in spans:
        batch = one_batch or span.batch
        if batch:
            tokens += span.tokens
            steps += span.steps
            request_steps += span.steps * batch
    if steps >= settings.steps_min:
        # The two counters are not read at the same instant: they may be a step or so apart.
        accept_length = within(tokens / request_steps, limit, slack=1.5 / steps)
        return accept_length, None if accept_length is not None else "accept_length_out_of_range"
    reports = [span.two.rank.accept_length for span in spans if span.reported]
    lengths = [length for length in reports if length]
    if not lengths:
        return None, "too_few_steps"
    accept_length = within(fmean(lengths), limit)
    return accept_length, None if accept_length is not None else "accept_length_out_of_range"


def _shown(spans: Sequence[_Span], *, one_batch: bool) -> list[Point]:
    """The readings whose gauges tell of these spans: those since the gauges were first refreshed in them, and where there was
    but one batch all that show it. None while the gauges are still those of what was before."""
    points = [spans[0].one, *(span.two for span in spans)]
    refreshed = [point for point, span in zip(points[1:], spans, strict=True) if span.reported or point.batch_known]
    if points[0].batch_known:
        refreshed.insert(0, points[0])
    if not refreshed:
        return []
    if one_batch:
        return [point for point in points if point.rank.running_requests == refreshed[-1].rank.running_requests]
    return points[points.index(refreshed[0]) :]


def _prefill_share(spans: Sequence[_Span], seconds: float) -> float | None:
    """Share of the time in prefill: 0 where no prompt was processed, measured where the engine's device timer is on."""
    first, last = spans[0].one.rank, spans[-1].two.rank
    if last.prefill_tokens_total is not None and not any(span.two.mixed for span in spans):
        return 0.0
    if last.prefill_busy_seconds_total is None:
        return None
    return min(max(growth(first.prefill_busy_seconds_total, last.prefill_busy_seconds_total) / seconds, 0.0), 1.0)
