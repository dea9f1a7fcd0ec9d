import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceilingd.observation import DEFAULTS, ObservationWindow, observe, tokens_moved
from ceilingd.parse.sglang import parse_loads, parse_metrics, parse_server_info
from ceilingd.records import (
    DecodeObservation,
    DecodeSource,
    EngineIdentity,
    EngineRank,
    EngineReading,
)
from support.clock import FakeClock
from support.sglang_server import SimulatedEngine

DATA = Path(__file__).parents[1] / "data"
MTP = EngineIdentity(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_num_draft_tokens=4, complete=True)
PLAIN = EngineIdentity(complete=True)


def reading(
    seconds: float, *ranks: EngineRank, source: DecodeSource = "counters", identity: EngineIdentity | None = MTP
) -> EngineReading:
    return EngineReading(seconds, source, identity, ranks, 1000, 0.01)


class Watch:
    """A server watched reading by reading, with everything that came of it."""

    def __init__(self) -> None:
        self.window = ObservationWindow()
        self.observations: tuple[DecodeObservation, ...] = ()
        self.resting: set[str] = set()
        """The ranks that provably rest."""
        self.rejected: list[str] = []

    def see(self, one: EngineReading) -> DecodeObservation | None:
        """The observation of the first rank that decodes."""
        self.window, observations, rejected = observe(self.window, one)
        self.observations = tuple(seen for seen in observations if seen.running_requests != 0)
        self.resting = {seen.dp_rank for seen in observations if seen.running_requests == 0}
        self.rejected += rejected
        return self.observations[0] if self.observations else None


class Bench:
    """A simulated engine and a watch on it, by one of its endpoints, once a second."""

    def __init__(self, source: DecodeSource, identity: EngineIdentity = MTP, **engine: float) -> None:
        self.clock = FakeClock()
        self.engine = SimulatedEngine(self.clock, **engine)  # type: ignore[arg-type]
        self.watch = Watch()
        self._source = source
        self._identity = identity

    def read(self) -> EngineReading:
        if self._source == "decode_moments":
            ranks = parse_loads(self.engine.loads()).ranks
        else:
            ranks = parse_metrics(self.engine.metrics()).ranks
        if self._source == "gauges":
            ranks = tuple(replace(rank, decode_steps_total=None, decode_tokens_total=None) for rank in ranks)
        return reading(self.clock.monotonic(), *ranks, source=self._source, identity=self._identity)

    def run(self, seconds: int) -> DecodeObservation | None:
        """The last observation after so many readings, a second apart."""
        seen = None
        for _ in range(seconds):
            self.clock.advance(1.0)
            seen = self.watch.see(self.read())
        return seen


def sure(observation: DecodeObservation | None) -> DecodeObservation:
    assert observation is not None
    return observation


# --------------------------------------------------------------------------------------------------- recorded hardware

# The two recordings of a point and the seconds between them, with the point's row in the table of what clients measured.
POINTS = [
    ("plain", "b1_c512", 5.018, 1, None),
    ("plain", "b4_c512", 5.011, 4, None),
    ("plain", "b16_c512", 5.011, 16, None),
    ("plain", "b64_c512", 5.014, 64, None),
    ("plain", "b16_c8192", 5.017, 16, None),
    ("eagle3", "b1_c1024_a2.5", 5.012, 1, 2.471),
    ("eagle3", "b1_c1024_a3.5", 5.016, 1, 3.502),
    ("eagle3", "b8_c1024_a2.5", 5.016, 8, 2.465),
    ("hybrid", "b1_c1024_a2.5", 5.019, 1, 2.52),
    ("tp2", "b16_c512", 5.021, 16, None),
    ("tp2nop2p", "b16_c512", 5.020, 16, None),
]


def client_measured(case: str, tag: str) -> tuple[float, float]:
    """Tokens per second and round seconds of a point, measured by the client over 12 s around the two recordings."""
    batch, context, *accept = (part[1:] for part in tag.split("_"))
    if case.startswith("tp2"):
        rows = csv.DictReader((DATA / "h200/tp2_points.csv").read_text().splitlines())
        (row,) = [row for row in rows if row["case"] == case]
        return float(row["tok_s"]), float(row["round_ms"]) / 1000
    rows = csv.DictReader((DATA / "h200/sglang_points.csv").read_text().splitlines())
    key = (case, batch, context, "".join(accept))
    (row,) = [row for row in rows if (row["case"], row["batch"], row["ctx_start"], row["accept_sim"]) == key]
    return float(row["tok_s_client"]), float(row["round_ms"]) / 1000


@pytest.mark.parametrize(
    ("case", "tag", "seconds", "batch", "accept_length"), POINTS, ids=[f"{one[0]}-{one[1]}" for one in POINTS]
)
def test_recorded_h200(case: str, tag: str, seconds: float, batch: int, accept_length: float | None) -> None:
    stem = DATA / f"h200/sglang_0.5.15_{case}"
    identity = parse_server_info(Path(f"{stem}.server_info.json").read_bytes())
    watch = Watch()
    for instant, mark in ((100.0, "m1"), (100.0 + seconds, "m2")):
        ranks = parse_metrics(Path(f"{stem}.{tag}_{mark}.prom").read_bytes()).ranks
        watch.see(reading(instant, *ranks, identity=identity))
    (seen,) = watch.observations
    tokens_per_second, round_seconds = client_measured(case, tag)
    # The client's 12 s and these 5 s are not the same seconds, and rounds grow with the context: 2 % is the agreement there is.
    assert seen.tokens_per_second == pytest.approx(tokens_per_second, rel=0.02)
    assert seen.round_seconds == pytest.approx(round_seconds, rel=0.02)
    assert seen.accept_length == pytest.approx(accept_length or 1.0, rel=0.02)
    assert seen.accept_length == 1.0 or accept_length is not None
    assert seen.running_requests == pytest.approx(batch, rel=0.005)
    assert seen.prefill_share_ratio == 0.0
    assert watch.rejected == []


def test_recorded_h200_after_the_last_request() -> None:
    watch = Watch()
    for second, state in enumerate(["plain.after_1s", "plain.after_4s", "plain.after_8s"]):
        ranks = parse_metrics((DATA / f"h200/sglang_0.5.15_{state}.prom").read_bytes()).ranks
        assert ranks[0].running_requests == 64.0  # still, though nothing runs
        assert watch.see(reading(3.0 * second, *ranks, identity=PLAIN)) is None


# --------------------------------------------------------------------------------------------------- all three sources

SOURCES: tuple[DecodeSource, ...] = ("decode_moments", "counters", "gauges")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("batch", "accept_length", "round_seconds"), [(1, 3.0785, 0.0554), (8, 2.5, 0.017), (32, 1.7, 0.12)])
def test_a_steady_server(source: DecodeSource, batch: int, accept_length: float, round_seconds: float) -> None:
    bench = Bench(source, batch=batch, accept_length=accept_length, round_seconds=round_seconds, context_tokens=4000)
    seen = sure(bench.run(25))
    assert seen.decode_source == source
    assert seen.dp_rank == "0"
    assert seen.accept_length == pytest.approx(accept_length, rel=0.01)
    assert seen.running_requests == pytest.approx(batch, rel=0.01)
    assert seen.round_seconds == pytest.approx(round_seconds, rel=0.01)
    assert seen.tokens_per_second == pytest.approx(batch * accept_length / round_seconds, rel=0.01)
    assert seen.context_tokens == 4000
    assert seen.window_seconds >= 9
    assert (seen.steps is None) == (source == "gauges")
    assert bench.watch.rejected.count("accept_length_out_of_range") == 0


@pytest.mark.parametrize("source", SOURCES)
def test_without_speculation_the_accept_length_is_exactly_one(source: DecodeSource) -> None:
    bench = Bench(source, PLAIN, batch=16, accept_length=1.0, round_seconds=0.0064, draft_tokens=1)
    seen = sure(bench.run(8))
    assert seen.accept_length == 1.0
    assert seen.running_requests == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_said_before_the_window_has_warmed_up(source: DecodeSource) -> None:
    bench = Bench(source)
    assert bench.run(2) is None
    assert bench.run(8) is not None


@pytest.mark.parametrize(("source", "seconds"), [("decode_moments", 1), ("counters", 2), ("gauges", 1)])
def test_an_idle_server_has_no_observation(source: DecodeSource, seconds: int) -> None:
    bench = Bench(source)
    assert bench.run(12) is not None
    bench.engine.load(batch=0)
    assert bench.run(seconds) is None
    assert bench.run(30) is None
    bench.engine.load(batch=2, accept_length=2.0)
    assert bench.run(1) is None
    seen = sure(bench.run(9))
    assert seen.accept_length == pytest.approx(2.0, rel=0.01)
    assert seen.running_requests == pytest.approx(2.0, rel=0.01)
    assert seen.window_seconds < 10  # nothing of the idle time is in it


@pytest.mark.parametrize("source", SOURCES)
def test_a_change_of_content_is_followed_within_the_window(source: DecodeSource) -> None:
    bench = Bench(source, accept_length=3.98)
    bench.run(20)
    bench.engine.load(accept_length=3.08)
    assert sure(bench.run(4)).accept_length != pytest.approx(3.08, rel=0.02)
    assert sure(bench.run(12)).accept_length == pytest.approx(3.08, rel=0.01)


@pytest.mark.parametrize("source", SOURCES)
def test_a_server_that_is_slow_to_step_is_given_a_longer_window(source: DecodeSource) -> None:
    bench = Bench(source, batch=64, accept_length=2.5, round_seconds=0.7)
    observations = [bench.run(1) for _ in range(120)]
    seen = [one for one in observations[60:] if one is not None]
    assert len(seen) == 60
    assert all(one.accept_length == pytest.approx(2.5, rel=0.05) for one in seen)
    assert all(one.round_seconds == pytest.approx(0.7, rel=0.05) for one in seen)
    assert max(one.window_seconds for one in seen) <= 2 * DEFAULTS.window_max_seconds


@pytest.mark.parametrize("source", SOURCES)
def test_the_window_is_bounded_however_often_it_is_fed(source: DecodeSource) -> None:
    bench = Bench(source)
    for _ in range(2000):
        bench.clock.advance(0.05)
        bench.watch.see(bench.read())
    (rank,) = bench.watch.window.ranks
    assert len(rank.points) <= DEFAULTS.window_max_seconds / DEFAULTS.spacing_seconds + 2
    assert bench.watch.observations[0].round_seconds == pytest.approx(0.055, rel=0.02)


@pytest.mark.parametrize("source", ["decode_moments", "counters"])
def test_a_restart_begins_anew(source: DecodeSource) -> None:
    bench = Bench(source)
    bench.run(15)
    bench.engine = SimulatedEngine(bench.clock, accept_length=2.0)
    assert bench.run(1) is None
    assert bench.watch.rejected == ["counter_reset"]
    assert sure(bench.run(8)).accept_length == pytest.approx(2.0, rel=0.02)
    assert bench.watch.rejected.count("counter_reset") == 1


def test_another_start_time_is_a_restart() -> None:
    bench = Bench("counters")
    watch = bench.watch
    for _ in range(5):
        bench.clock.advance(1.0)
        watch.see(replace(bench.read(), start_time=1.0))
    assert watch.observations
    bench.clock.advance(1.0)
    assert watch.see(replace(bench.read(), start_time=2.0)) is None
    assert watch.rejected == ["counter_reset"]


def test_another_source_begins_anew() -> None:
    bench = Bench("counters")
    assert bench.run(5) is not None
    bench._source = "decode_moments"
    assert bench.run(1) is None
    assert bench.watch.rejected == []


def test_ranks_are_watched_apart() -> None:
    clock = FakeClock()
    engines = [SimulatedEngine(clock, batch=9, accept_length=2.0), SimulatedEngine(clock, batch=0)]
    watch = Watch()
    for _ in range(6):
        clock.advance(1.0)
        ranks = [replace(parse_loads(engine.loads()).ranks[0], dp_rank=str(index)) for index, engine in enumerate(engines)]
        watch.see(reading(clock.monotonic(), *ranks, source="decode_moments"))
    (seen,) = watch.observations
    assert (seen.dp_rank, seen.running_requests) == ("0", pytest.approx(9.0))
    engines[1].load(batch=4)
    for _ in range(6):
        clock.advance(1.0)
        ranks = [replace(parse_loads(engine.loads()).ranks[0], dp_rank=str(index)) for index, engine in enumerate(engines)]
        watch.see(reading(clock.monotonic(), *ranks, source="decode_moments"))
    assert [one.dp_rank for one in watch.observations] == ["0", "1"]
    assert [one.running_requests for one in watch.observations] == pytest.approx([9.0, 4.0])


# --------------------------------------------------------------------------------------------------- decode moments


def test_moments_are_exact_beside_prefill_and_say_how_much_of_it_there_was() -> None:
    bench = Bench("decode_moments", batch=4, accept_length=2.5, round_seconds=0.02)
    bench.run(11)
    for _ in range(10):
        bench.engine.prefill(tokens=4096, seconds=0.3)
        bench.run(1)
    (seen,) = bench.watch.observations
    assert seen.round_seconds == pytest.approx(0.02)
    assert seen.accept_length == pytest.approx(2.5)
    assert seen.running_requests == pytest.approx(4)
    assert seen.prefill_share_ratio == pytest.approx(0.3, abs=0.03)
    assert seen.tokens_per_second == pytest.approx(0.7 * 4 * 2.5 / 0.02, rel=0.03)


def test_a_lone_prefill_that_the_engine_does_not_count_shows_as_missing_time() -> None:
    bench = Bench("decode_moments", round_seconds=0.02)
    bench.run(11)
    bench.engine.prefill(tokens=8192, seconds=2.0)
    bench.engine._prefill_seconds = 0.0  # only the time between two prefill launches is counted
    seen = sure(bench.run(5))
    assert seen.prefill_share_ratio == pytest.approx(0.2, abs=0.03)
    assert seen.round_seconds == pytest.approx(0.02)


def test_moments_without_the_instants_they_were_written_at() -> None:
    bench = Bench("decode_moments", round_seconds=0.02)
    for _ in range(12):
        bench.clock.advance(1.0)
        one = bench.read()
        bench.watch.see(replace(one, ranks=tuple(replace(rank, snapshot_age_seconds=None) for rank in one.ranks)))
    (seen,) = bench.watch.observations
    assert seen.round_seconds == pytest.approx(0.02)
    assert seen.tokens_per_second == pytest.approx(3.0785 / 0.02, rel=0.05)  # seen up to 15 steps late at either end


def test_a_wall_clock_that_jumps_does_not_touch_the_rate() -> None:
    bench = Bench("decode_moments", round_seconds=0.02)
    bench.run(5)
    for seconds in (3600.0, -3600.0, 3.0, -3.0, 0.4):
        bench.clock._wall += seconds
        bench.engine.prefill(tokens=100, seconds=0.0)  # the time counts only beside prefill
        for _ in range(12):
            seen = sure(bench.run(1))
            assert seen.tokens_per_second == pytest.approx(3.0785 / 0.02, rel=0.07)
            assert seen.prefill_share_ratio == pytest.approx(0.0, abs=0.07)


def test_moments_before_the_first_step() -> None:
    bench = Bench("decode_moments", batch=0)
    assert bench.run(3) is None
    bench.engine.load(batch=1)
    assert bench.run(5) is not None
    assert bench.watch.rejected == []


def test_moments_that_vanish_are_a_restart() -> None:
    bench = Bench("decode_moments")
    bench.run(5)
    bench.engine = SimulatedEngine(bench.clock, batch=0)
    assert bench.run(1) is None
    assert bench.watch.rejected == ["counter_reset"]


@pytest.mark.parametrize("accept_length", [0.6, 4.4])
@pytest.mark.parametrize("source", SOURCES)
def test_an_impossible_accept_length_is_rejected(source: DecodeSource, accept_length: float) -> None:
    bench = Bench(source, accept_length=accept_length)
    seen = sure(bench.run(9))
    assert seen.accept_length is None
    assert "accept_length_out_of_range" in bench.watch.rejected
    assert (seen.round_seconds is None) == (source == "gauges")


@pytest.mark.parametrize("source", SOURCES)
def test_perfect_acceptance_is_possible(source: DecodeSource) -> None:
    bench = Bench(source, accept_length=4.0, round_seconds=0.033)
    assert sure(bench.run(9)).accept_length == pytest.approx(4.0, rel=0.01)
    assert bench.watch.rejected.count("accept_length_out_of_range") == 0


@pytest.mark.parametrize("source", SOURCES)
def test_while_nobody_knows_the_server_the_measured_accept_length_counts(source: DecodeSource) -> None:
    bench = Bench(source, accept_length=5.5)
    bench._identity = None  # type: ignore[assignment]
    assert sure(bench.run(9)).accept_length == pytest.approx(5.5, rel=0.01)


def test_too_few_steps_give_no_accept_length() -> None:
    watch = watch_all([counters(second, 2 * second, 6 * second, 1) for second in range(6)])
    (seen,) = watch.observations
    assert (seen.accept_length, seen.round_seconds, seen.steps) == (None, None, 10)
    assert seen.tokens_per_second == pytest.approx(6.0)
    assert set(watch.rejected) == {"too_few_steps"}


# --------------------------------------------------------------------------------------------------- counters


def counters(
    seconds: float,
    steps: float,
    tokens: float,
    running: float | None = 1,
    *,
    prefill: float = 0,
    finished: float = 0,
    report: int = 0,
) -> EngineReading:
    """A reading of an engine that speculates; `report` changes with each refresh of its gauges."""
    rank = EngineRank(
        "0",
        running_requests=running,
        decode_steps_total=steps,
        decode_tokens_total=tokens,
        prefill_tokens_total=prefill,
        finished_tokens_total=finished,
        accept_length=3.0,
        tokens_per_second=50.0 + report,
    )
    return reading(seconds, rank)


def watch_all(readings: list[EngineReading]) -> Watch:
    watch = Watch()
    for one in readings:
        watch.see(one)
    return watch


def test_a_gauge_from_before_a_request_joined_is_not_believed() -> None:
    # One request runs at 3 tokens a step; at second 4 a second one joins, which the running gauge shows only at second 7.
    rows = []
    steps, tokens = 0, 0
    for second in range(12):
        rows.append(
            counters(second, steps, tokens, 1 if second < 7 else 2, prefill=0 if second < 4 else 500, report=second // 7)
        )
        batch = 1 if second < 4 else 2
        steps, tokens = steps + 20, tokens + 20 * 3 * batch
    lengths = []
    watch = Watch()
    for one in rows:
        watch.see(one)
        lengths += [observation.accept_length for observation in watch.observations]
    assert len(lengths) == 10
    assert set(lengths) <= {None, 3.0}
    assert lengths[-1] == 3.0


def test_a_lone_request_reads_zero_running_until_its_first_report() -> None:
    rows = [counters(second, 20 * second, 60 * second, 0, prefill=500) for second in range(5)]
    (seen,) = watch_all([counters(-1, 0, 0, 0), *rows]).observations
    assert seen.tokens_per_second == 60.0
    assert seen.running_requests is None
    assert seen.accept_length is None
    assert seen.round_seconds == pytest.approx(0.05)


def test_a_request_that_ended_makes_the_gauge_doubtful() -> None:
    # Two requests, one ends at second 3; the gauge says 2 until second 6. 20 steps a second, 3 tokens each per request.
    rows = []
    steps, tokens = 0, 0
    for second in range(9):
        ended = second > 3
        rows.append(
            counters(second, steps, tokens, 2 if second < 6 else 1, finished=900 * ended, report=(second > 0) + (second >= 6))
        )
        steps, tokens = steps + 20, tokens + 20 * 3 * (1 if second >= 3 else 2)
    watch = watch_all(rows)
    assert watch.observations[0].accept_length == pytest.approx(3.0)


def test_a_window_with_prefill_gives_the_round_of_what_was_only_decode() -> None:
    # 20 steps a second, but for the two seconds in which a prompt took half of the time.
    rows = [counters(0, 0, 0, 1)]
    steps = 0
    for second in range(1, 11):
        mixed = second in (4, 5)
        steps += 10 if mixed else 20
        rows.append(counters(second, steps, 3 * steps, 1, prefill=1000 * min(max(second - 3, 0), 2), report=second))
    (seen,) = watch_all(rows).observations
    assert seen.round_seconds == pytest.approx(0.05)
    assert seen.tokens_per_second == pytest.approx(60.0)  # of the same seconds
    assert seen.prefill_share_ratio == 0.0


def test_prefill_all_the_time_leaves_no_round() -> None:
    watch = watch_all(
        [counters(second, 12 * second, 36 * second, 1, prefill=700 * second, report=second) for second in range(8)]
    )
    (seen,) = watch.observations
    assert seen.round_seconds is None
    assert seen.tokens_per_second == pytest.approx(36.0)
    assert seen.accept_length == 3.0  # the engine's own reports
    assert "mixed_with_prefill" in watch.rejected


def test_a_long_prefill_is_over_when_steps_run_again_after_it() -> None:
    # 100 steps a second. A prompt is begun just before second 5 and takes 2.5 s; the step under way is counted at second 6.
    steps = [0, 100, 200, 300, 400, 500, 501, 501, 551, 651, 751, 851]
    watch = Watch()
    rounds = []
    for second, count in enumerate(steps):
        watch.see(counters(second, count, 3 * count, 1, prefill=1000 * (second >= 5), report=count))
        rounds += [one.round_seconds for one in watch.observations]
    assert [one for one in rounds if one is not None] == pytest.approx([0.01] * 6)
    assert rounds[-3:] == pytest.approx([0.01] * 3)
    assert len(rounds) == 10  # nor does it pass for the end of all work


@pytest.mark.parametrize("together", [True, False])
def test_ranks_of_dp_attention_wait_for_a_prompt_of_another(together: bool) -> None:
    watch = Watch()
    for second in range(8):
        (decoding,) = counters(second, 12 * second, 36 * second, 1, report=second).ranks
        (filling,) = counters(second, 12 * second, 36 * second, 1, prefill=700 * second, report=second).ranks
        ranks = (decoding, replace(filling, dp_rank="1"))
        watch.see(reading(second, *ranks, identity=replace(MTP, dp_attention=together)))
    assert [one.round_seconds is None for one in watch.observations] == [together, True]


def test_the_device_timer_tells_the_prefill_share() -> None:
    rows = []
    for second in range(8):
        one = counters(second, 12 * second, 36 * second, 1, prefill=700 * second, report=second)
        rows.append(replace(one, ranks=(replace(one.ranks[0], prefill_busy_seconds_total=0.25 * second),)))
    (seen,) = watch_all(rows).observations
    assert seen.prefill_share_ratio == pytest.approx(0.25)


def test_the_second_in_which_the_last_request_ended_does_not_lengthen_the_round() -> None:
    rows = [counters(second, 20 * second, 60 * second, 1, report=second) for second in range(6)]
    (seen,) = watch_all([*rows, counters(6, 105, 315, 1, report=6)]).observations
    assert seen.round_seconds == pytest.approx(0.05)


def test_a_stuck_running_gauge_proves_nothing() -> None:
    watch = watch_all([counters(second, 20 * second, 60 * second, 24, report=second) for second in range(6)])
    assert watch.observations
    observed = [watch.see(counters(6 + second, 100, 300, 24, report=5)) for second in range(30)]
    assert observed[3:] == [None] * 27
    # Work comes back: a prefill first, while the gauge still says 24. What was idle is not in the window.
    watch.see(counters(37, 110, 330, 24, prefill=500, report=5))
    watch.see(counters(38, 130, 390, 24, prefill=500, report=5))
    seen = sure(watch.see(counters(39, 150, 450, 24, prefill=500, report=5)))
    assert seen.window_seconds == 1.0  # the prefill may have lasted into the second before
    assert seen.tokens_per_second == 60.0


def test_copies_that_lag_by_one_step_change_nothing() -> None:
    bench = Bench("counters", tensor_parallel=2, round_seconds=0.03)
    for second in range(12):
        bench.clock.advance(1.0)
        body = bench.engine.metrics().decode().splitlines()
        lagging = second % 2
        body = [
            line if f'tp_rank="{lagging}"' not in line or "cuda_graph_passes" not in line
            else f"{line.rpartition(' ')[0]} {float(line.rpartition(' ')[2]) - 1}"
            for line in body
        ]  # fmt: skip
        bench.watch.see(reading(bench.clock.monotonic(), *parse_metrics("\n".join(body).encode()).ranks))
    (seen,) = bench.watch.observations
    assert seen.round_seconds == pytest.approx(0.03, rel=0.01)
    assert seen.accept_length == pytest.approx(3.0785, rel=0.01)
    assert bench.watch.rejected == []


def test_idle_ranks_of_dp_attention_step_without_tokens() -> None:
    watch = watch_all([counters(second, 20 * second, 0, 0) for second in range(8)])
    assert watch.observations == ()


def test_counters_without_a_word_about_prefill() -> None:
    rows = [replace(one, ranks=(replace(one.ranks[0], prefill_tokens_total=None),)) for one in
            (counters(second, 20 * second, 60 * second, 1, report=second) for second in range(8))]  # fmt: skip
    (seen,) = watch_all(rows).observations
    assert seen.prefill_share_ratio is None
    assert seen.accept_length == 3.0


# --------------------------------------------------------------------------------------------------- gauges and bodies


@pytest.mark.parametrize("path", sorted((DATA / "sglang").glob("sglang_*.prom")), ids=lambda path: path.stem)
@pytest.mark.parametrize("source", ["gauges", "counters"])
def test_a_body_that_never_changes_is_no_observation(path: Path, source: DecodeSource) -> None:
    ranks = parse_metrics(path.read_bytes()).ranks
    watch = watch_all([reading(float(second), *ranks, source=source) for second in range(60)])
    assert watch.observations == ()
    shows_work = any(rank.running_requests and rank.tokens_per_second for rank in ranks)
    assert set(watch.rejected) == ({"stale"} if shows_work and source == "gauges" else set())


def test_the_first_throughput_after_idle_is_not_used() -> None:
    def gauges(seconds: float, throughput: float, running: float = 1.0) -> EngineReading:
        rank = EngineRank("0", running_requests=running, tokens_per_second=throughput, accept_length=3.0)
        return reading(seconds, rank, source="gauges")

    # Idle for a minute, then a report that divides 120 tokens by it; the true rate is 55.
    rows = [gauges(second, 54.0) for second in range(60)]
    rows += [gauges(60, 2.0), gauges(61, 2.0), gauges(62, 2.0)]
    watch = watch_all(rows)
    assert watch.observations == ()
    seen = sure(watch.see(gauges(63, 55.0)))
    assert (seen.tokens_per_second, seen.round_seconds) == (55.0, pytest.approx(3.0 / 55.0))


def test_prefill_only_traffic_moves_no_decode_gauge() -> None:
    ranks = [EngineRank("0", running_requests=0.0, tokens_per_second=55.0, accept_length=3.0, context_tokens=100.0 * second,
                        finished_tokens_total=float(second)) for second in range(20)]  # fmt: skip
    watch = watch_all([reading(float(second), rank, source="gauges") for second, rank in enumerate(ranks)])
    assert watch.observations == ()


def test_tokens_moved() -> None:
    still = counters(0, 10, 30)
    assert not tokens_moved(still, still)
    assert tokens_moved(still, counters(1, 11, 33))
    assert tokens_moved(still, counters(1, 10, 30, finished=5))
    assert not tokens_moved(still, counters(1, 0, 0))
    assert not tokens_moved(still, counters(1, 10, 30, running=24))
    bench = Bench("decode_moments")
    before = bench.read()
    bench.clock.advance(2.0)
    assert tokens_moved(before, bench.read())
    assert not tokens_moved(still, bench.read())  # another source counts other things
    other_rank = replace(still, ranks=(replace(still.ranks[0], dp_rank="7", decode_tokens_total=99.0),))
    assert not tokens_moved(still, other_rank)


# --------------------------------------------------------------------------------------------------- whatever comes

maybe: Callable[[st.SearchStrategy[float]], st.SearchStrategy[float | None]] = lambda values: st.none() | values  # noqa: E731
amounts = maybe(st.floats(min_value=0, max_value=1e12))
ranks_strategy = st.builds(
    EngineRank,
    dp_rank=st.sampled_from(["0", "1"]),
    running_requests=amounts,
    context_tokens=amounts,
    decode_steps_total=amounts,
    decode_tokens_total=amounts,
    finished_tokens_total=amounts,
    accept_length=amounts,
    tokens_per_second=amounts,
    prefill_tokens_total=amounts,
    prefill_busy_seconds_total=amounts,
)


@given(st.lists(ranks_strategy, min_size=3, max_size=12), st.sampled_from(SOURCES), st.sampled_from([MTP, PLAIN, None]))
def test_no_observation_is_impossible(ranks: list[EngineRank], source: DecodeSource, identity: EngineIdentity | None) -> None:
    watch = Watch()
    for second, rank in enumerate(ranks):
        watch.see(reading(float(second), rank, source=source, identity=identity))
        for one in watch.observations:
            assert one.running_requests is None or one.running_requests > 0
            assert one.accept_length is None or 1.0 <= one.accept_length <= (4.0 if identity is MTP else 1e12)
            assert one.tokens_per_second is None or one.tokens_per_second > 0
            assert one.round_seconds is None or one.round_seconds > 0
            assert one.prefill_share_ratio is None or 0 <= one.prefill_share_ratio <= 1
