"""What the ceiling would be with one input changed: each lever is the whole model run again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ceilingd.ceiling.acceptance import accept_length_at, acceptance_rate
from ceilingd.ceiling.collectives import default_allreduce_latency
from ceilingd.ceiling.decode import predict
from ceilingd.ceiling.draft import target_format
from ceilingd.ceiling.inputs import Speculation
from ceilingd.ceiling.limits import BATCH, DRAFT_LENGTH_MAX, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ceilingd.ceiling.inputs import CeilingInputs
    from ceilingd.records import Ceiling


def levers(inputs: CeilingInputs, nvlink_bandwidth_bytes_per_second: float | None = None) -> dict[str, Ceiling]:
    """The ceiling for every lever that applies, by name. `nvlink_bandwidth_bytes_per_second` is one way, and `None` where
    NVLink is in use already or cannot be had.

    Where the accept length is known, another draft length changes it as if every drafted token were accepted with the
    same probability (`acceptance.py`). A lever whose component has an explicit value is left out: it would change nothing;
    so is one beyond the limits of the model."""
    return {name: predict(changed) for name, changed in _changes(inputs, nvlink_bandwidth_bytes_per_second)}


def _changes(inputs: CeilingInputs, nvlink_bandwidth: float | None) -> Iterator[tuple[str, CeilingInputs]]:
    speculation, deployment, load = inputs.speculation, inputs.deployment, inputs.load
    if speculation.active:
        perfect = replace(load, accept_length=float(speculation.most_accepted_tokens))
        if load.accept_length is not None:
            yield "perfect_acceptance", replace(inputs, load=perfect)
        without_draft = {name: override for name, override in inputs.overrides.items() if name != "draft"}
        plain = None if load.accept_length is None else 1.0
        yield (
            "no_speculation",
            replace(inputs, speculation=Speculation(), load=replace(load, accept_length=plain), overrides=without_draft),
        )
    if target_format(inputs.shape, deployment).quantization == "bf16" and "weights" not in inputs.overrides:
        yield "fp8_weights", replace(inputs, deployment=replace(deployment, quantization="fp8_block"))
    if deployment.kv_cache_dtype == "bf16" and "kv_cache" not in inputs.overrides and not inputs.shape.parameters_only:
        yield "fp8_kv_cache", replace(inputs, deployment=replace(deployment, kv_cache_dtype="fp8"))
    if _is_chain(speculation) and "draft" not in inputs.overrides and not inputs.shape.parameters_only:
        if speculation.draft_tokens < DRAFT_LENGTH_MAX:
            yield "draft_steps_plus_one", _with_steps(inputs, speculation.draft_steps + 1)
        if speculation.draft_steps > 1:
            yield "draft_steps_minus_one", _with_steps(inputs, speculation.draft_steps - 1)
    if not inputs.shape.parameters_only and not inputs.overrides and within(2 * load.batch, BATCH):
        yield "batch_double", replace(inputs, load=replace(load, batch=2 * load.batch))
    if nvlink_bandwidth is not None and deployment.tensor_parallel > 1 and "allreduce" not in inputs.overrides:
        hardware = replace(
            inputs.hardware,
            link_bandwidth_bytes_per_second=nvlink_bandwidth,
            allreduce_latency_seconds=default_allreduce_latency(nvlink=True, ranks=deployment.tensor_parallel),
        )
        yield "nvlink", replace(inputs, hardware=hardware)


def _is_chain(speculation: Speculation) -> bool:
    """One candidate per step: the draft's length is then a single number that can be moved."""
    return speculation.algorithm not in ("none", "ngram") and speculation.draft_tokens == speculation.draft_steps + 1


def _with_steps(inputs: CeilingInputs, steps: int) -> CeilingInputs:
    accept_length = inputs.load.accept_length
    if accept_length is not None:
        accept_length = accept_length_at(acceptance_rate(accept_length, inputs.speculation.draft_steps), steps)
    return replace(
        inputs,
        speculation=replace(inputs.speculation, draft_steps=steps, draft_tokens=steps + 1),
        load=replace(inputs.load, accept_length=accept_length),
    )
