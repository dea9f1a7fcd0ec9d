"""From consecutive readings of one server, what each of its DP ranks does: accept length, batch, tokens per second, round.

SGLang offers three sources of different worth (`records.DecodeSource`), and none of them tells by itself whether it is still
true. So everything here is a difference between readings over a sliding window, on the clock of the readings, and the rule
is: absent rather than wrong. A rank that neither decodes nor rests for sure has no observation; a quantity that cannot be
told apart from prefill, from idleness or from a batch that changed is `None`; and the quantities of one observation belong to
the same seconds.

- `moments`: SGLang sums batch, seconds and tokens over its decode steps only. Round, batch and accept length are ratios of
  growths, exact whatever else the engine did.
- `counters`: steps and tokens, no time and no batch. The round is our time over their steps, which is true only where nothing
  but decoding happened; the batch comes from a gauge that is up to 40 steps old, and is trusted only where no request came or
  went since.
- `gauges`: refreshed every 40 decode steps and otherwise sticky. One counts only when it has just been refreshed, and a
  throughput only with the batch of its own 40 steps.

`growth` compares two readings, `window` remembers what came before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ceilingd.observation.accept_length import accept_limit
from ceilingd.observation.counters import from_counters
from ceilingd.observation.gauges import from_gauges
from ceilingd.observation.growth import decoded, prefilled, sums_fell, tokens_moved
from ceilingd.observation.moments import from_moments, settled
from ceilingd.observation.window import (
    DEFAULTS,
    STEPS_PER_REPORT,
    STEPS_PER_SNAPSHOT,
    ObservationSettings,
    ObservationWindow,
    RankWindow,
    advance,
)
from ceilingd.records import DecodeObservation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ceilingd.records import EngineReading

__all__ = [
    "DEFAULTS",
    "STEPS_PER_REPORT",
    "STEPS_PER_SNAPSHOT",
    "ObservationSettings",
    "ObservationWindow",
    "observe",
    "started_anew",
    "sums_fell",
    "tokens_moved",
]


def observe(
    window: ObservationWindow, reading: EngineReading, settings: ObservationSettings = DEFAULTS
) -> tuple[ObservationWindow, tuple[DecodeObservation, ...], tuple[str, ...]]:
    """The window with `reading` in it, one observation per rank that provably decodes or rests, and why others were rejected.

    Reasons, each at most once per rank and reading: `counter_reset`, `too_few_steps`, `accept_length_out_of_range`,
    `mixed_with_prefill`, `stale` (gauges that show work nobody sees progress).
    """
    before = {rank_window.points[-1].rank.dp_rank: rank_window for rank_window in window.ranks}
    if started_anew(window, reading):
        before, rejected = {}, ["counter_reset"]
    else:
        rejected = []
    if reading.decode_source != window.decode_source:
        before = {}
    ranks = []
    observations = []
    waited = _waited_for_each_other(before, reading)
    for rank in reading.ranks:
        advanced = advance(before.get(rank.dp_rank), rank, reading, settings, waited=waited)
        ranks.append(advanced)
        observation, reasons = _observation(advanced, reading, settings)
        rejected += reasons
        if observation is not None:
            observations.append(observation)
    return ObservationWindow(reading.decode_source, reading.start_time, tuple(ranks)), tuple(observations), tuple(rejected)


def _waited_for_each_other(before: Mapping[str, RankWindow], reading: EngineReading) -> bool:
    """With DP attention all ranks step together: did a prompt on any of them make the others wait?"""
    if reading.identity is None or not reading.identity.dp_attention:
        return False
    known = [(before[rank.dp_rank].points[-1].rank, rank) for rank in reading.ranks if rank.dp_rank in before]
    return any(prefilled(one, two) for one, two in known)


def started_anew(window: ObservationWindow, reading: EngineReading) -> bool:
    """Did the engine restart since the window's newest reading: another start time, or any sum that fell?"""
    if window.start_time is not None and reading.start_time is not None and window.start_time != reading.start_time:
        return True
    if window.decode_source is None:
        return False
    newest = tuple(rank_window.points[-1].rank for rank_window in window.ranks)
    return sums_fell(window.decode_source, newest, reading.decode_source, reading.ranks)


def _observation(
    window: RankWindow, reading: EngineReading, settings: ObservationSettings
) -> tuple[DecodeObservation | None, list[str]]:
    points = window.points
    newest = points[-1].rank
    if window.idle:
        return DecodeObservation(newest.dp_rank, reading.decode_source, 0.0, None, 0.0, None, None, None, None), []
    if window.grown_seconds is None:
        shows_work = bool(newest.running_requests and newest.tokens_per_second)
        return None, ["stale"] if shows_work and reading.decode_source == "gauges" else []
    if newest.running_requests == 0 and reading.decode_source == "decode_moments":
        return None, []  # a pause: it does not decode now
    outdated = False
    while len(points) > 1 and not decoded(points[-2].rank, points[-1].rank, reading.decode_source):
        outdated = outdated or points[-1].changed
        points = points[:-1]  # the engine has not reported since: its sums belong to an earlier instant
    if outdated and reading.decode_source == "gauges":
        return None, []  # the batch is another than the gauges still tell
    if points[-1].seconds - points[0].seconds < settings.warm_up_seconds and not settled(points, settings):
        return None, []
    limit = accept_limit(reading.identity)
    match reading.decode_source:
        case "decode_moments":
            return from_moments(points, limit, settings)
        case "counters":
            return from_counters(points, limit, settings)
        case "gauges":
            return from_gauges(points, limit, reading.identity)
