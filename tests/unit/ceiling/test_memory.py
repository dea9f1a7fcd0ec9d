"""Bytes of a pass, by hand and against figures counted on a real server."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.memory import (
    attention_flops,
    kv_cache_bytes,
    linear_state_bytes,
    states_per_round,
    streamed_weights,
    sum_weights,
)
from ceilingd.ceiling.quantization import BF16, WeightFormat
from ceilingd.ceiling.shape import Share, Tensor
from support.shapes import shape_of

QWEN = "qwen3.6-27b"


def test_two_matrices_over_two_ranks() -> None:
    matrix = Tensor("up_proj", 4096, 4096, Share("tensor", 4096), "matrix")
    weights = sum_weights([(2, matrix)], BF16, 2, 2)
    assert (weights.parameters, weights.bytes) == (16_777_216, 33_554_432)


def test_weights_of_the_founding_case() -> None:
    weights = streamed_weights(shape_of(QWEN), BF16, 2, 2)
    assert weights.bytes == pytest.approx(25.625e9, rel=1e-4)
    assert weights.bytes > shape_of(QWEN).parameters_streamed  # 2 bytes over 2 ranks, and the norms on both


def test_weights_counted_on_an_h200() -> None:
    """Recorded with Qwen3-8B's shape at TP 1: 15,136,194,560 bytes a round, norms left out."""
    assert streamed_weights(shape_of("qwen3-8b"), BF16, 1, 1).bytes == pytest.approx(15_136_194_560, rel=1e-4)


def test_quantization_leaves_the_head_at_16_bits() -> None:
    shape = shape_of("llama-3.1-8b")
    full, half = streamed_weights(shape, BF16, 1, 1), streamed_weights(shape, WeightFormat("fp8_tensor"), 1, 1)
    head_bytes = 128_256 * 4096 * 2
    norm_bytes = (2 * 32 + 1) * 4096 * 2
    assert half.bytes == (full.bytes - head_bytes - norm_bytes) / 2 + head_bytes + norm_bytes
    assert half.kept_parameters == (head_bytes + norm_bytes) / 2


def test_kv_cache() -> None:
    assert kv_cache_bytes(shape_of(QWEN), 2, 2, batch=1, context_tokens=500, tokens_per_request=4) == 16_646_144
    assert kv_cache_bytes(shape_of(QWEN), 2, 1, batch=1, context_tokens=500, tokens_per_request=4) == 16_646_144 / 2


def test_a_window_caps_what_is_read_but_not_what_is_written() -> None:
    per_token = 32 * 2 * 8 * 128 * 2
    shape = shape_of("mistral-7b-v0.1")
    assert kv_cache_bytes(shape, 1, 2, 1, 4000, 1) == per_token * (4000 + 2)
    assert kv_cache_bytes(shape, 1, 2, 1, 9000, 1) == per_token * (4096 + 2)


def test_attention_flops() -> None:
    assert attention_flops(shape_of(QWEN), 2, batch=1, context_tokens=500, tokens_per_request=4) == 396_361_728


def test_linear_state() -> None:
    assert linear_state_bytes(shape_of(QWEN), 2, batch=1, states=1) == 76_972_032
    assert linear_state_bytes(shape_of(QWEN), 2, batch=3, states=7) == 3 * 538_804_224
    assert linear_state_bytes(shape_of("qwen3-8b"), 2, batch=1, states=7) == 0


def test_states_touched_per_round() -> None:
    assert states_per_round(speculative=False, tokens_per_request=1) == 2
    assert states_per_round(speculative=True, tokens_per_request=4) == 7
