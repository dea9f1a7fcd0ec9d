"""Bits per weight and which tensors they apply to."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.quantization import Quantization, WeightFormat, bits_per_weight
from ceilingd.ceiling.shape import Tensor, embedding, head, norm


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ("bf16", 16.0),
        ("fp8_tensor", 8.0),
        ("fp8_channel", 8 + 32 / 4096),
        ("fp8_block", 8 + 32 / 16384),
        ("int8_channel", 8 + 32 / 4096),
        ("awq", 4.15625),
        ("gptq", 4.15625),
        ("nvfp4", 4.5),
        ("mxfp4", 4.25),
    ],
)
def test_bits_per_weight(quantization: Quantization, bits: float) -> None:
    assert bits_per_weight(quantization, columns=4096) == bits


def test_groups_without_zero_points_and_of_other_sizes() -> None:
    assert bits_per_weight("gptq", 4096, symmetric=True) == 4.125
    assert bits_per_weight("awq", 4096, group_size=64) == 4 + 20 / 64


def test_only_matrices_are_quantized_and_the_head_where_the_format_says_so() -> None:
    matrix = Tensor("q_proj", 4096, 4096, kind="matrix")
    plain, with_head = WeightFormat("fp8_tensor"), WeightFormat("fp8_tensor", head=True)
    assert [
        plain.bits(tensor.kind, tensor.columns) for tensor in (matrix, head(64, 64), embedding(64, 64), norm("norm", 64))
    ] == [8, 16, 16, 16]
    assert [
        with_head.bits(tensor.kind, tensor.columns) for tensor in (matrix, head(64, 64), embedding(64, 64), norm("norm", 64))
    ] == [8, 8, 16, 16]


@pytest.mark.parametrize(
    ("quantization", "arithmetic"),
    [("bf16", "bf16"), ("awq", "bf16"), ("fp8_block", "fp8"), ("int8_channel", "int8"), ("nvfp4", "fp4")],
)
def test_the_format_of_the_multiplication(quantization: Quantization, arithmetic: str) -> None:
    assert WeightFormat(quantization).arithmetic == arithmetic
