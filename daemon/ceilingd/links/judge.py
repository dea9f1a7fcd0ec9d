"""Is this link slow while there is work? The state machine of one link: a sample and a state in, a state out.

A GPU lowers its link generation when idle and raises it within about a second of real work, so a low reading proves
nothing by itself; only "below the expected link *while there was work all the time*" does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ceilingd.records import LinkReading, LinkState

UTILIZATION_THRESHOLD_RATIO = 0.05
"""Below this a GPU is not kept busy by anybody; display and monitoring alone stay under it."""
POWER_THRESHOLD_RATIO = 0.25
"""Share of the power limit above which a GPU does more than idle: an idle H200 with a loaded model draws 18 % of its
limit, a decoding one 43 to 90 % (recorded with SGLang 0.5.15); an A6000 idles at 7 %."""
CLOCK_THRESHOLD_RATIO = 0.5
"""Share of the maximum SM clock above which the driver has raised the clocks for work."""
TRAFFIC_THRESHOLD_BYTES_PER_SECOND = 10e6
"""Both directions together: an idle H200 moves about 1.8 MB/s, one that decodes 37 MB/s and more (recorded)."""
LONGEST_SAMPLE_SECONDS = 2.0
"""A gap between samples longer than this is time nobody watched: it adds to no counter and breaks what is "continuous"."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Timing of the judgement, in seconds; `agreeing_samples` before any change is published."""

    grace_seconds: float = 5.0
    recovery_seconds: float = 3.0
    agreeing_samples: int = 3
    settled_monotonic_seconds: float = 0.0
    """Until then links are still training after boot and nothing is called degraded."""


@dataclass(frozen=True, slots=True)
class ExpectedLink:
    """What this link should run at under load; `None` where the platform gives no meaningful maximum."""

    generation: int | None
    width_lanes: int | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Signs of work from outside the link sample. `None`: not known."""

    tokens_moved: bool | None = None
    """A server mapped to this GPU generated tokens between its last two readings (a counter moved, not a gauge)."""
    tokens_due: bool = False
    """None moved in its last readings, but it says that it runs requests and its next report is not due yet: engines
    report every 15 or 40 steps, which slow rounds stretch to seconds."""
    traffic_bytes_per_second: float | None = None
    power_limit_watts: float | None = None
    sm_clock_max_hertz: float | None = None


@dataclass(frozen=True, slots=True)
class LinkJudgement:
    """The memory of one link. Start with `LinkJudgement()`."""

    state: LinkState = "unverified"
    working: bool = False
    generation: int | None = None
    width_lanes: int | None = None
    sampled_monotonic_seconds: float | None = None
    work_seen: bool = False
    candidate: LinkState = "unverified"
    candidate_samples: int = 0
    below_since: float | None = None
    """Start of the present stretch below the expected link with work in every sample."""
    recovered_since: float | None = None
    """Start of the present stretch at the expected link with work in every sample."""
    transitions_total: int = 0
    degraded_seconds_total: float = 0.0
    busy_seconds: tuple[tuple[int, int, float], ...] = ()
    """(generation, width, seconds with work): never more entries than settings a link can train to."""


def expected_link(
    generation_max_gpu: int | None,
    generation_max_system: int | None,
    width_max_lanes: int | None,
    declared_generation: int | None = None,
    declared_width_lanes: int | None = None,
) -> ExpectedLink:
    """The minimum of what GPU, system and declaration allow.

    No GPU that anybody serves from is made for Gen1 x1: that is what platforms report whose GPU hangs on no PCIe link at
    all (GB10, Jetson), so nothing is expected of it.

    >>> expected_link(5, 4, 16)                      # a Gen5 card in a Gen4 slot is healthy at Gen4
    ExpectedLink(generation=4, width_lanes=16)
    >>> expected_link(4, 4, 16, declared_width_lanes=8)  # a slot that has always been x8
    ExpectedLink(generation=4, width_lanes=8)
    """
    generations = [value for value in (generation_max_gpu, generation_max_system, declared_generation) if value is not None]
    widths = [value for value in (width_max_lanes, declared_width_lanes) if value is not None]
    if (generation_max_system, width_max_lanes) == (1, 1):
        return ExpectedLink(None, None)
    return ExpectedLink(min(generations, default=None), min(widths, default=None))


def is_working(reading: LinkReading, evidence: Evidence) -> bool:
    """Tokens, or traffic no idle GPU has, or utilization together with power or clocks above idle.

    Utilization alone is no evidence: it reads 100 % with a dead link and on stuck gauges. The driver's own GpuIdle reason
    overrules everything but tokens that moved."""
    if evidence.tokens_moved:
        return True
    if reading.gpu_idle:
        return False
    if evidence.tokens_due:
        return True
    if (evidence.traffic_bytes_per_second or 0.0) >= TRAFFIC_THRESHOLD_BYTES_PER_SECOND:
        return True
    if (reading.utilization_ratio or 0.0) < UTILIZATION_THRESHOLD_RATIO:
        return False
    return _above(reading.power_watts, evidence.power_limit_watts, POWER_THRESHOLD_RATIO) or _above(
        reading.sm_clock_hertz, evidence.sm_clock_max_hertz, CLOCK_THRESHOLD_RATIO
    )


def _above(value: float | None, limit: float | None, ratio: float) -> bool:
    return value is not None and limit is not None and value >= ratio * limit


def advance(
    before: LinkJudgement,
    reading: LinkReading,
    expected: ExpectedLink,
    evidence: Evidence,
    now: float,
    settings: JudgeSettings,
) -> LinkJudgement:
    """The judgement after one more sample, taken at `now` (monotonic seconds)."""
    working = is_working(reading, evidence)
    elapsed = now - before.sampled_monotonic_seconds if before.sampled_monotonic_seconds is not None else None
    watched = elapsed is not None and 0 <= elapsed <= LONGEST_SAMPLE_SECONDS
    seconds = elapsed if watched and elapsed is not None else 0.0

    readable = reading.generation is not None and reading.width_lanes is not None
    meaningful = readable and expected.generation is not None and expected.width_lanes is not None
    at_expected = (
        meaningful and _reaches(reading.generation, expected.generation) and _reaches(reading.width_lanes, expected.width_lanes)
    )
    below = meaningful and not at_expected
    below_since = _since(before.below_since if watched else None, below and working, now)
    recovered_since = _since(before.recovered_since if watched else None, at_expected and working, now)

    after = replace(
        before,
        working=working,
        work_seen=before.work_seen or working,
        generation=reading.generation,
        width_lanes=reading.width_lanes,
        sampled_monotonic_seconds=now,
        below_since=below_since,
        recovered_since=recovered_since,
        transitions_total=before.transitions_total + _changed(before, reading),
        degraded_seconds_total=before.degraded_seconds_total + (seconds if before.state == "degraded" else 0.0),
        busy_seconds=_add_busy(before.busy_seconds, reading, seconds) if working and readable else before.busy_seconds,
    )
    return _publish(after, _judge(after, meaningful, at_expected, now, settings), settings)


def _judge(after: LinkJudgement, meaningful: bool, at_expected: bool, now: float, settings: JudgeSettings) -> LinkState:
    """The state that this sample argues for, before the vote of agreeing samples."""
    if not meaningful:
        return "unsupported"
    if at_expected:
        recovering = after.working and after.recovered_since is not None
        if after.state == "degraded" and recovering and now - (after.recovered_since or now) < settings.recovery_seconds:
            return "degraded"
        return "full"
    if not after.working:
        return "idle_downshift" if after.work_seen else "unverified"
    if now < settings.settled_monotonic_seconds:
        return "unverified"
    if after.below_since is not None and now - after.below_since >= settings.grace_seconds:
        return "degraded"
    return after.state  # below with work, but not for long enough: what was last confirmed stands


def _publish(after: LinkJudgement, candidate: LinkState, settings: JudgeSettings) -> LinkJudgement:
    """`degraded` has waited out its grace already; every other change needs agreeing samples."""
    samples = after.candidate_samples + 1 if candidate == after.candidate else 1
    first = after.transitions_total == 0 and after.candidate_samples == 0 and after.state == "unverified"
    if candidate in (after.state, "degraded") or first or samples >= settings.agreeing_samples:
        return replace(after, state=candidate, candidate=candidate, candidate_samples=samples)
    return replace(after, candidate=candidate, candidate_samples=samples)


def _reaches(value: int | None, expected: int | None) -> bool:
    return value is not None and expected is not None and value >= expected


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _changed(before: LinkJudgement, reading: LinkReading) -> int:
    known = before.generation is not None and reading.generation is not None
    return int(known and (before.generation, before.width_lanes) != (reading.generation, reading.width_lanes))


def _add_busy(
    busy: tuple[tuple[int, int, float], ...], reading: LinkReading, seconds: float
) -> tuple[tuple[int, int, float], ...]:
    setting = (reading.generation, reading.width_lanes)
    if any(entry[:2] == setting for entry in busy):
        return tuple((*entry[:2], entry[2] + seconds) if entry[:2] == setting else entry for entry in busy)
    return (*busy, (reading.generation or 0, reading.width_lanes or 0, seconds))
