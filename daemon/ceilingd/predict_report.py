"""A prediction for people (a table that explains itself) and for programs (JSON)."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ceilingd.ceiling.draft import target_format
from ceilingd.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from ceilingd.ceiling.inputs import CeilingInputs
    from ceilingd.records import Ceiling, Round

LINE_CHARACTERS = 78
"""Fits a terminal of 80 columns, and is the same in a pipe."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One run of the model and what it was asked for."""

    inputs: CeilingInputs
    ceiling: Ceiling
    levers: Mapping[str, Ceiling]
    model: str
    gpu: str | None
    link: str | None
    at_efficiency: bool
    """Show the round at the given bandwidth efficiency; else at the full bandwidth."""

    @property
    def round(self) -> Round:
        """The round at the bandwidth that was asked for."""
        return self.ceiling.achievable if self.at_efficiency else self.ceiling.peak

    def perfect(self, ceiling: Ceiling) -> float:
        """Tokens per second at the bandwidth that was asked for, every draft token accepted."""
        return ceiling.perfect_achievable if self.at_efficiency else ceiling.perfect_peak

    def observed(self, ceiling: Ceiling) -> float | None:
        """The same at the given accept length; `None` without one."""
        return ceiling.observed_achievable if self.at_efficiency else ceiling.observed_peak

    def value(self, ceiling: Ceiling) -> float:
        """At the given accept length where there is one, else at perfect acceptance."""
        observed = self.observed(ceiling)
        return self.perfect(ceiling) if observed is None else observed


def as_json(prediction: Prediction) -> dict[str, Any]:
    """The documented JSON: figures at the full bandwidth, or at the efficiency that was asked for; both besides."""
    inputs, ceiling = prediction.inputs, prediction.ceiling
    return {
        "inputs": _inputs(prediction),
        "assumed": list(ceiling.assumed),
        "parameters": {
            "main": ceiling.parameters_main,
            "draft": ceiling.parameters_draft,
            "vision": ceiling.parameters_vision,
            "streamed": ceiling.parameters_streamed,
            "active": ceiling.parameters_active,
        },
        "components": [asdict(component) for component in prediction.round.components],
        "round_seconds": prediction.round.seconds,
        "bottleneck": prediction.round.bottleneck,
        "ceiling_tokens_per_second": {"perfect": prediction.perfect(ceiling), "observed": prediction.observed(ceiling)},
        "levers": {name: prediction.value(changed) for name, changed in prediction.levers.items()},
        "peak": {
            "bandwidth_efficiency": 1.0,
            "round_seconds": ceiling.peak.seconds,
            "ceiling_tokens_per_second": {"perfect": ceiling.perfect_peak, "observed": ceiling.observed_peak},
        },
        "achievable": {
            "bandwidth_efficiency": inputs.hardware.bandwidth_efficiency,
            "round_seconds": ceiling.achievable.seconds,
            "ceiling_tokens_per_second": {"perfect": ceiling.perfect_achievable, "observed": ceiling.observed_achievable},
        },
    }


def _inputs(prediction: Prediction) -> dict[str, Any]:
    """The inputs as used, defaults filled in."""
    inputs = prediction.inputs
    deployment, hardware, load, speculation = inputs.deployment, inputs.hardware, inputs.load, inputs.speculation
    return {
        "model": prediction.model,
        "gpu": prediction.gpu,
        "link": prediction.link,
        "tensor_parallel": deployment.tensor_parallel,
        "pipeline_parallel": deployment.pipeline_parallel,
        "data_parallel": deployment.data_parallel,
        "expert_parallel": deployment.expert_parallel,
        "dp_attention": deployment.dp_attention,
        "quantization": target_format(inputs.shape, deployment).quantization,
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "speculative": speculation.algorithm,
        "draft_steps": speculation.draft_steps,
        "draft_tokens": speculation.tokens_per_request,
        "batch": load.batch,
        "context_tokens_per_request": load.context_tokens_per_request,
        "accept_length": load.accept_length,
        "memory_bandwidth_bytes_per_second": hardware.memory_bandwidth_bytes_per_second,
        "bandwidth_efficiency": hardware.bandwidth_efficiency if prediction.at_efficiency else 1.0,
        "matrix_flops_per_second": dict(hardware.matrix_flops_per_second),
        "link_bandwidth_bytes_per_second": hardware.link_bandwidth_bytes_per_second,
        "allreduce_latency_seconds": hardware.allreduce_latency_seconds,
        "allreduce_algorithm": hardware.allreduce_algorithm,
        "fixed_seconds": inputs.fixed_seconds,
        "overrides": {
            name: {
                quantity: value
                for quantity, value in (
                    ("bytes", override.bytes_per_gpu),
                    ("seconds", override.seconds),
                    ("count", override.count),
                )
                if value is not None
            }
            for name, override in inputs.overrides.items()
        },
    }


# ------------------------------------------------------------------------------------------------------------ Table

_DOING = {
    "weights": "reading weights",
    "experts": "reading experts",
    "kv_cache": "reading the KV cache",
    "linear_state": "moving linear-attention state",
    "allreduce": "all-reduces between the GPUs",
    "logits_gather": "gathering logits from the GPUs",
    "draft": "drafting",
    "fixed": "scheduling and launch gaps",
}
_ASSUMED = {
    "batch": "one running request",
    "context_tokens": "the context that each request holds",
    "bandwidth_efficiency": "the share of the memory bandwidth that kernels reach (give --bandwidth-efficiency)",
    "fixed_seconds": "scheduling and sampling time per round (give --fixed-seconds)",
    "allreduce_latency": "the time of one small all-reduce (give --allreduce-latency)",
    "link": "the link between the GPUs, from the GPU table (give --pcie-generation and --pcie-width, or --nvlink)",
    "draft_steps": "the length of the draft (give --draft-steps)",
    "kv_cache": "0 for the KV cache: unknown without a config (give --set kv_cache.bytes=)",
    "allreduce": "0 for all-reduces: unknown without a config (give --set allreduce.count=)",
    "draft": "0 for the draft: unknown without a config (give --set draft.seconds=)",
}
_LEVERS = {
    "perfect_acceptance": "every draft token accepted",
    "no_speculation": "no speculation",
    "fp8_weights": "FP8 weights (block-scaled)",
    "fp8_kv_cache": "FP8 KV cache",
    "draft_steps_plus_one": "one draft step more",
    "draft_steps_minus_one": "one draft step less",
    "batch_double": "twice the running requests",
    "nvlink": "NVLink between the GPUs",
}


def print_table(prediction: Prediction) -> None:
    """The round term by term, the ceilings, the levers, what was assumed, and a verdict, on stdout."""
    from rich.console import Console

    # Wider than any table gets, so that no number is ever broken or cut; the usual ones fit 78 columns.
    console = Console(highlight=False, markup=False, soft_wrap=True, width=200)
    console.print(_wrapped(_headline(prediction)))
    console.print("\nOne decode round, per GPU")
    console.print(_round_table(prediction))
    console.print("Ceiling, tokens per second")
    console.print(_ceiling_table(prediction))
    if prediction.levers:
        console.print(f"What would change it, tokens per second (now {prediction.value(prediction.ceiling):,.1f})")
        console.print(_lever_table(prediction))
    if prediction.ceiling.assumed:
        console.print("Assumed, because nobody said otherwise:")
        for name in prediction.ceiling.assumed:
            console.print(_wrapped(f"  - {_ASSUMED.get(name, name)}", "    "))
        console.print()
    console.print(_wrapped(verdict(prediction)))
    console.print("A ceiling is not a forecast: published decode rounds reach 60 to 86 % of peak.", style="dim")


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of at most `LINE_CHARACTERS`, broken between words only; further lines begin with `indent`."""
    return textwrap.fill(text, LINE_CHARACTERS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _headline(prediction: Prediction) -> str:
    inputs = prediction.inputs
    parts = [printable(prediction.model), f"TP {inputs.deployment.tensor_parallel}"]
    bandwidth = f"{inputs.hardware.memory_bandwidth_bytes_per_second / 1e9:,.0f} GB/s"
    parts.append(f"{prediction.gpu}, {bandwidth}" if prediction.gpu else bandwidth)
    if prediction.link:
        parts.append(prediction.link)
    if inputs.speculation.active:
        parts.append(f"{inputs.speculation.algorithm}, {inputs.speculation.draft_steps} steps")
    parts.append(f"batch {inputs.load.batch:g}, context {inputs.load.context_tokens_per_request:g}")
    return " · ".join(parts)


def _round_table(prediction: Prediction) -> Table:
    from rich import box
    from rich.table import Table

    ceiling, shown = prediction.ceiling, prediction.round
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_footer=True)
    table.add_column("component", "round", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("at peak", _milliseconds(ceiling.peak.seconds), justify="right")
    table.add_column(f"at {ceiling.bandwidth_efficiency:.0%}", _milliseconds(ceiling.achievable.seconds), justify="right")
    table.add_column("share", "100.0 %", justify="right")
    table.add_column("bound by")
    for peak, achievable, component in zip(
        ceiling.peak.components, ceiling.achievable.components, shown.components, strict=True
    ):
        table.add_row(
            component.name,
            f"{component.count:g}",
            _bytes(component.bytes_per_gpu),
            _milliseconds(peak.seconds),
            _milliseconds(achievable.seconds),
            f"{component.seconds / shown.seconds:.1%}".replace("%", " %"),
            component.bound if component.seconds else "",
        )
    return table


def _ceiling_table(prediction: Prediction) -> Table:
    from rich import box
    from rich.table import Table

    inputs, ceiling = prediction.inputs, prediction.ceiling
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("acceptance", no_wrap=True)
    table.add_column("at peak", justify="right")
    table.add_column(f"at {ceiling.bandwidth_efficiency:.0%}", justify="right")
    most = inputs.speculation.most_accepted_tokens
    table.add_row(f"perfect ({most})", f"{ceiling.perfect_peak:,.1f}", f"{ceiling.perfect_achievable:,.1f}")
    if inputs.speculation.active and ceiling.observed_peak is not None and ceiling.observed_achievable is not None:
        table.add_row(
            f"given ({inputs.load.accept_length:g})", f"{ceiling.observed_peak:,.1f}", f"{ceiling.observed_achievable:,.1f}"
        )
    return table


def _lever_table(prediction: Prediction) -> Table:
    from rich import box
    from rich.table import Table

    now = prediction.value(prediction.ceiling)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("lever", no_wrap=True)
    table.add_column("ceiling", justify="right")
    table.add_column("change", justify="right")
    for name, ceiling in sorted(prediction.levers.items(), key=lambda lever: -prediction.value(lever[1])):
        value = prediction.value(ceiling)
        table.add_row(_LEVERS[name], f"{value:,.1f}", f"{value / now - 1:+.0%}".replace("%", " %"))
    return table


def verdict(prediction: Prediction) -> str:
    """One sentence: what binds, and the lever that raises the ceiling most at the same load."""
    shown, now = prediction.round, prediction.value(prediction.ceiling)
    bottleneck = next(component for component in shown.components if component.name == shown.bottleneck)
    doing = _DOING[bottleneck.name] if bottleneck.bound != "compute" else f"arithmetic ({bottleneck.name})"
    text = f"Decode is bound by {doing}: {bottleneck.seconds / shown.seconds:.0%} of the round".replace("%", " %")
    without = prediction.levers.get("no_speculation")
    if without is not None and prediction.value(without) > now:
        plain = prediction.value(without)
        return f"{text}; speculation hurts here: without it the ceiling is {plain:,.1f} instead of {now:,.1f} tok/s."
    same_load = {name: prediction.value(ceiling) for name, ceiling in prediction.levers.items() if name != "batch_double"}
    best = max(same_load, key=same_load.__getitem__, default=None)
    if best is None or same_load[best] <= now:
        return f"{text}."
    return f"{text}; the strongest lever at this load is {_LEVERS[best]}: {same_load[best]:,.1f} instead of {now:,.1f} tok/s."


def _milliseconds(seconds: float) -> str:
    """Fewer decimals from a second on, seconds from a thousand on: about as wide."""
    if seconds >= 1000:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.{3 if seconds < 1 else 1}f} ms"


def _bytes(count: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3f} {unit}"
    return f"{count:,.0f} B" if count else ""
