"""Each lever is the model run again with one input changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ceilingd.ceiling.decode import predict
from ceilingd.ceiling.inputs import Deployment, Load, Override, Speculation
from ceilingd.ceiling.levers import levers
from ceilingd.ceiling.shape import shape_from_parameters
from support.shapes import founding_inputs, shape_of


def test_the_levers_of_the_founding_case() -> None:
    inputs = founding_inputs()
    found = levers(inputs, nvlink_bandwidth_bytes_per_second=56.25e9)
    assert list(found) == [
        "perfect_acceptance",
        "no_speculation",
        "fp8_weights",
        "fp8_kv_cache",
        "draft_steps_plus_one",
        "draft_steps_minus_one",
        "batch_double",
        "nvlink",
    ]
    now = predict(inputs)
    assert now.observed_peak is not None
    assert found["perfect_acceptance"].observed_peak == now.perfect_peak
    plain = replace(inputs, speculation=Speculation(), load=Load(1, 500, 1.0))
    assert found["no_speculation"] == predict(plain)
    assert found["fp8_weights"] == predict(replace(inputs, deployment=Deployment(2, quantization="fp8_block")))
    assert found["fp8_kv_cache"] == predict(replace(inputs, deployment=Deployment(2, kv_cache_dtype="fp8")))
    assert found["batch_double"] == predict(replace(inputs, load=Load(2, 500, 3.33)))
    assert found["nvlink"].peak.seconds < now.peak.seconds


def test_another_draft_length_moves_the_accept_length_too() -> None:
    inputs = founding_inputs(accept_length=2.952)
    more = levers(inputs)["draft_steps_plus_one"]
    expected = replace(inputs, speculation=Speculation("mtp", 4, 5), load=Load(1, 500, 2.952 + 0.8**4))
    assert more.observed_peak == pytest.approx(predict(expected).observed_peak)
    assert more.peak.seconds == predict(expected).peak.seconds


def test_levers_without_an_accept_length_compare_perfect_acceptance() -> None:
    found = levers(founding_inputs(accept_length=None))
    assert "perfect_acceptance" not in found
    assert all(ceiling.observed_peak is None for ceiling in found.values())


def test_levers_that_would_change_nothing_are_left_out() -> None:
    inputs = founding_inputs()
    quantized = replace(inputs, deployment=Deployment(2, quantization="fp8_tensor", kv_cache_dtype="fp8"))
    assert not {"fp8_weights", "fp8_kv_cache", "nvlink"} & set(levers(quantized))
    given = replace(inputs, overrides={"weights": Override(bytes_per_gpu=1e9), "draft": Override(seconds=1e-3)})
    assert set(levers(given)) == {"perfect_acceptance", "no_speculation", "fp8_kv_cache"}
    assert levers(given)["no_speculation"].peak.seconds < predict(given).peak.seconds
    one_rank = replace(inputs, shape=shape_of("qwen3-8b"), deployment=Deployment(), speculation=Speculation(), load=Load(1, 1))
    assert set(levers(one_rank, 56.25e9)) == {"fp8_weights", "fp8_kv_cache", "batch_double"}
    counted = replace(inputs, shape=shape_from_parameters(27 * 10**9))
    assert set(levers(counted)) == {"perfect_acceptance", "no_speculation", "fp8_weights"}


def test_a_draft_of_one_step_cannot_be_shortened() -> None:
    inputs = replace(founding_inputs(accept_length=1.5), speculation=Speculation("mtp", 1, 2))
    assert "draft_steps_minus_one" not in levers(inputs)
    assert "draft_steps_plus_one" in levers(inputs)
