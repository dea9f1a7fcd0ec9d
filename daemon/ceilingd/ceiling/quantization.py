"""How many bits a weight takes in each storage format, scales included, and at which rate it is multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantization = Literal[
    "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "awq", "gptq", "nvfp4", "mxfp4"
]  # fmt: skip
TensorKind = Literal["matrix", "embedding", "head", "kept"]
"""`matrix` follows the model's quantization, `head` only where that says so; `embedding` and `kept` (norms, biases,
convolutions, routers) stay at 16 bits."""

KEPT_BITS = 16.0
"""Embedding, norms, biases and routers in every format, and the head unless the format says otherwise."""

_ARITHMETIC = {
    # 4-bit integer weights are widened to 16 bits before they are multiplied (Marlin, AWQ kernels).
    "bf16": "bf16",
    "awq": "bf16",
    "gptq": "bf16",
    "fp8_tensor": "fp8",
    "fp8_channel": "fp8",
    "fp8_block": "fp8",
    "int8_channel": "int8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}


def bits_per_weight(quantization: Quantization, columns: int, group_size: int = 128, symmetric: bool = False) -> float:
    """Bits one weight of a matrix with `columns` inputs takes, its share of the scales included.

    bf16 16; fp8 per tensor 8, per output channel 8 + 32/columns, per 128 x 128 block 8 + 32/16384; int8 per channel
    8 + 32/columns; AWQ and GPTQ with groups of 128: 4 + (16 + 4)/128 = 4.156, symmetric (no zero points) 4 + 16/128 =
    4.125; NVFP4 4 + 8/16 = 4.5; MXFP4 4 + 8/32 = 4.25. The per-tensor scales are below any accuracy here."""
    match quantization:
        case "bf16":
            return 16.0
        case "fp8_tensor":
            return 8.0
        case "fp8_channel" | "int8_channel":
            return 8.0 + 32.0 / columns
        case "fp8_block":
            return 8.0 + 32.0 / (128 * 128)
        case "awq" | "gptq":
            return 4.0 + (16.0 if symmetric else 20.0) / group_size
        case "nvfp4":
            return 4.5
        case "mxfp4":
            return 4.25


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of a checkpoint's matrices. Everything that is not a matrix stays at 16 bits."""

    quantization: Quantization = "bf16"
    group_size: int = 128
    """Only for awq and gptq."""
    symmetric: bool = False
    """Only for awq and gptq: no zero points are stored."""
    head: bool = False
    """The head is quantized as well."""

    def quantizes(self, kind: TensorKind) -> bool:
        """Whether tensors of this kind are held in this format rather than at 16 bits."""
        return kind == "matrix" or (kind == "head" and self.head)

    def bits(self, kind: TensorKind, columns: int) -> float:
        """Bits per element of a tensor of this kind with `columns` inputs."""
        if not self.quantizes(kind):
            return KEPT_BITS
        return bits_per_weight(self.quantization, columns, self.group_size, self.symmetric)

    @property
    def arithmetic(self) -> str:
        """The number format of the multiplication: a key of `Hardware.matrix_flops_per_second`."""
        return _ARITHMETIC[self.quantization]


BF16 = WeightFormat()
"""Plain 16-bit weights."""
