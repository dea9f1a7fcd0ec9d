"""What a model is made of: its weight tensors, and what its layers keep per token and per request.

The tensors are the single truth: parameter counts, bytes streamed per GPU and FLOPs are all sums over them. A new kind
of layer is a small frozen class that lists its tensors and answers the questions of `Mixer` or `Mlp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from ceilingd.ceiling.quantization import BF16, TensorKind, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ceilingd.ceiling.quantization import Quantization

VOCABULARY_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this before sharding (`DEFAULT_VOCAB_PADDING_SIZE`)."""


@dataclass(frozen=True, slots=True)
class Share:
    """How a tensor is divided over ranks."""

    axis: Literal["none", "tensor", "attention"] = "none"
    """`tensor`: all tensor-parallel ranks; `attention`: those that share one request's attention; `none`: every rank
    holds all of it."""
    units: int | None = None
    """Indivisible pieces along the divided dimension (heads, channels); `None` where any division will do."""
    replicable: bool = False
    """With more ranks than units, several ranks hold the same unit (key and value heads)."""

    def fraction(self, tensor_parallel: int, attention_parallel: int) -> float:
        """One rank's part, 0 to 1: 24 heads over 2 ranks 1/2; 4 replicable heads over 8 ranks `max(4/8, 1)/4` = 1/4.

        Raises `ValueError` when the units do not divide over the ranks."""
        if self.axis == "none":
            return 1.0
        ranks = tensor_parallel if self.axis == "tensor" else attention_parallel
        if self.units is None or self.units % ranks == 0:
            return 1.0 / ranks
        if self.replicable and ranks % self.units == 0:
            return 1.0 / self.units
        raise ValueError(f"{self.units} heads or channels cannot be divided over {ranks} ranks")


REPLICATED = Share()


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight tensor of `rows` (outputs) by `columns` (inputs), named as the checkpoint names it within its layer."""

    name: str
    rows: int
    columns: int = 1
    share: Share = REPLICATED
    kind: TensorKind = "kept"

    @property
    def parameters(self) -> int:
        return self.rows * self.columns

    def parameters_per_gpu(self, tensor_parallel: int, attention_parallel: int) -> float:
        """Elements that one rank holds and reads. Raises `ValueError` when the tensor cannot be divided that way."""
        rows = padded_vocabulary(self.rows) if self.kind in ("embedding", "head") else self.rows
        try:
            return rows * self.columns * self.share.fraction(tensor_parallel, attention_parallel)
        except ValueError as error:
            raise ValueError(f"tensor_parallel: {error} ({self.name})") from None


def padded_vocabulary(vocabulary: int) -> int:
    """Rows of embedding and head as the engine holds them: 32,000 stays, 50,257 becomes 50,304."""
    return math.ceil(vocabulary / VOCABULARY_PADDING) * VOCABULARY_PADDING


def embedding(vocabulary: int, hidden: int) -> Tensor:
    """The input embedding: parameters, but never streamed."""
    return Tensor("embed_tokens", vocabulary, hidden, Share("tensor"), "embedding")


def head(vocabulary: int, hidden: int) -> Tensor:
    """The LM head; of a tied model the embedding matrix in that role."""
    return Tensor("lm_head", vocabulary, hidden, Share("tensor"), "head")


def norm(name: str, size: int) -> Tensor:
    """An RMS norm's weight, on every rank."""
    return Tensor(name, size)


class Mixer(Protocol):
    """The part of a layer that looks at other tokens."""

    def tensors(self) -> tuple[Tensor, ...]: ...

    def kv_elements_per_token(self, attention_parallel: int) -> float:
        """Cached numbers per context token on one rank; 0 for a mixer without KV cache."""
        ...

    @property
    def window_tokens(self) -> int | None:
        """Most context tokens that are read back; `None` for all of them."""
        ...

    def state_bytes(self, attention_parallel: int) -> float:
        """Recurrent state per request on one rank; 0 for attention."""
        ...

    def attention_flops(self, attention_parallel: int) -> float:
        """FLOPs on one rank per new token and context token."""
        ...


class Mlp(Protocol):
    """The part of a layer that looks at one token only."""

    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    """A sigmoid gate on the output, computed by a second half of `q_proj` (Qwen3-Next, Qwen3.5)."""
    window_tokens: int | None = None
    input_columns: int | None = None
    """Width of the projections' input where it is not `hidden` (EAGLE3 feeds embedding and hidden state side by side)."""

    def tensors(self) -> tuple[Tensor, ...]:
        columns = self.input_columns or self.hidden
        q_rows = self.heads * self.head_dim * (2 if self.output_gate else 1)
        kv_rows = self.kv_heads * self.head_dim
        q_share = Share("attention", self.heads)
        kv_share = Share("attention", self.kv_heads, replicable=True)
        tensors = [
            Tensor("q_proj", q_rows, columns, q_share, "matrix"),
            Tensor("k_proj", kv_rows, columns, kv_share, "matrix"),
            Tensor("v_proj", kv_rows, columns, kv_share, "matrix"),
            Tensor("o_proj", self.hidden, self.heads * self.head_dim, q_share, "matrix"),
        ]
        if self.qkv_bias:
            tensors += [
                Tensor("q_proj.bias", q_rows, share=q_share),
                Tensor("k_proj.bias", kv_rows, share=kv_share),
                Tensor("v_proj.bias", kv_rows, share=kv_share),
            ]
        if self.output_bias:
            tensors.append(Tensor("o_proj.bias", self.hidden))
        if self.qk_norm:
            tensors += [norm("q_norm", self.head_dim), norm("k_norm", self.head_dim)]
        return tuple(tensors)

    def kv_elements_per_token(self, attention_parallel: int) -> float:
        """Key and value of the heads on this rank: 4 heads of 256 over 2 ranks: 2 x 2 x 256 = 1024."""
        return 2 * max(self.kv_heads / attention_parallel, 1.0) * self.head_dim

    def state_bytes(self, attention_parallel: int) -> float:
        return 0.0

    def attention_flops(self, attention_parallel: int) -> float:
        """Two products (scores, values) of 2 FLOPs per element of every query head: `4 H hd`."""
        return 4 * self.heads * self.head_dim / attention_parallel


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Linear attention with a matrix state per value head (Qwen3-Next, Qwen3.5; arXiv 2412.06464)."""

    hidden: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    convolution_kernel: int
    state_element_bytes: int = 4
    """float32 unless the config's `mamba_ssm_dtype` says otherwise."""

    @property
    def _convolution_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def tensors(self) -> tuple[Tensor, ...]:
        values = self.value_heads * self.value_dim
        by_key, by_value = Share("attention", self.key_heads), Share("attention", self.value_heads)
        return (
            Tensor("in_proj_qkv", self._convolution_channels, self.hidden, by_key, "matrix"),
            Tensor("in_proj_z", values, self.hidden, by_value, "matrix"),
            # Gate projections of a few dozen rows: too narrow for a 128 x 128 quantization block, kept at 16 bits.
            Tensor("in_proj_a", self.value_heads, self.hidden, by_value),
            Tensor("in_proj_b", self.value_heads, self.hidden, by_value),
            Tensor("conv1d", self._convolution_channels, self.convolution_kernel, by_key),
            Tensor("A_log", self.value_heads, share=by_value),
            Tensor("dt_bias", self.value_heads, share=by_value),
            norm("norm", self.value_dim),
            Tensor("out_proj", self.hidden, values, by_value, "matrix"),
        )

    def kv_elements_per_token(self, attention_parallel: int) -> float:
        return 0.0

    @property
    def window_tokens(self) -> int | None:
        return None

    def state_bytes(self, attention_parallel: int) -> float:
        """`Hv dk dv s` of matrix state plus `(2 Hk dk + Hv dv)(k - 1) x 2` of convolution inputs, divided over the ranks.

        48 value heads of 128 x 128 in float32 over 2 ranks: 1,572,864; 10,240 channels, kernel 4: 30,720 more."""
        recurrent = self.value_heads * self.key_dim * self.value_dim * self.state_element_bytes
        convolution = self._convolution_channels * (self.convolution_kernel - 1) * 2
        return (recurrent + convolution) / attention_parallel

    def attention_flops(self, attention_parallel: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate, up and down projection (SwiGLU)."""

    hidden: int
    intermediate: int
    bias: bool = False

    def tensors(self) -> tuple[Tensor, ...]:
        share = Share("tensor", self.intermediate)
        tensors: tuple[Tensor, ...] = (
            Tensor("gate_proj", self.intermediate, self.hidden, share, "matrix"),
            Tensor("up_proj", self.intermediate, self.hidden, share, "matrix"),
            Tensor("down_proj", self.hidden, self.intermediate, share, "matrix"),
        )
        if self.bias:
            tensors += (
                Tensor("gate_proj.bias", self.intermediate, share=share),
                Tensor("up_proj.bias", self.intermediate, share=share),
                Tensor("down_proj.bias", self.hidden),
            )
        return tensors


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are all alike: `count` of them."""

    count: int
    mixer: Mixer
    mlp: Mlp
    norms: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of one of these layers."""
        return self.mixer.tensors() + self.mlp.tensors() + self.norms


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: a target, or a draft that leans on a target's embedding and head."""

    hidden: int
    """Width of the residual stream; 0 for a model known only by its parameter count."""
    layers: tuple[Layers, ...]
    """Groups of equal layers, in order of first appearance; empty for a model known only by its parameter count."""
    embedding: Tensor | None = None
    """`None` for a draft that uses its target's."""
    head: Tensor | None = None
    """`None` for a draft that uses its target's."""
    tied: bool = False
    """The head is the embedding matrix: one set of parameters, streamed as head."""
    entry: tuple[Tensor, ...] = ()
    """What joins a target's hidden state to the token embedding at the entry of a draft (`fc` and its norms)."""
    other: tuple[Tensor, ...] = ()
    """What belongs to no layer: the final norm."""
    weight_format: WeightFormat = BF16
    mtp: ModelShape | None = None
    """The multi-token-prediction layers of the checkpoint."""
    vision_parameters: int = 0
    """The vision tower: loaded, but idle in decode."""

    @property
    def layer_count(self) -> int:
        return sum(group.count for group in self.layers)

    @property
    def quantization(self) -> Quantization | None:
        """The checkpoint's own format; `None` where it holds plain 16-bit weights."""
        return None if self.weight_format.quantization == "bf16" else self.weight_format.quantization

    @property
    def draft_layers(self) -> int:
        """Multi-token-prediction layers in the checkpoint."""
        return 0 if self.mtp is None else self.mtp.layer_count

    @property
    def parameters_only(self) -> bool:
        """Nothing is known but the number of parameters."""
        return not self.layers

    def streamed_tensors(self) -> Iterator[tuple[int, Tensor]]:
        """(how many, tensor) of everything that a pass reads, the entry of a draft apart: layers, final norm, own head."""
        for group in self.layers:
            for tensor in group.tensors():
                yield group.count, tensor
        for tensor in self.other:
            yield 1, tensor
        if self.head is not None:
            yield 1, self.head

    @property
    def parameters(self) -> int:
        """All weights of this model: embedding and head included, tied ones once; MTP layers and vision tower not."""
        return _parameters_streamed(self) + (0 if self.embedding is None or self.tied else self.embedding.parameters)

    @property
    def parameters_streamed(self) -> int:
        """What one pass reads: all but the input embedding (Qwen2.5-7B: 7.62e9 - 152,064 x 3,584)."""
        return _parameters_streamed(self)


@lru_cache(maxsize=64)
def _parameters_streamed(shape: ModelShape) -> int:
    layers = sum(count * tensor.parameters for count, tensor in shape.streamed_tensors())
    return layers + sum(tensor.parameters for tensor in shape.entry)


def shape_from_parameters(count: int) -> ModelShape:
    """A model of which only the parameter count is known: it streams whole, divided evenly over the ranks.

    Every other term needs an explicit value, or is 0 and named as assumed. Raises `ValueError` when `count` is not positive."""
    if count <= 0:
        raise ValueError(f"parameters: must be positive, not {count}")
    return ModelShape(hidden=0, layers=(), other=(Tensor("parameters", 1, count, Share("tensor"), "matrix"),))
