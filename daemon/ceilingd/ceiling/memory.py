"""Bytes that one GPU reads and writes in a pass: weights, KV cache, linear-attention state. And the FLOPs done with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ceilingd.ceiling.quantization import WeightFormat
    from ceilingd.ceiling.shape import ModelShape, Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that one GPU streams in one pass."""

    bytes: float
    quantized_parameters: float
    """Those that are multiplied in the model's own number format."""
    kept_parameters: float
    """Those that are multiplied in bf16 whatever the format."""

    @property
    def parameters(self) -> float:
        return self.quantized_parameters + self.kept_parameters


@lru_cache(maxsize=256)
def streamed_weights(shape: ModelShape, weight_format: WeightFormat, tensor_parallel: int, attention_parallel: int) -> Weights:
    """Weights of one pass of `shape`, the entry of a draft apart.

    Qwen3.6-27B in bf16 over 2 ranks: 25.625e9 bytes. Raises `ValueError` when a tensor does not divide over the ranks.
    Depends only on the model and its deployment, so it is computed once for the thousands of predictions of a day."""
    return sum_weights(shape.streamed_tensors(), weight_format, tensor_parallel, attention_parallel)


def sum_weights(
    tensors: Iterable[tuple[int, Tensor]], weight_format: WeightFormat, tensor_parallel: int, attention_parallel: int
) -> Weights:
    """What one GPU streams of `(how many, tensor)`.

    Two 4096 x 4096 matrices over 2 ranks in bf16: 2 x 4096 x 4096 / 2 = 16,777,216 parameters, 33,554,432 bytes."""
    total_bytes = quantized = kept = 0.0
    for count, tensor in tensors:
        parameters = count * tensor.parameters_per_gpu(tensor_parallel, attention_parallel)
        total_bytes += parameters * weight_format.bits(tensor.kind, tensor.columns) / 8
        if weight_format.quantizes(tensor.kind):
            quantized += parameters
        else:
            kept += parameters
    return Weights(total_bytes, quantized, kept)


def kv_cache_bytes(
    shape: ModelShape,
    attention_parallel: int,
    element_bytes: int,
    batch: float,
    context_tokens: float,
    tokens_per_request: float,
) -> float:
    """KV cache read and written in one pass: per request `min(context, window) + D` tokens read, D written.

    Qwen3.6-27B over 2 ranks in bf16: 16 attention layers x 1024 x 2 = 32,768 bytes a token; one request of 500 tokens,
    D = 4: 32,768 x (504 + 4) = 16,646,144."""
    total = 0.0
    for group in shape.layers:
        per_token = group.count * group.mixer.kv_elements_per_token(attention_parallel) * element_bytes
        read_tokens = _tokens_seen(group.mixer.window_tokens, context_tokens) + tokens_per_request
        total += per_token * batch * (read_tokens + tokens_per_request)
    return total


def attention_flops(
    shape: ModelShape, attention_parallel: int, batch: float, context_tokens: float, tokens_per_request: float
) -> float:
    """FLOPs of attention over the context in one pass: `4 H hd` per layer, new token and token seen.

    Qwen3.6-27B over 2 ranks: 16 layers x 4 x 24 x 256 / 2 = 196,608; 4 new tokens that see 504 each: 396,361,728."""
    total = 0.0
    for group in shape.layers:
        seen_tokens = _tokens_seen(group.mixer.window_tokens, context_tokens) + tokens_per_request
        total += group.count * group.mixer.attention_flops(attention_parallel) * batch * tokens_per_request * seen_tokens
    return total


def _tokens_seen(window_tokens: int | None, context_tokens: float) -> float:
    return context_tokens if window_tokens is None else min(context_tokens, window_tokens)


def linear_state_bytes(shape: ModelShape, attention_parallel: int, batch: float, states: float) -> float:
    """Linear-attention state moved in one pass that touches each request's state `states` times.

    Qwen3.6-27B over 2 ranks: 48 layers x (1,572,864 + 30,720) = 76,972,032 bytes a state; 7 of them: 538,804,224."""
    per_request = sum(group.count * group.mixer.state_bytes(attention_parallel) for group in shape.layers)
    return per_request * batch * states


def states_per_round(speculative: bool, tokens_per_request: float) -> float:
    """How often a round touches each state: read and write; with speculation SGLang's verify pass reads once, writes a
    snapshot per draft token and commits the accepted one (read, write): `1 + D + 2`, 7 for D = 4."""
    return 1 + tokens_per_request + 2 if speculative else 2
