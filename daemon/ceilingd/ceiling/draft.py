"""The draft of one round: what its passes stream, compute and communicate."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ceilingd.ceiling.collectives import Communication, allreduces, link_seconds, logits_gather
from ceilingd.ceiling.memory import (
    Weights,
    attention_flops,
    kv_cache_bytes,
    linear_state_bytes,
    states_per_round,
    streamed_weights,
    sum_weights,
)
from ceilingd.ceiling.quantization import WeightFormat
from ceilingd.ceiling.roofline import Flops, Term, compute_seconds

if TYPE_CHECKING:
    from ceilingd.ceiling.inputs import CeilingInputs, Deployment, Speculation
    from ceilingd.ceiling.shape import ModelShape


def draft_model(shape: ModelShape, speculation: Speculation) -> ModelShape | None:
    """The model that drafts: the target's MTP layers, the separate draft model, or `None` when nothing does (no
    speculation, n-gram lookup). Raises `ValueError` when the algorithm needs a model that is not there."""
    match speculation.algorithm:
        case "none" | "ngram":
            return None
        case "mtp":
            if shape.mtp is None:
                raise ValueError("speculation.algorithm: mtp needs MTP layers, and this model's config has none")
            return shape.mtp
        case _:
            if speculation.draft_shape is None:
                raise ValueError(f"speculation.draft_shape: {speculation.algorithm} needs the config of its draft model")
            return speculation.draft_shape


def draft_term(inputs: CeilingInputs, draft: ModelShape | None) -> Term:
    """All draft passes of a round as one term: weights and KV cache, and on top of those the communication.

    A pass feeds one token per request through the draft's layers; its head is its own, or the target's. `fc` is read in
    every pass, with EAGLE3 only in the first.

    Qwen3.6-27B's MTP layer over 2 ranks, 3 steps: 3 x (layer 372,291,072 + fc 104,857,600 + head 1,271,398,400) bytes =
    5.2456e9, 6.83 ms at 768e9 bytes/s."""
    speculation, deployment = inputs.speculation, inputs.deployment
    steps = speculation.draft_steps
    if draft is None:
        return Term("draft", "memory", count=0 if speculation.algorithm == "ngram" else steps)
    weights = draft_weights(inputs.shape, speculation, deployment, draft)
    batch, context_tokens = inputs.load.batch, inputs.load.context_tokens_per_request
    attention_parallel = deployment.attention_parallel
    kv = kv_cache_bytes(draft, attention_parallel, deployment.kv_element_bytes, batch, context_tokens, 1)
    state = linear_state_bytes(draft, attention_parallel, batch, states_per_round(False, 1))
    flops = Flops(
        (
            (draft_format(inputs.shape, speculation, deployment, draft).arithmetic, 2 * weights.quantized_parameters * batch),
            ("bf16", 2 * weights.kept_parameters * batch),
            ("bf16", steps * attention_flops(draft, attention_parallel, batch, context_tokens, 1)),
        )
    )
    communication = _communication(inputs, draft)
    return Term(
        "draft",
        "memory",
        count=steps,
        memory_bytes=weights.bytes + steps * (kv + state),
        flops=flops.total,
        compute_seconds=compute_seconds(flops, inputs.hardware.matrix_flops_per_second),
        link_bytes=communication.bytes,
        link_seconds=link_seconds(communication, inputs.hardware.link_bandwidth_bytes_per_second),
        latency_seconds=communication.count * inputs.hardware.allreduce_latency_seconds,
    )


def draft_format(shape: ModelShape, speculation: Speculation, deployment: Deployment, draft: ModelShape) -> WeightFormat:
    """MTP layers are held in the target's format, also where the deployment overrides it; a draft model in its own."""
    return target_format(shape, deployment) if speculation.algorithm == "mtp" else draft.weight_format


def target_format(shape: ModelShape, deployment: Deployment) -> WeightFormat:
    """The checkpoint's own format, unless the deployment quantizes at load."""
    return shape.weight_format if deployment.quantization is None else WeightFormat(deployment.quantization)


@lru_cache(maxsize=256)
def draft_weights(shape: ModelShape, speculation: Speculation, deployment: Deployment, draft: ModelShape) -> Weights:
    """What all draft passes of one round stream on one GPU.

    An EAGLE3 head with its own 32,000-word vocabulary beside Qwen3-8B, 3 steps: 3 x (layer 218,103,808 + head
    131,072,000) + fc 50,331,648 parameters, norms apart."""
    ranks = (deployment.tensor_parallel, deployment.attention_parallel)
    steps = speculation.draft_steps
    weight_format = draft_format(shape, speculation, deployment, draft)
    parts = [
        (steps, streamed_weights(draft, weight_format, *ranks)),
        (
            1 if speculation.algorithm == "eagle3" else steps,
            sum_weights(((1, tensor) for tensor in draft.entry), weight_format, *ranks),
        ),
    ]
    if draft.head is None and shape.head is not None:
        parts.append((steps, sum_weights(((1, shape.head),), target_format(shape, deployment), *ranks)))
    return Weights(
        bytes=sum(passes * part.bytes for passes, part in parts),
        quantized_parameters=sum(passes * part.quantized_parameters for passes, part in parts),
        kept_parameters=sum(passes * part.kept_parameters for passes, part in parts),
    )


def _communication(inputs: CeilingInputs, draft: ModelShape) -> Communication:
    """`2 Ld + 1` all-reduces and one gather of the logits in each pass: 3 passes of one layer: 9 + 3 operations."""
    steps, ranks, batch = inputs.speculation.draft_steps, inputs.deployment.tensor_parallel, inputs.load.batch
    head = draft.head or inputs.shape.head
    reduce = allreduces(draft.layer_count, draft.hidden, batch, ranks, inputs.hardware.allreduce_algorithm)
    gather = logits_gather(head.rows if head else 0, batch, ranks)
    once = reduce + gather
    return Communication(steps * once.count, steps * once.bytes)
