"""The draft's passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ceilingd.ceiling.draft import draft_model, draft_term, draft_weights
from ceilingd.ceiling.inputs import Deployment, Speculation
from ceilingd.parse.hf_config import parse_hf_config
from support.shapes import founding_inputs, read_config, shape_of

MTP = Speculation("mtp", 3, 4)


def test_an_mtp_pass_streams_its_layer_fc_and_the_targets_head() -> None:
    shape = shape_of("qwen3.6-27b")
    assert shape.mtp is not None
    weights = draft_weights(shape, MTP, Deployment(tensor_parallel=2), shape.mtp)
    layer = 372_244_480 + 2 * (512 + 2 * 5120 + 5120)  # matrices over 2 ranks at 2 bytes; norms on both
    fc = (2 * 5120 * 5120 + 2 * 5120) * 2
    head = 248_320 * 5120
    assert weights.bytes == 3 * (layer + fc + head)


def test_mtp_bytes_counted_on_an_h200() -> None:
    """Recorded with a 27B gated-DeltaNet shape at TP 1, 3 steps: 10,176,430,080 bytes a round, norms left out."""
    shape = shape_of("qwen3.6-27b")
    assert shape.mtp is not None
    assert draft_weights(shape, MTP, Deployment(), shape.mtp).bytes == pytest.approx(10_176_430_080, rel=1e-4)


def test_eagle3_reads_fc_once_and_its_own_head_every_time() -> None:
    """Recorded with Qwen3-8B's shape and an EAGLE3 head at TP 1, 3 steps: 2,195,718,144 bytes a round, norms left out."""
    speculation = Speculation("eagle3", 3, 4, shape_of("eagle3-qwen3-8b"))
    assert speculation.draft_shape is not None
    weights = draft_weights(shape_of("qwen3-8b"), speculation, Deployment(), speculation.draft_shape)
    assert weights.bytes - 3 * 4 * 4096 * 2 == 2_195_718_144


def test_eagle_reads_fc_and_the_targets_head_every_time() -> None:
    draft = parse_hf_config(read_config("eagle3-qwen3-8b") | {"architectures": ["LlamaForCausalLMEagle"]})
    weights = draft_weights(shape_of("qwen3-8b"), Speculation("eagle", 2, 3, draft), Deployment(), draft)
    layer = (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 2 * 4096
    assert weights.bytes == 2 * 2 * (layer + 2 * 4096 * 4096 + 151_936 * 4096)


def test_a_standalone_draft_streams_whole_in_its_own_format() -> None:
    draft = shape_of("qwen3-0.6b")
    weights = draft_weights(
        shape_of("qwen3-8b"), Speculation("standalone", 3, 4, draft), Deployment(quantization="fp8_block"), draft
    )
    assert weights.bytes == 3 * 2 * draft.parameters_streamed


def test_mtp_layers_follow_the_quantization_of_the_target_and_fc_does_not() -> None:
    shape = shape_of("qwen3.6-27b")
    assert shape.mtp is not None
    full = draft_weights(shape, MTP, Deployment(), shape.mtp)
    half = draft_weights(shape, MTP, Deployment(quantization="fp8_tensor"), shape.mtp)
    assert full.bytes - half.bytes == 3 * 372_244_480


def test_the_term_adds_kv_cache_and_communication() -> None:
    inputs = founding_inputs()
    assert inputs.shape.mtp is not None
    term = draft_term(inputs, inputs.shape.mtp)
    weights = draft_weights(inputs.shape, inputs.speculation, inputs.deployment, inputs.shape.mtp)
    assert term.memory_bytes - weights.bytes == 3 * 2 * 2 * 256 * 2 * (500 + 1 + 1)
    assert term.count == 3
    assert term.latency_seconds == pytest.approx((3 * 3 + 3) * 8e-6)
    assert term.link_bytes == 9 * 5120 * 2 + 3 * 248_320 * 2 / 2


def test_no_draft_costs_nothing() -> None:
    plain = replace(founding_inputs(accept_length=1.0), speculation=Speculation())
    component = draft_term(plain, None).at(768e9)
    assert (component.seconds, component.count, component.bytes_per_gpu) == (0, 0, 0)


def test_which_model_drafts() -> None:
    shape = shape_of("qwen3.6-27b")
    assert draft_model(shape, MTP) is shape.mtp
    assert draft_model(shape, Speculation()) is None
    assert draft_model(shape, Speculation("ngram", 0, 8)) is None
    with pytest.raises(ValueError, match=r"^speculation\.algorithm: mtp needs MTP layers"):
        draft_model(shape_of("qwen3-8b"), MTP)
    with pytest.raises(ValueError, match=r"^speculation\.draft_shape: eagle3 needs"):
        draft_model(shape, Speculation("eagle3", 3, 4))
