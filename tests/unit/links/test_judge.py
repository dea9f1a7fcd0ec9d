"""The state machine of one link, driven at 5 Hz by a script."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, field

import pytest

from ceilingd.links import judge
from ceilingd.links.judge import Evidence, ExpectedLink, JudgeSettings, LinkJudgement, advance, expected_link, is_working
from ceilingd.records import LinkReading

GEN4_X16 = ExpectedLink(4, 16)
INTERVAL_SECONDS = 0.2
EVIDENCE = Evidence(power_limit_watts=300.0, sm_clock_max_hertz=2100e6)


def sample(generation: int | None, width: int | None = 16, *, busy: bool = False) -> LinkReading:
    """An A6000 that decodes or idles, with its link at this setting."""
    if busy:
        return LinkReading(0, "GPU-0", generation, width, 0.98, 262.0, 1800e6, gpu_idle=False)
    return LinkReading(0, "GPU-0", generation, width, 0.0, 22.0, 210e6, gpu_idle=True)


@dataclass
class Track:
    """One link over time."""

    expected: ExpectedLink = GEN4_X16
    settings: JudgeSettings = field(default_factory=JudgeSettings)
    now: float = 1000.0
    judgement: LinkJudgement = field(default_factory=LinkJudgement)

    def feed(self, reading: LinkReading, seconds: float, evidence: Evidence = EVIDENCE) -> list[str]:
        """The state after each sample of this stretch."""
        states = []
        for _ in range(round(seconds / INTERVAL_SECONDS)):
            self.judgement = advance(self.judgement, reading, self.expected, evidence, self.now, self.settings)
            states.append(self.judgement.state)
            self.now += INTERVAL_SECONDS
        return states


def test_docstring_examples() -> None:
    assert doctest.testmod(judge).failed == 0


def test_full_from_the_first_sample() -> None:
    assert Track().feed(sample(4, busy=True), 0.2) == ["full"]


def test_idle_at_gen1_for_hours_is_no_fault() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 10)
    states = set(track.feed(sample(1), 3600)[3:])
    assert states == {"idle_downshift"}


def test_never_seen_working_is_unverified() -> None:
    assert set(Track().feed(sample(1), 60)) == {"unverified"}


def test_degraded_after_grace_and_not_before() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 10)
    states = track.feed(sample(1, busy=True), 10)
    first = states.index("degraded") * INTERVAL_SECONDS
    assert 5.0 <= first <= 5.0 + 2 * INTERVAL_SECONDS
    assert set(states[states.index("degraded") :]) == {"degraded"}
    assert set(states[: states.index("degraded")]) == {"full"}, "what was confirmed stands until the grace is over"


def test_a_gap_in_the_work_starts_the_grace_again() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 10)
    states = []
    for _ in range(10):
        states += track.feed(sample(1, busy=True), 4.0)
        states += track.feed(sample(1), 0.4)
    assert "degraded" not in states


def test_cycling_idle_link_is_counted_and_not_judged() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 2)
    before = track.judgement.transitions_total
    for _ in range(50):
        for generation in (4, 2, 1):
            assert "degraded" not in track.feed(sample(generation), INTERVAL_SECONDS)
    assert track.judgement.transitions_total == before + 149


def test_recovery_needs_work_at_the_expected_link_for_its_time() -> None:
    track = Track()
    track.feed(sample(1, busy=True), 10)
    assert track.judgement.state == "degraded"
    states = track.feed(sample(4, busy=True), 6)
    back = states.index("full") * INTERVAL_SECONDS
    assert 3.0 <= back <= 3.0 + 4 * INTERVAL_SECONDS


def test_idle_ends_degraded() -> None:
    track = Track()
    track.feed(sample(1, busy=True), 10)
    assert track.feed(sample(1), 2)[-1] == "idle_downshift"


def test_one_odd_sample_changes_nothing() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 10)
    assert track.feed(sample(1, busy=True), 0.4) == ["full", "full"]
    assert track.feed(sample(4, busy=True), 0.2) == ["full"]


def test_links_still_training_after_boot() -> None:
    track = Track(settings=JudgeSettings(settled_monotonic_seconds=1030.0))
    assert set(track.feed(sample(1, busy=True), 29)) == {"unverified"}
    assert track.feed(sample(1, busy=True), 10)[-1] == "degraded"


def test_unsupported_where_the_platform_gives_no_link() -> None:
    assert Track(expected=ExpectedLink(None, None)).feed(sample(1, 1), 2)[-1] == "unsupported"
    assert Track().feed(sample(None), 2)[-1] == "unsupported"


def test_a_placeholder_link_has_nothing_expected_of_it() -> None:
    assert Track(expected=expected_link(1, 1, 1)).feed(sample(1, 1, busy=True), 8)[-1] == "unsupported"


def test_narrow_link_is_degraded_and_declared_width_is_not() -> None:
    narrow = Track()
    narrow.feed(sample(4, 16, busy=True), 2)
    assert narrow.feed(sample(4, 8, busy=True), 8)[-1] == "degraded"
    assert Track(expected=expected_link(4, 4, 16, declared_width_lanes=8)).feed(sample(4, 8, busy=True), 8)[-1] == "full"


def test_busy_and_degraded_seconds() -> None:
    track = Track()
    track.feed(sample(4, busy=True), 10)
    track.feed(sample(1), 100)
    track.feed(sample(1, busy=True), 20)
    busy = {(generation, width): seconds for generation, width, seconds in track.judgement.busy_seconds}
    assert busy[4, 16] == pytest.approx(9.8)
    assert busy[1, 16] == pytest.approx(20.0)
    assert track.judgement.degraded_seconds_total == pytest.approx(20.0 - 5.0, abs=0.5)


def test_time_nobody_watched_counts_for_nothing() -> None:
    track = Track()
    track.feed(sample(1, busy=True), 3)
    track.now += 600
    states = track.feed(sample(1, busy=True), 4)
    assert "degraded" not in states
    assert sum(entry[2] for entry in track.judgement.busy_seconds) == pytest.approx(2.8 + 3.8)


@pytest.mark.parametrize(
    ("reading", "evidence", "working"),
    [
        pytest.param(sample(1), Evidence(tokens_moved=True), True, id="tokens overrule the idle reason"),
        pytest.param(sample(1), Evidence(tokens_due=True), False, id="idle reason overrules tokens that are due"),
        pytest.param(LinkReading(0, "u", 1, 16), Evidence(tokens_due=True), True, id="tokens due between two reports"),
        pytest.param(sample(1), Evidence(traffic_bytes_per_second=1e9), False, id="idle reason overrules traffic"),
        pytest.param(LinkReading(0, "u", 1, 16, 1.0, 25.0, 210e6), EVIDENCE, False, id="utilization stuck at 100 %"),
        pytest.param(LinkReading(0, "u", 1, 16, 1.0, 250.0, 210e6), EVIDENCE, True, id="utilization with power"),
        pytest.param(LinkReading(0, "u", 1, 16, 1.0, 25.0, 1900e6), EVIDENCE, True, id="utilization with clocks"),
        pytest.param(LinkReading(0, "u", 5, 16, 0.0, 126.0, 1980e6), EVIDENCE, False, id="H200 idle at full clocks"),
        pytest.param(LinkReading(0, "u", 1, 16), Evidence(traffic_bytes_per_second=3e7), True, id="traffic alone"),
        pytest.param(LinkReading(0, "u", 1, 16), Evidence(traffic_bytes_per_second=1.8e6), False, id="idle traffic"),
        pytest.param(LinkReading(0, "u", 1, 16, 1.0), Evidence(), False, id="nothing else known"),
    ],
)
def test_evidence_of_work(reading: LinkReading, evidence: Evidence, working: bool) -> None:
    assert is_working(reading, evidence) is working
