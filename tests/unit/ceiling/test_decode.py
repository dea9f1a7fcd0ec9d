"""The round and its ceilings: the founding case both ways, overrides, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ceilingd.ceiling.decode import predict
from ceilingd.ceiling.inputs import CeilingInputs, Deployment, Hardware, Load, Override, Speculation
from ceilingd.ceiling.shape import shape_from_parameters
from ceilingd.records import Component, Round
from support.shapes import founding_inputs, shape_of


def component(round_: Round, name: str) -> Component:
    return next(component for component in round_.components if component.name == name)


def names(inputs: CeilingInputs) -> list[str]:
    return [component.name for component in predict(inputs).peak.components]


def test_the_founding_case_from_its_config() -> None:
    ceiling = predict(founding_inputs())
    milliseconds = {component.name: component.seconds * 1e3 for component in ceiling.peak.components}
    assert milliseconds == {
        "weights": pytest.approx(33.366, abs=1e-3),
        "kv_cache": pytest.approx(0.0217, abs=1e-4),
        "linear_state": pytest.approx(0.7016, abs=1e-4),
        "allreduce": pytest.approx(1.1997, abs=1e-4),
        "logits_gather": pytest.approx(0.0395, abs=1e-4),
        "draft": pytest.approx(6.9569, abs=1e-4),
        "fixed": pytest.approx(0.5),
    }
    assert ceiling.peak.seconds == pytest.approx(42.786e-3, abs=1e-6)
    assert ceiling.peak.bottleneck == "weights"
    assert ceiling.perfect_peak == pytest.approx(93.49, abs=0.01)
    assert ceiling.observed_peak == pytest.approx(3.33 / 42.786e-3, abs=0.01)
    assert ceiling.parameters_main == 26_895_998_464
    assert ceiling.parameters_vision == 27_356_728_560 - 26_895_998_464
    assert ceiling.parameters_draft == 27_781_427_952 - 27_356_728_560
    assert ceiling.parameters_streamed == ceiling.parameters_active == 26_895_998_464 - 248_320 * 5120


def test_the_founding_case_as_published() -> None:
    inputs = CeilingInputs(
        shape=shape_from_parameters(27_000_000_000),
        hardware=Hardware(768e9, 0.9),
        load=Load(1, 500),
        deployment=Deployment(tensor_parallel=2),
        speculation=Speculation("mtp", 3, 4),
        overrides={
            "kv_cache": Override(seconds=0.02e-3),
            "linear_state": Override(seconds=0.09e-3),
            "allreduce": Override(count=128),
            "draft": Override(seconds=5.6e-3),
        },
    )
    ceiling = predict(inputs)
    milliseconds = {component.name: component.seconds * 1e3 for component in ceiling.peak.components}
    assert milliseconds == pytest.approx(
        {"weights": 35.15625, "kv_cache": 0.02, "linear_state": 0.09, "allreduce": 1.024, "draft": 5.6, "fixed": 0.5}
    )
    assert ceiling.peak.seconds == pytest.approx(42.39e-3, abs=1e-6)
    assert ceiling.perfect_peak == pytest.approx(94.36, abs=0.01)
    assert ceiling.observed_peak is None
    assert ceiling.parameters_draft is None
    assert ceiling.assumed == ()


@pytest.mark.parametrize("bandwidth", ["peak", "achievable"])
def test_components_sum_to_the_round(bandwidth: str) -> None:
    round_: Round = getattr(predict(founding_inputs()), bandwidth)
    assert math.fsum(component.seconds for component in round_.components) == round_.seconds


def test_efficiency_slows_memory_and_nothing_else() -> None:
    ceiling = predict(founding_inputs())
    for name in ("weights", "kv_cache", "linear_state"):
        assert component(ceiling.achievable, name).seconds == pytest.approx(component(ceiling.peak, name).seconds / 0.8)
    for name in ("allreduce", "logits_gather", "fixed"):
        assert component(ceiling.achievable, name) == component(ceiling.peak, name)


def test_which_components_are_listed() -> None:
    founding = founding_inputs(accept_length=None)
    assert names(founding) == ["weights", "kv_cache", "linear_state", "allreduce", "logits_gather", "draft", "fixed"]
    dense = replace(founding, shape=shape_of("qwen3-8b"), deployment=Deployment(), speculation=Speculation())
    assert names(dense) == ["weights", "kv_cache", "allreduce", "draft", "fixed"]


def test_one_rank_needs_no_link_and_communicates_nothing() -> None:
    hardware = replace(founding_inputs().hardware, link_bandwidth_bytes_per_second=None)
    ceiling = predict(replace(founding_inputs(), hardware=hardware, deployment=Deployment()))
    allreduce = component(ceiling.peak, "allreduce")
    assert (allreduce.seconds, allreduce.count, allreduce.bytes_per_gpu) == (0, 0, 0)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    inputs = replace(founding_inputs(), load=Load(128, 500))
    weights = component(predict(inputs).peak, "weights")
    assert weights.bound == "compute"
    assert weights.seconds == pytest.approx(weights.flops_per_gpu / 154.8e12)
    assert weights.flops_per_gpu == pytest.approx(2 * 25.625e9 / 2 * 128 * 4, rel=1e-4)


def test_recorded_rounds_on_an_h200_stay_above_the_peak_bound() -> None:
    """Qwen3-8B's shape, no speculation, Triton attention: (batch, mean context, measured round)."""
    for batch, context, round_seconds in (
        (1, 1837, 5.747e-3),
        (4, 1834, 5.809e-3),
        (16, 1717, 6.383e-3),
        (16, 8765, 13.045e-3),
    ):
        inputs = CeilingInputs(shape_of("qwen3-8b"), Hardware(4.8e12, 0.82), Load(batch, context, 1.0), fixed_seconds=0.0)
        assert 1.4 < round_seconds / predict(inputs).peak.seconds < 1.9


def test_modelled_bytes_agree_with_those_measured_on_an_h200() -> None:
    """27B gated-DeltaNet shape with MTP at TP 1: DRAM read at 2870 GB/s through rounds of 21.979 ms."""
    inputs = replace(founding_inputs(), deployment=Deployment(), load=Load(1, 1893))
    modelled = sum(component.bytes_per_gpu for component in predict(inputs).peak.components)
    assert modelled == pytest.approx(2870e9 * 21.979e-3, rel=0.03)


# ------------------------------------------------------------------------------------------------------------ Overrides


def with_override(name: str, override: Override) -> CeilingInputs:
    return replace(founding_inputs(), overrides={name: override})


def test_explicit_bytes_go_through_memory() -> None:
    weights = component(predict(with_override("weights", Override(bytes_per_gpu=27e9))).peak, "weights")
    assert (weights.bytes_per_gpu, weights.seconds) == (27e9, 27e9 / 768e9)


def test_explicit_bytes_of_the_draft_leave_its_communication() -> None:
    before = predict(founding_inputs()).peak
    draft = component(predict(with_override("draft", Override(bytes_per_gpu=768e6))).peak, "draft")
    modelled = component(before, "draft")
    assert draft.seconds - 1e-3 == pytest.approx(modelled.seconds - modelled.bytes_per_gpu / 768e9)


def test_explicit_bytes_of_an_allreduce_go_over_the_link() -> None:
    inputs = with_override("allreduce", Override(bytes_per_gpu=31.5e6))
    allreduce = component(predict(inputs).peak, "allreduce")
    assert allreduce.seconds == pytest.approx(129 * 8e-6 + 31.5e6 / (16e9 * 128 / 130 / 8 * 16))
    assert (allreduce.bytes_per_gpu, allreduce.bound) == (31.5e6, "latency")


def test_an_explicit_count_scales_latency_and_bytes() -> None:
    modelled = component(predict(founding_inputs()).peak, "allreduce")
    halved = component(predict(with_override("allreduce", Override(count=64.5))).peak, "allreduce")
    assert (halved.count, halved.bytes_per_gpu, halved.seconds) == pytest.approx(
        (64.5, modelled.bytes_per_gpu / 2, modelled.seconds / 2)
    )


def test_explicit_seconds_make_the_link_unnecessary() -> None:
    inputs = founding_inputs()
    overrides = {name: Override(seconds=1e-3) for name in ("allreduce", "logits_gather", "draft")}
    without_link = replace(inputs, hardware=replace(inputs.hardware, link_bandwidth_bytes_per_second=None), overrides=overrides)
    assert component(predict(without_link).peak, "allreduce").seconds == 1e-3


def test_explicit_draft_seconds_make_the_draft_model_unnecessary() -> None:
    inputs = replace(founding_inputs(), speculation=Speculation("eagle3", 3, 4), overrides={"draft": Override(seconds=2e-3)})
    assert component(predict(inputs).peak, "draft").seconds == 2e-3


def test_a_component_that_the_model_lacks_can_be_given() -> None:
    inputs = with_override("experts", Override(bytes_per_gpu=7.68e9))
    assert component(predict(inputs).peak, "experts").seconds == pytest.approx(10e-3)
    assert names(inputs)[:2] == ["weights", "experts"]


def test_a_model_known_by_its_parameters_names_what_it_lacks() -> None:
    inputs = replace(founding_inputs(), shape=shape_from_parameters(27_000_000_000), assumed=("memory_bandwidth",))
    ceiling = predict(inputs)
    assert ceiling.assumed == ("memory_bandwidth", "kv_cache", "allreduce", "draft")
    assert component(ceiling.peak, "kv_cache").seconds == component(ceiling.peak, "draft").seconds == 0
    assert ceiling.parameters_vision is None


# ------------------------------------------------------------------------------------------------------------- Refused

FOUNDING = founding_inputs()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (replace(FOUNDING, deployment=Deployment(tensor_parallel=0)), "^tensor_parallel: must be from 1 to 4096, not 0"),
        (replace(FOUNDING, deployment=Deployment(tensor_parallel=5)), "^tensor_parallel: .* cannot be divided over 5 ranks"),
        (replace(FOUNDING, deployment=Deployment(pipeline_parallel=2)), "^pipeline_parallel: .* not supported yet"),
        (replace(FOUNDING, deployment=Deployment(expert_parallel=2)), "^expert_parallel: .* not supported yet"),
        (replace(FOUNDING, deployment=Deployment(dp_attention=True)), "^dp_attention: .* not supported yet"),
        (replace(FOUNDING, hardware=Hardware(0, 0.8)), r"^memory_bandwidth_bytes_per_second: must be from 1e\+06 to 1e\+16"),
        (
            replace(FOUNDING, hardware=Hardware(math.inf, 0.8)),
            r"^memory_bandwidth_bytes_per_second: must be from 1e\+06 to 1e\+16",
        ),
        (replace(FOUNDING, hardware=Hardware(768e9, 1.01)), "^bandwidth_efficiency: must be from 0.001 to 1, not 1.01"),
        (replace(FOUNDING, hardware=Hardware(768e9, math.nan)), "^bandwidth_efficiency: must be"),
        (replace(FOUNDING, hardware=Hardware(768e9, 0.8, {"bf16": 0.0})), r"^matrix_flops_per_second\.bf16: must be from 1e"),
        (replace(FOUNDING, hardware=Hardware(768e9, 0.8)), "^link_bandwidth_bytes_per_second: needed"),
        (
            replace(FOUNDING, hardware=Hardware(768e9, 0.8, link_bandwidth_bytes_per_second=-1.0)),
            "^link_bandwidth_bytes_per_second: must be from 1e",
        ),
        (
            replace(FOUNDING, hardware=Hardware(768e9, 0.8, allreduce_latency_seconds=-1e-6)),
            "^allreduce_latency_seconds: must be from 0 to 1, not -1e-06",
        ),
        (replace(FOUNDING, fixed_seconds=-1.0), "^fixed_seconds: must be from 0 to 60, not -1"),
        (replace(FOUNDING, load=Load(0, 500)), "^batch: must be from 1e-06 to 1e"),
        (replace(FOUNDING, load=Load(1, -1)), "^context_tokens_per_request: must be from 0 to 1e"),
        (replace(FOUNDING, load=Load(1, 500, 4.5)), "^accept_length: must be between 1 and 4, .* not 4.5"),
        (replace(FOUNDING, load=Load(1, 500, 0.5)), "^accept_length: must be between 1 and 4"),
        (replace(FOUNDING, speculation=Speculation("mtp", 0, 4)), "^draft_steps: must be from 1 to 4096, not 0"),
        (replace(FOUNDING, speculation=Speculation("mtp", 3, 0)), "^draft_tokens: must be from 1 to 4096, not 0"),
        (
            with_override("wheights", Override(seconds=1)),
            "^overrides: there is no component 'wheights'; components are weights,",
        ),
        (with_override("weights", Override(seconds=-1)), r"^overrides\.weights\.seconds: must be from 0 to 1e"),
        (with_override("weights", Override(count=2)), r"^overrides\.weights\.count: only allreduce and logits_gather"),
        (with_override("fixed", Override(bytes_per_gpu=2)), r"^overrides\.fixed\.bytes: "),
    ],
)
def test_impossible_inputs_are_refused_by_name(inputs: CeilingInputs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(inputs)


def test_without_speculation_a_round_gives_one_token() -> None:
    plain = replace(FOUNDING, speculation=Speculation(), load=Load(1, 500, 2))
    with pytest.raises(
        ValueError, match=r"^accept_length: without speculation a round gives exactly 1 token per request, not 2$"
    ):
        predict(plain)


@pytest.mark.parametrize("seconds", [0, 1e-300])
def test_a_round_of_no_time_is_refused(seconds: float) -> None:
    inputs = CeilingInputs(
        shape_from_parameters(1),
        Hardware(1e9, 1.0),
        Load(1, 0),
        fixed_seconds=0.0,
        overrides={"weights": Override(seconds=seconds)},
    )
    with pytest.raises(ValueError, match="must take some time"):
        predict(inputs)


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (Speculation(), 1),
        (Speculation("mtp", 3, 4), 4),
        (Speculation("mtp", 3, 16), 4),
        (Speculation("mtp", 5, 4), 4),
        (Speculation("ngram", 0, 8), 8),
        (Speculation("ngram", 3, 8), 4),
    ],
)
def test_most_tokens_a_round_can_accept(speculation: Speculation, most: int) -> None:
    assert speculation.most_accepted_tokens == most
