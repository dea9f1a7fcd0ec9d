"""The decode ceiling: every term of one round, their sum, and the tokens per second that follow from it.

A *round* is one decode step of the target model; with speculation one verify pass and its draft passes. All terms are
per GPU of the slowest rank. Always listed: weights, kv_cache, allreduce, draft and fixed (0 seconds where the deployment
costs nothing there: no draft, one rank). linear_state is listed for models that have one, logits_gather from two ranks
on, and any other component only when an override gives it a value.

What `Component.bytes_per_gpu` counts: bytes through the GPU's memory; for allreduce and logits_gather the bytes that the
GPU sends over its link. `draft` reports its memory bytes and takes the time of its communication on top.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ceilingd.ceiling import limits
from ceilingd.ceiling.collectives import Communication, allreduces, link_seconds, logits_gather
from ceilingd.ceiling.defaults import default_efficiency
from ceilingd.ceiling.draft import draft_model, draft_term, target_format
from ceilingd.ceiling.limits import require_within
from ceilingd.ceiling.memory import attention_flops, kv_cache_bytes, linear_state_bytes, states_per_round, streamed_weights
from ceilingd.ceiling.roofline import Flops, Term, compute_seconds
from ceilingd.records import Ceiling, Round

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ceilingd.ceiling.inputs import CeilingInputs, Override, Speculation
    from ceilingd.ceiling.shape import ModelShape

__all__ = ["COMPONENTS", "default_efficiency", "predict"]

COMPONENTS = ("weights", "experts", "kv_cache", "linear_state", "allreduce", "logits_gather", "draft", "fixed")
"""Every name a component can have, in the order in which a round lists them."""
_COMMUNICATION = ("allreduce", "logits_gather")


def predict(inputs: CeilingInputs) -> Ceiling:
    """The ceiling of one DP rank: rounds and tokens per second at peak and at achievable memory bandwidth.

    Raises `ValueError`, beginning with the name of the field, for inputs that are impossible or not supported. A model
    known only by its parameter count gives its weights term; every further term is 0 unless an override gives it, and is
    then named in `assumed`."""
    check(inputs)
    shape, load, hardware = inputs.shape, inputs.load, inputs.hardware
    draft = _draft(inputs)
    terms = tuple(_overridden(inputs, _modelled(inputs, draft)))
    if any(term.given_seconds is None and math.isinf(term.link_seconds) for term in terms):
        raise ValueError("link_bandwidth_bytes_per_second: needed when tensor_parallel is above 1")
    peak = _round(terms, hardware.memory_bandwidth_bytes_per_second)
    achievable = _round(terms, hardware.memory_bandwidth_bytes_per_second * hardware.bandwidth_efficiency)
    most = load.batch * inputs.speculation.most_accepted_tokens
    observed = None if load.accept_length is None else load.batch * load.accept_length
    return Ceiling(
        peak=peak,
        achievable=achievable,
        bandwidth_efficiency=hardware.bandwidth_efficiency,
        perfect_peak=most / peak.seconds,
        perfect_achievable=most / achievable.seconds,
        observed_peak=None if observed is None else observed / peak.seconds,
        observed_achievable=None if observed is None else observed / achievable.seconds,
        parameters_main=shape.parameters,
        parameters_draft=_draft_parameters(shape, draft),
        parameters_vision=None if shape.parameters_only else shape.vision_parameters,
        parameters_streamed=shape.parameters_streamed,
        parameters_active=shape.parameters_streamed,
        assumed=tuple(dict.fromkeys((*inputs.assumed, *_unknown_terms(inputs)))),
    )


def check(inputs: CeilingInputs) -> None:
    """Raises `ValueError` naming the field of the first input that no deployment can have or that is out of its limits."""
    deployment, hardware, load, speculation = inputs.deployment, inputs.hardware, inputs.load, inputs.speculation
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"):
        require_within(getattr(deployment, name), limits.RANKS, name)
    _require(deployment.pipeline_parallel == 1, "pipeline_parallel", "pipeline parallelism is not supported yet")
    _require(deployment.expert_parallel == 1, "expert_parallel", "expert parallelism is not supported yet")
    _require(not deployment.dp_attention, "dp_attention", "data-parallel attention is not supported yet")
    require_within(
        hardware.memory_bandwidth_bytes_per_second,
        limits.MEMORY_BANDWIDTH_BYTES_PER_SECOND,
        "memory_bandwidth_bytes_per_second",
    )
    require_within(hardware.bandwidth_efficiency, limits.BANDWIDTH_EFFICIENCY, "bandwidth_efficiency")
    if hardware.link_bandwidth_bytes_per_second is not None:
        require_within(
            hardware.link_bandwidth_bytes_per_second, limits.LINK_BANDWIDTH_BYTES_PER_SECOND, "link_bandwidth_bytes_per_second"
        )
    for number_format, rate in hardware.matrix_flops_per_second.items():
        require_within(rate, limits.MATRIX_FLOPS_PER_SECOND, f"matrix_flops_per_second.{number_format}")
    require_within(hardware.allreduce_latency_seconds, limits.ALLREDUCE_LATENCY_SECONDS, "allreduce_latency_seconds")
    require_within(inputs.fixed_seconds, limits.FIXED_SECONDS, "fixed_seconds")
    require_within(inputs.shape.parameters, limits.PARAMETERS, "parameters")
    require_within(load.batch, limits.BATCH, "batch")
    require_within(load.context_tokens_per_request, limits.CONTEXT_TOKENS, "context_tokens_per_request")
    if speculation.active:
        require_within(speculation.draft_tokens, (1, limits.DRAFT_LENGTH_MAX), "draft_tokens")
        least_steps = 0 if speculation.algorithm == "ngram" else 1
        require_within(speculation.draft_steps, (least_steps, limits.DRAFT_LENGTH_MAX), "draft_steps")
    if speculation.draft_shape is not None:
        require_within(speculation.draft_shape.parameters, limits.PARAMETERS, "speculation.draft_shape")
    _check_accept_length(load.accept_length, speculation)
    for name, override in inputs.overrides.items():
        _check_override(name, override)


def _check_accept_length(accept_length: float | None, speculation: Speculation) -> None:
    most = speculation.most_accepted_tokens
    if accept_length is None or 1 <= accept_length <= most:
        return
    if not speculation.active:
        raise ValueError(f"accept_length: without speculation a round gives exactly 1 token per request, not {accept_length:g}")
    raise ValueError(f"accept_length: must be between 1 and {most}, the most that a round can accept, not {accept_length:g}")


def _check_override(name: str, override: Override) -> None:
    if name not in COMPONENTS:
        raise ValueError(f"overrides: there is no component {name!r}; components are {', '.join(COMPONENTS)}")
    for quantity, value in (("bytes", override.bytes_per_gpu), ("seconds", override.seconds), ("count", override.count)):
        if value is not None:
            require_within(value, limits.OVERRIDES[quantity], f"overrides.{name}.{quantity}")
    if override.count is not None and name not in _COMMUNICATION:
        raise ValueError(f"overrides.{name}.count: only {' and '.join(_COMMUNICATION)} have a count")
    if override.bytes_per_gpu is not None and name == "fixed":
        raise ValueError("overrides.fixed.bytes: the fixed part has no bytes, only seconds")


def _require(condition: bool, field: str, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {requirement}")


def _draft(inputs: CeilingInputs) -> ModelShape | None:
    """The draft model; `None` also where it is unknown and need not be known."""
    override = inputs.overrides.get("draft")
    given = override is not None and (override.seconds is not None or override.bytes_per_gpu is not None)
    if inputs.shape.parameters_only or given:
        try:
            return draft_model(inputs.shape, inputs.speculation)
        except ValueError:
            return None
    return draft_model(inputs.shape, inputs.speculation)


def _draft_parameters(shape: ModelShape, draft: ModelShape | None) -> int | None:
    """Parameters of the model that drafts, else of the MTP layers that the checkpoint has anyway; `None` when unknown."""
    drafting = draft or shape.mtp
    if drafting is not None:
        return drafting.parameters
    return None if shape.parameters_only else 0


def _unknown_terms(inputs: CeilingInputs) -> Iterator[str]:
    """Components of a model known only by its parameter count that nobody gave: 0 for want of anything better."""
    if not inputs.shape.parameters_only:
        return
    applicable = ["kv_cache"]
    if inputs.deployment.tensor_parallel > 1:
        applicable.append("allreduce")
    if inputs.speculation.algorithm not in ("none", "ngram"):
        applicable.append("draft")
    for name in applicable:
        if name not in inputs.overrides:
            yield name


def _modelled(inputs: CeilingInputs, draft: ModelShape | None) -> dict[str, Term]:
    """The terms that follow from the model, its deployment and its load, in the order of `COMPONENTS`."""
    shape, deployment, hardware, load = inputs.shape, inputs.deployment, inputs.hardware, inputs.load
    ranks, attention_parallel = deployment.tensor_parallel, deployment.attention_parallel
    per_request = inputs.speculation.tokens_per_request
    tokens = load.batch * per_request
    peaks = hardware.matrix_flops_per_second

    weight_format = target_format(shape, deployment)
    weights = streamed_weights(shape, weight_format, ranks, attention_parallel)
    work = Flops(
        ((weight_format.arithmetic, 2 * weights.quantized_parameters * tokens), ("bf16", 2 * weights.kept_parameters * tokens))
    )
    attention = Flops(
        (("bf16", attention_flops(shape, attention_parallel, load.batch, load.context_tokens_per_request, per_request)),)
    )
    terms = [
        Term("weights", "memory", memory_bytes=weights.bytes, flops=work.total, compute_seconds=compute_seconds(work, peaks)),
        Term(
            "kv_cache",
            "memory",
            memory_bytes=kv_cache_bytes(
                shape,
                attention_parallel,
                deployment.kv_element_bytes,
                load.batch,
                load.context_tokens_per_request,
                per_request,
            ),
            flops=attention.total,
            compute_seconds=compute_seconds(attention, peaks),
        ),
    ]
    # The recurrence is a few vector operations per element of state: never the bound, and not counted.
    state_bytes = linear_state_bytes(
        shape, attention_parallel, load.batch, states_per_round(inputs.speculation.active, per_request)
    )
    if state_bytes:
        terms.append(Term("linear_state", "memory", memory_bytes=state_bytes))
    # Without a hidden size the number of layers is unknown too, and with it the number of operations.
    reduce = (
        Communication(0, 0)
        if shape.parameters_only
        else allreduces(shape.layer_count, shape.hidden, tokens, ranks, hardware.allreduce_algorithm)
    )
    terms.append(_communication_term(inputs, "allreduce", reduce))
    if ranks > 1 and shape.head is not None:
        terms.append(_communication_term(inputs, "logits_gather", logits_gather(shape.head.rows, tokens, ranks)))
    terms.append(draft_term(inputs, draft))
    terms.append(Term("fixed", "fixed", given_seconds=inputs.fixed_seconds))
    return {term.name: term for term in terms}


def _communication_term(inputs: CeilingInputs, name: str, communication: Communication) -> Term:
    return Term(
        name,
        "link",
        count=communication.count,
        link_bytes=communication.bytes,
        link_seconds=link_seconds(communication, inputs.hardware.link_bandwidth_bytes_per_second),
        latency_seconds=communication.count * inputs.hardware.allreduce_latency_seconds,
    )


def _overridden(inputs: CeilingInputs, terms: dict[str, Term]) -> Iterator[Term]:
    """The modelled terms with explicit values in place of the model's, and the terms that only an override brings."""
    for name in COMPONENTS:
        override, term = inputs.overrides.get(name), terms.get(name)
        if override is not None:
            term = _override_term(inputs, term or Term(name, "link" if name in _COMMUNICATION else "memory"), override)
        if term is not None:
            yield term


def _override_term(inputs: CeilingInputs, term: Term, override: Override) -> Term:
    """Explicit seconds are the term's time; explicit bytes go through memory (or over the link, for communication) in
    place of the modelled ones; an explicit count scales the modelled bytes of one operation and its latency."""
    if term.kind == "link":
        count = term.count if override.count is None else override.count
        sent_bytes = count * term.link_bytes / term.count if term.count else 0.0
        if override.bytes_per_gpu is not None:
            sent_bytes = override.bytes_per_gpu
        term = _communication_term(inputs, term.name, Communication(count, sent_bytes))
    elif override.bytes_per_gpu is not None:
        term = replace(term, memory_bytes=override.bytes_per_gpu)
    if override.seconds is not None:
        term = replace(term, given_seconds=override.seconds)
    return term


def _round(terms: tuple[Term, ...], memory_bandwidth_bytes_per_second: float) -> Round:
    components = tuple(term.at(memory_bandwidth_bytes_per_second) for term in terms)
    seconds = math.fsum(component.seconds for component in components)
    if seconds < limits.ROUND_SECONDS_MIN:
        raise ValueError(f"overrides: a round must take some time, and all components together were set to {seconds:g} s")
    return Round(components, seconds)
