"""What is observed of engines whose every step is known, through loads that change: it is true, or it is absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ceilingd.observation import ObservationWindow, observe
from ceilingd.parse.sglang import parse_loads, parse_metrics
from ceilingd.records import DecodeObservation, DecodeSource, EngineIdentity, EngineReading
from support.stepping_engine import SteppingEngine, Truth

MTP = EngineIdentity(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_num_draft_tokens=4, complete=True)
VERSIONS: dict[str, DecodeSource] = {"0.5.23": "decode_moments", "0.5.13": "counters", "0.5.1": "gauges", "0.4.3": "gauges"}
ACCEPT_LENGTH = 2.5


def round_seconds(batch: float) -> float:
    """Of the engines here: linear, so that it holds for the mean of several batches too."""
    return 0.010 + 0.0005 * batch


@dataclass(frozen=True)
class Sample:
    """What was observed at one reading, and what was true."""

    seconds: float
    batch: int
    truth: Truth
    observed: DecodeObservation | None
    rejected: tuple[str, ...]

    @property
    def decoding(self) -> DecodeObservation | None:
        return self.observed if self.observed is not None and self.observed.running_requests != 0 else None


def watch(
    version: str, load: Callable[[SteppingEngine], object], seconds: float, *, phase: float = 0.37, round_seconds_: float = 0.0
) -> list[Sample]:
    """An engine under this load, read once a second, the first time at `phase`."""
    engine = SteppingEngine(
        version, accept_length=ACCEPT_LENGTH, round_seconds=(lambda _: round_seconds_) if round_seconds_ else round_seconds
    )
    load(engine)
    window = ObservationWindow()
    samples = []
    now = phase
    while now < seconds:
        engine.run_until(now)
        source = VERSIONS[version]
        ranks = parse_loads(engine.loads(now)).ranks if source == "decode_moments" else parse_metrics(engine.metrics()).ranks
        window, observations, rejected = observe(window, EngineReading(now, source, MTP, ranks, 1000, 0.01))
        assert len(observations) <= 1
        samples.append(Sample(now, engine.batch, engine.truth, observations[0] if observations else None, rejected))
        now += 1.0
    return samples


def between(samples: list[Sample], begin: float, end: float) -> list[Sample]:
    chosen = [sample for sample in samples if begin <= sample.seconds <= end]
    assert chosen
    return chosen


def observed(samples: list[Sample]) -> list[DecodeObservation]:
    return [sample.decoding for sample in samples if sample.decoding is not None]


def agrees(one: DecodeObservation, tolerance: float = 0.06) -> bool:
    """Do the figures of one observation belong together, as those of this engine do at some time?"""
    batch, accept_length, rate = one.running_requests, one.accept_length, one.tokens_per_second
    if one.round_seconds is None or batch is None:
        return True
    if one.round_seconds != pytest.approx(round_seconds(batch), rel=tolerance):
        return False
    return rate is None or accept_length is None or rate <= 1.02 * batch * accept_length / one.round_seconds


# ------------------------------------------------------------------------------------------------------------------- loads


def prefill_every(period: float, prefill_seconds: float) -> Callable[[SteppingEngine], object]:
    """Eight long requests, and a short one again and again."""

    def load(engine: SteppingEngine) -> None:
        engine.at(0.0, lambda: engine.join(8, prefill_seconds=0.2))
        for index in range(int(40 / period)):
            engine.at(5 + index * period, lambda: engine.join(1, prompt=4000, tokens=100, prefill_seconds=prefill_seconds))

    return load


def eight_then_64_then_eight(engine: SteppingEngine) -> None:
    engine.at(0.0, lambda: engine.join(8, prefill_seconds=0.2))
    engine.at(15.0, lambda: engine.join(56, prefill_seconds=0.8))
    engine.at(30.0, lambda: engine.leave(56))
    engine.at(45.0, lambda: engine.leave(8))


def four_and_32(engine: SteppingEngine) -> None:
    engine.at(0.0, lambda: engine.join(4, prefill_seconds=0.2))
    for begin in range(6, 60, 12):
        engine.at(begin, lambda: engine.join(28, prefill_seconds=0.3))
        engine.at(begin + 6, lambda: engine.leave(28))


def pulses(engine: SteppingEngine) -> None:
    """Work for about 2.2 s, a pause of 0.8 s."""
    for index in range(20):
        engine.at(3 * index, lambda: engine.join(4, tokens=440, prefill_seconds=0.1))


def lone_requests(engine: SteppingEngine) -> None:
    """One of 3 s every 10 s."""
    for index in range(5):
        engine.at(10 * index, lambda: engine.join(1, tokens=715, prefill_seconds=0.1))


LOADS = {
    "prefill half of the time": prefill_every(1.2, 0.5),
    "prefill often": prefill_every(0.7, 0.2),
    "prefill now and then": prefill_every(3.0, 0.3),
    "8, 64, 8": eight_then_64_then_eight,
    "4 and 32": four_and_32,
    "pulses": pulses,
    "lone requests": lone_requests,
}


@pytest.mark.parametrize("phase", [0.1, 0.37, 0.62, 0.9])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("load", LOADS)
def test_figures_of_one_observation_belong_together(load: str, version: str, phase: float) -> None:
    samples = watch(version, LOADS[load], 50, phase=phase)
    assert observed(samples) or VERSIONS[version] == "gauges"  # two reports in a row of a pulse are luck
    assert [one for one in observed(samples) if not agrees(one)] == []
    assert all(
        one.accept_length is None or one.accept_length == pytest.approx(ACCEPT_LENGTH, rel=0.12) for one in observed(samples)
    )
    resting = [sample for sample in samples if sample.observed is not None and sample.observed.running_requests == 0]
    assert [sample for sample in resting if sample.batch] == []


# ----------------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("load", ["prefill half of the time", "prefill often"])
def test_a_round_mixed_with_prefill_is_not_told(load: str, version: str) -> None:
    steady = observed(between(watch(version, LOADS[load], 40), 17, 40))
    if version == "0.5.23":
        assert all(one.round_seconds == pytest.approx(round_seconds(one.running_requests or 0), rel=0.01) for one in steady)
    else:
        assert {one.round_seconds for one in steady} == {None}


@pytest.mark.parametrize("version", VERSIONS)
def test_between_prefills_the_round_is_told(version: str) -> None:
    steady = observed(between(watch(version, LOADS["prefill now and then"], 40), 10, 40))
    assert len([one for one in steady if one.round_seconds is not None]) >= 8


@pytest.mark.parametrize("version", ["0.5.23", "0.5.13"])
def test_tokens_per_second_beside_prefill_are_those_of_the_clock(version: str) -> None:
    samples = between(watch(version, LOADS["prefill half of the time"], 45), 15, 45)
    true = (samples[-1].truth.tokens - samples[0].truth.tokens) / (samples[-1].seconds - samples[0].seconds)
    rates = [one.tokens_per_second for one in observed(samples) if one.tokens_per_second is not None]
    assert len(rates) == len(samples)
    assert sum(rates) / len(rates) == pytest.approx(true, rel=0.03)


# ------------------------------------------------------------------------------------------------------ changes of the load


@pytest.mark.parametrize("phase", [0.1, 0.37, 0.62, 0.9])
@pytest.mark.parametrize(("version", "seconds"), [("0.5.23", 3.5), ("0.5.13", 4), ("0.5.1", 6)])
def test_another_batch_is_shown_soon(version: str, seconds: float, phase: float) -> None:
    samples = watch(version, eight_then_64_then_eight, 45, phase=phase)
    for change, batch in ((15.8, 64), (30.0, 8)):
        settled = between(samples, change + seconds, change + 14)
        assert len(observed(settled)) == len(settled)
        for one in observed(settled):
            assert one.running_requests == pytest.approx(batch, rel=0.02)
            assert one.round_seconds == pytest.approx(round_seconds(batch), rel=0.05)
            assert one.tokens_per_second == pytest.approx(batch * ACCEPT_LENGTH / round_seconds(batch), rel=0.06)


@pytest.mark.parametrize("phase", [0.1, 0.37, 0.62, 0.9])
@pytest.mark.parametrize(("version", "seconds"), [("0.5.23", 1), ("0.5.13", 2), ("0.5.1", 3.6), ("0.4.3", 3.6)])
def test_after_a_stop_nothing_is_shown(version: str, seconds: float, phase: float) -> None:
    samples = watch(version, eight_then_64_then_eight, 60, phase=phase)
    assert observed(between(samples, 45 + seconds, 60)) == []
    # What is shown until then is not thinned by the time in which nothing ran.
    rates = [one.tokens_per_second for one in observed(between(samples, 44, 60)) if one.tokens_per_second is not None]
    assert rates == pytest.approx([8 * ACCEPT_LENGTH / round_seconds(8)] * len(rates), rel=0.03)


def test_gauges_of_slow_steps_are_believed_a_quarter_longer_than_they_take() -> None:
    def load(engine: SteppingEngine) -> None:
        engine.at(0.0, lambda: engine.join(4, prefill_seconds=0.2))
        engine.at(58.0, engine.stall)

    samples = watch("0.5.1", load, 90, round_seconds_=0.3)
    assert len(observed(between(samples, 40, 58))) == len(between(samples, 40, 58))
    assert observed(between(samples, 48 + 1.25 * 12 + 2, 90)) == []


# ------------------------------------------------------------------------------------------------------- a few and short ones


@pytest.mark.parametrize("version", VERSIONS)
def test_0_is_never_said_of_a_lone_request_that_decodes(version: str) -> None:
    def load(engine: SteppingEngine) -> None:
        engine.at(10.2, lambda: engine.join(1, prefill_seconds=0.1))

    samples = watch(version, load, 40, round_seconds_=0.3)
    assert between(samples, 0, 10)[-1].observed is not None
    assert [one.observed for one in between(samples, 10.3, 40) if one.observed is not None and one.decoding is None] == []


@pytest.mark.parametrize("version", ["0.5.13", "0.5.23"])
def test_a_batch_that_no_report_has_told_yet_is_absent(version: str) -> None:
    def load(engine: SteppingEngine) -> None:
        engine.at(2.0, lambda: engine.join(1, prefill_seconds=0.1))

    early = observed(between(watch(version, load, 12, round_seconds_=0.3), 3, 12))
    assert {one.running_requests for one in early} <= {None, 1.0}
    assert early


def test_moments_outlive_a_short_pause() -> None:
    samples = between(watch("0.5.23", pulses, 50, phase=0.9), 10, 50)
    working = [sample for sample in samples if sample.batch]
    assert len(observed(working)) > 0.6 * len(working)
    for one in observed(samples):
        assert one.round_seconds == pytest.approx(round_seconds(4), rel=0.01)
        assert one.prefill_share_ratio is None  # the time that is missing may be the pause


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_of_three_seconds_is_seen(version: str) -> None:
    samples = watch(version, lone_requests, 50, phase=0.9)
    assert any(one.round_seconds == pytest.approx(round_seconds(1), rel=0.03) for one in observed(samples))


# -------------------------------------------------------------------------------------------------------- clocks and gauges


@pytest.mark.parametrize("step", [3.0, -3.0, 0.3, 60.0])
def test_a_wall_clock_that_was_set_invents_nothing(step: float) -> None:
    def load(engine: SteppingEngine) -> None:
        engine.at(0.0, lambda: engine.join(8, prefill_seconds=0.2))
        engine.at(20.0, lambda: setattr(engine, "clock_offset_seconds", step))

    for one in observed(between(watch("0.5.23", load, 40), 15, 40)):
        assert one.tokens_per_second == pytest.approx(8 * ACCEPT_LENGTH / round_seconds(8), rel=0.02)
        assert one.prefill_share_ratio == 0.0


def test_a_frozen_gauge_is_no_observation() -> None:
    samples = watch("0.4.3", eight_then_64_then_eight, 200)
    assert {sample.observed for sample in between(samples, 50, 200)} == {None}
