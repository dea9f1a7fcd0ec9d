"""Default shares of the memory bandwidth."""

from __future__ import annotations

import pytest

from ceilingd.ceiling.defaults import default_efficiency
from ceilingd.ceiling.quantization import Quantization


@pytest.mark.parametrize(
    ("gpu", "quantization", "efficiency"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 0.73),
        ("NVIDIA H100 80GB HBM3", "bf16", 0.83),
        ("NVIDIA H100 80GB HBM3", None, 0.83),
        ("H100-SXM", "fp8_block", 0.78),
        ("NVIDIA H200", "bf16", 0.82),
        ("NVIDIA H200", "fp8_tensor", 0.72),
        ("NVIDIA L40S", "bf16", 0.83),
        ("NVIDIA B200", "bf16", 0.82),
        ("NVIDIA B200", "nvfp4", 0.64),
        ("NVIDIA B200", "fp8_block", 0.80),
        ("NVIDIA L40", "bf16", 0.80),
        ("NVIDIA GH200 480GB", "bf16", 0.80),
        ("NVIDIA RTX A6000", "awq", 0.80),
        (None, "bf16", 0.80),
    ],
)
def test_default_efficiency(gpu: str | None, quantization: Quantization | None, efficiency: float) -> None:
    assert default_efficiency(gpu, quantization) == efficiency
