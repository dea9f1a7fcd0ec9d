"""What must hold for the ceiling of any model on any hardware."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ceilingd.ceiling.decode import predict
from ceilingd.ceiling.inputs import CeilingInputs, Deployment, Hardware, Load, Speculation
from ceilingd.ceiling.levers import levers
from support.shapes import shape_of

MODELS = ("qwen3.6-27b", "qwen3-8b", "qwen2.5-3b", "llama-3.2-1b", "mistral-7b-v0.1", "llama-3.1-70b-fp8")


@st.composite
def speculations(draw: st.DrawFn, model: str) -> Speculation:
    algorithms = ["none", "ngram", "standalone"] + (["mtp"] if shape_of(model).draft_layers else [])
    algorithm = draw(st.sampled_from(algorithms))
    steps, tokens = draw(st.integers(1, 7)), draw(st.integers(1, 16))
    match algorithm:
        case "mtp":
            return Speculation("mtp", steps, tokens)
        case "ngram":
            return Speculation("ngram", 0, tokens)
        case "standalone":
            return Speculation("standalone", steps, tokens, shape_of("qwen3-0.6b"))
    return Speculation()


@st.composite
def all_inputs(draw: st.DrawFn) -> CeilingInputs:
    model = draw(st.sampled_from(MODELS))
    speculation = draw(speculations(model))
    return CeilingInputs(
        shape=shape_of(model),
        hardware=Hardware(
            memory_bandwidth_bytes_per_second=draw(st.floats(50e9, 10e12)),
            bandwidth_efficiency=draw(st.floats(0.05, 1.0)),
            matrix_flops_per_second=draw(st.sampled_from([{}, {"bf16": 154.8e12}, {"bf16": 989e12, "fp8": 1978e12}])),
            link_bandwidth_bytes_per_second=draw(st.floats(1e9, 900e9)),
            allreduce_latency_seconds=draw(st.floats(0, 1e-4)),
            allreduce_algorithm=draw(st.sampled_from(["ring", "one_shot"])),
        ),
        load=Load(
            batch=draw(st.floats(0.1, 512)),
            context_tokens_per_request=draw(st.floats(0, 200_000)),
            accept_length=draw(st.none() | st.floats(1, speculation.most_accepted_tokens)),
        ),
        deployment=Deployment(
            tensor_parallel=draw(st.sampled_from([1, 2, 4])), kv_cache_dtype=draw(st.sampled_from(["bf16", "fp8"]))
        ),
        speculation=speculation,
        fixed_seconds=draw(st.floats(0, 0.01)),
    )


factors = st.floats(1.0, 100.0)


@given(all_inputs())
def test_components_sum_to_the_round_and_none_is_negative(inputs: CeilingInputs) -> None:
    ceiling = predict(inputs)
    for round_ in (ceiling.peak, ceiling.achievable):
        assert math.fsum(component.seconds for component in round_.components) == round_.seconds
        assert all(component.seconds >= 0 and math.isfinite(component.seconds) for component in round_.components)


@given(all_inputs())
def test_peak_bounds_achievable_and_perfect_bounds_observed(inputs: CeilingInputs) -> None:
    ceiling = predict(inputs)
    assert ceiling.perfect_peak >= ceiling.perfect_achievable
    if inputs.load.accept_length is not None:
        assert ceiling.observed_peak is not None
        assert ceiling.observed_achievable is not None
        assert ceiling.perfect_peak >= ceiling.observed_peak >= ceiling.observed_achievable
    else:
        assert ceiling.observed_peak is ceiling.observed_achievable is None


@given(all_inputs(), factors)
def test_more_memory_bandwidth_never_lowers_a_ceiling(inputs: CeilingInputs, factor: float) -> None:
    faster = replace(
        inputs.hardware, memory_bandwidth_bytes_per_second=inputs.hardware.memory_bandwidth_bytes_per_second * factor
    )
    assert predict(replace(inputs, hardware=faster)).perfect_peak >= predict(inputs).perfect_peak


@given(all_inputs(), factors, factors)
def test_a_slower_link_or_a_longer_latency_never_raises_a_ceiling(inputs: CeilingInputs, link: float, latency: float) -> None:
    assert inputs.hardware.link_bandwidth_bytes_per_second is not None
    slower = replace(
        inputs.hardware,
        link_bandwidth_bytes_per_second=inputs.hardware.link_bandwidth_bytes_per_second / link,
        allreduce_latency_seconds=inputs.hardware.allreduce_latency_seconds * latency,
    )
    assert predict(replace(inputs, hardware=slower)).perfect_peak <= predict(inputs).perfect_peak


@given(all_inputs(), st.floats(0, 100_000))
def test_more_context_never_raises_a_ceiling(inputs: CeilingInputs, tokens: float) -> None:
    longer = replace(inputs.load, context_tokens_per_request=inputs.load.context_tokens_per_request + tokens)
    assert predict(replace(inputs, load=longer)).perfect_peak <= predict(inputs).perfect_peak


@given(all_inputs(), factors)
def test_a_larger_batch_never_shortens_a_round(inputs: CeilingInputs, factor: float) -> None:
    larger = replace(inputs.load, batch=inputs.load.batch * factor)
    assert predict(replace(inputs, load=larger)).peak.seconds >= predict(inputs).peak.seconds


@given(all_inputs())
def test_one_rank_communicates_nothing(inputs: CeilingInputs) -> None:
    alone = replace(inputs, deployment=replace(inputs.deployment, tensor_parallel=1))
    far = replace(alone.hardware, link_bandwidth_bytes_per_second=None, allreduce_latency_seconds=1.0)
    assert predict(alone) == predict(replace(alone, hardware=far))


@given(all_inputs(), st.floats(0.01, 100))
def test_a_machine_k_times_as_fast_decodes_k_times_as_fast(inputs: CeilingInputs, factor: float) -> None:
    hardware = inputs.hardware
    assert hardware.link_bandwidth_bytes_per_second is not None
    faster = replace(
        hardware,
        memory_bandwidth_bytes_per_second=hardware.memory_bandwidth_bytes_per_second * factor,
        matrix_flops_per_second={name: rate * factor for name, rate in hardware.matrix_flops_per_second.items()},
        link_bandwidth_bytes_per_second=hardware.link_bandwidth_bytes_per_second * factor,
        allreduce_latency_seconds=hardware.allreduce_latency_seconds / factor,
    )
    scaled = replace(inputs, hardware=faster, fixed_seconds=inputs.fixed_seconds / factor)
    assert math.isclose(predict(scaled).perfect_peak, predict(inputs).perfect_peak * factor, rel_tol=1e-9)


@given(all_inputs())
def test_fewer_bytes_and_better_acceptance_never_lower_the_ceiling(inputs: CeilingInputs) -> None:
    now = predict(inputs)
    found = levers(inputs, nvlink_bandwidth_bytes_per_second=None)
    for name in ("fp8_kv_cache", "perfect_acceptance"):
        if name in found:
            assert found[name].perfect_peak >= now.perfect_peak
