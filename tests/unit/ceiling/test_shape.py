"""Tensors: how they are counted and divided over ranks."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.shape import Attention, GatedDeltaNet, Share, Tensor, head, padded_vocabulary, shape_from_parameters
from support.shapes import shape_of


@pytest.mark.parametrize(
    ("share", "ranks", "fraction"),
    [
        (Share(), 8, 1.0),
        (Share("tensor"), 8, 1 / 8),
        (Share("attention", 24), 2, 1 / 2),
        (Share("attention", 4, replicable=True), 2, 1 / 2),
        (Share("attention", 4, replicable=True), 8, 1 / 4),
        (Share("attention", 8, replicable=True), 8, 1 / 8),
    ],
)
def test_the_share_of_one_rank(share: Share, ranks: int, fraction: float) -> None:
    assert share.fraction(ranks, ranks) == fraction


def test_attention_tensors_follow_the_attention_ranks_and_the_rest_all_ranks() -> None:
    assert Share("attention").fraction(tensor_parallel=8, attention_parallel=2) == 1 / 2
    assert Share("tensor").fraction(tensor_parallel=8, attention_parallel=2) == 1 / 8


@pytest.mark.parametrize("share", [Share("attention", 24), Share("attention", 4, replicable=True)])
def test_what_does_not_divide_is_refused_with_the_field_and_the_tensor(share: Share) -> None:
    tensor = Tensor("q_proj", 24 * 128, 4096, share, "matrix")
    with pytest.raises(ValueError, match=r"^tensor_parallel: \d+ heads or channels .* 5 ranks \(q_proj\)$"):
        tensor.parameters_per_gpu(5, 5)


def test_the_vocabulary_is_padded_to_64_where_it_is_sharded_and_not_where_it_is_counted() -> None:
    assert (padded_vocabulary(32000), padded_vocabulary(50257)) == (32000, 50304)
    tensor = head(50257, 10)
    assert tensor.parameters == 502_570
    assert tensor.parameters_per_gpu(2, 2) == 251_520


def test_kv_elements_stop_falling_when_every_rank_holds_one_head() -> None:
    attention = Attention(hidden=5120, heads=24, kv_heads=4, head_dim=256)
    assert [attention.kv_elements_per_token(ranks) for ranks in (1, 2, 4, 8)] == [2048, 1024, 512, 512]


def test_linear_attention_state() -> None:
    mixer = GatedDeltaNet(5120, key_heads=16, key_dim=128, value_heads=48, value_dim=128, convolution_kernel=4)
    assert mixer.state_bytes(2) == 1_572_864 + 30_720
    assert mixer.kv_elements_per_token(2) == 0
    assert mixer.attention_flops(2) == 0


def test_attention_flops() -> None:
    assert Attention(hidden=5120, heads=24, kv_heads=4, head_dim=256).attention_flops(2) == 4 * 24 * 256 / 2


def test_a_tied_head_is_counted_once_and_streamed_as_head() -> None:
    shape = shape_of("llama-3.2-1b")
    assert shape.parameters == shape.parameters_streamed == 1_235_814_400
    assert sum(tensor.name == "lm_head" for _, tensor in shape.streamed_tensors()) == 1


def test_an_untied_embedding_is_counted_but_not_streamed() -> None:
    shape = shape_of("qwen2.5-7b")
    assert shape.parameters - shape.parameters_streamed == 152_064 * 3584


def test_a_model_known_by_its_parameter_count() -> None:
    shape = shape_from_parameters(27_000_000_000)
    assert shape.parameters_only
    assert shape.parameters == shape.parameters_streamed == 27_000_000_000
    with pytest.raises(ValueError, match=r"^parameters: must be positive"):
        shape_from_parameters(0)


def test_draft_layers_and_quantization_as_the_checkpoint_has_them() -> None:
    assert (shape_of("qwen3.6-27b").draft_layers, shape_of("qwen3-8b").draft_layers) == (1, 0)
    assert (shape_of("qwen3-8b").quantization, shape_of("llama-3.1-70b-fp8").quantization) == (None, "fp8_tensor")
