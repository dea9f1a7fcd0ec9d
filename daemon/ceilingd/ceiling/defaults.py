"""Shares of the theoretical memory bandwidth that decode kernels usually reach, for where nothing was learned or configured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ceilingd.ceiling.quantization import Quantization

_OTHERWISE = 0.80
_BY_GPU_AND_FORMAT = {
    # Medians of published decode rounds against bytes / bandwidth, batch 1, FlashInfer and FA3 attention.
    ("A100", "bf16"): 0.73,
    ("H100", "bf16"): 0.83,
    ("H200", "bf16"): 0.82,
    ("L40S", "bf16"): 0.83,
    ("B200", "bf16"): 0.82,
    ("H100", "fp8"): 0.78,
    ("H200", "fp8"): 0.72,
    ("B200", "nvfp4"): 0.64,
}


def default_efficiency(gpu_name: str | None, quantization: Quantization | None) -> float:
    """Share of the peak memory bandwidth, 0 to 1, by GPU family and weight format; .80 where neither is listed.

    `gpu_name` as NVML or the GPU table spells it ("NVIDIA H100 80GB HBM3" is H100; "NVIDIA GH200 480GB" is not H200), or
    `None`; `quantization` `None` for 16-bit weights. Whoever uses it marks `bandwidth_efficiency` as assumed."""
    families = re.findall(r"[A-Z0-9]+", (gpu_name or "").upper())
    weight_format: str = quantization or "bf16"
    if weight_format.startswith("fp8"):
        weight_format = "fp8"
    for family in families:
        if (family, weight_format) in _BY_GPU_AND_FORMAT:
            return _BY_GPU_AND_FORMAT[family, weight_format]
    return _OTHERWISE
