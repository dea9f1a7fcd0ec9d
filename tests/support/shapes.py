"""Shapes of real models and the deployment that the documentation follows throughout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ceilingd.ceiling.inputs import CeilingInputs, Deployment, Hardware, Load, Speculation
from ceilingd.ceiling.shape import ModelShape
from ceilingd.links.rates import link_bandwidth
from ceilingd.parse.hf_config import parse_hf_config

CONFIGS = Path(__file__).parent.parent / "data" / "model_configs"


def read_config(name: str) -> dict[str, Any]:
    """A fresh copy of the config.json of `name`, to be changed at will."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


@cache
def shape_of(name: str) -> ModelShape:
    return parse_hf_config(read_config(name))


def founding_inputs(accept_length: float | None = 3.33) -> CeilingInputs:
    """Qwen3.6-27B on two RTX A6000 over PCIe Gen4 x16, 3 MTP steps, one request of 500 tokens."""
    return CeilingInputs(
        shape=shape_of("qwen3.6-27b"),
        hardware=Hardware(
            memory_bandwidth_bytes_per_second=768e9,
            bandwidth_efficiency=0.8,
            matrix_flops_per_second={"bf16": 154.8e12},
            link_bandwidth_bytes_per_second=link_bandwidth(4, 16),
        ),
        load=Load(batch=1, context_tokens_per_request=500, accept_length=accept_length),
        deployment=Deployment(tensor_parallel=2),
        speculation=Speculation("mtp", draft_steps=3, draft_tokens=4),
    )
