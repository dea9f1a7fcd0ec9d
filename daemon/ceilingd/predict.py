"""`ceilingd predict`: the ceiling model offline, for hardware that need not be there."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ceilingd.ceiling.collectives import default_allreduce_latency
from ceilingd.ceiling.decode import default_efficiency, predict
from ceilingd.ceiling.inputs import (
    DEFAULT_FIXED_SECONDS,
    AllreduceAlgorithm,
    CeilingInputs,
    Deployment,
    Hardware,
    Load,
    Override,
    Speculation,
    SpeculativeAlgorithm,
)
from ceilingd.ceiling.levers import levers
from ceilingd.ceiling.limits import LINK_BANDWIDTH_BYTES_PER_SECOND, PARAMETERS, require_within
from ceilingd.ceiling.quantization import Quantization
from ceilingd.ceiling.shape import shape_from_parameters
from ceilingd.gpus import GpuSpec, GpuTable, load_gpus
from ceilingd.links.rates import link_bandwidth
from ceilingd.models import read_config
from ceilingd.parse.hf_config import parse_hf_config
from ceilingd.predict_report import Prediction, as_json, print_table
from ceilingd.text import printable

if TYPE_CHECKING:
    from ceilingd.ceiling.shape import ModelShape

DEFAULT_CONTEXT_TOKENS = 1024.0
DEFAULT_DRAFT_STEPS = 3
"""What SGLang chooses for most models when it is told nothing."""

USAGE = "ceilingd predict (--model-config PATH | --parameters N) (--gpu NAME | --memory-bandwidth N) [options]"
DESCRIPTION = """\
The most tokens per second that decoding can reach on given hardware, and where the time of one decode round goes.
Needs no GPU and no server. All figures are per GPU and for one replica of the model.
"""
EXAMPLES = """\
the founding case, derived from the model's config (Qwen3.6-27B, two A6000 over PCIe Gen4 x16, 3 MTP steps):
  ceilingd predict --model-config qwen3.6-27b/config.json --gpu "RTX A6000" --tensor-parallel 2 \\
      --pcie-generation 4 --pcie-width 16 --speculative mtp --draft-steps 3 --batch 1 --context 500 --accept-length 3.33

the same as a back-of-the-envelope estimate, every term given (27e9 parameters x 2 bytes / 2 GPUs / 768 GB/s, ...):
  ceilingd predict --parameters 27e9 --memory-bandwidth 768e9 --tensor-parallel 2 --speculative mtp --draft-steps 3 \\
      --set kv_cache.seconds=20us --set linear_state.seconds=90us --set allreduce.count=128 --set draft.seconds=5.6ms

numbers: 27e9, 27b, 768G (k, M, G or b, T are powers of 1000); seconds: 8e-6, 8us, 5.6ms.
components for --set: weights, experts, kv_cache, linear_state, allreduce, logits_gather, draft, fixed; each takes
.bytes or .seconds, allreduce and logits_gather also .count. Bytes go through memory (or over the link, for those two).

--json prints components, round and ceilings at the full memory bandwidth, or with --bandwidth-efficiency at that share
of it; "peak" and "achievable" always hold both. Levers are tokens per second at the given accept length, or at perfect
acceptance without one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `ceilingd predict` and the text of its --help."""
    parser.usage, parser.description, parser.epilog = USAGE, DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    model = parser.add_argument_group("model")
    which = model.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--model-config", type=Path, metavar="PATH", help="config.json of the model, or the folder that holds it"
    )
    which.add_argument("--parameters", type=_number, metavar="N", help="only the parameter count is known: 27e9 or 27b")
    model.add_argument("--quantization", choices=get_args(Quantization), help="weight format (default: what the config says)")
    model.add_argument(
        "--kv-cache-dtype", choices=("auto", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2"), default="auto", help="auto is bf16"
    )

    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--gpu", metavar="NAME", help='a GPU of the built-in table, such as "RTX A6000" or "H100 SXM"')
    hardware.add_argument(
        "--memory-bandwidth", type=_number, metavar="N", help="bytes per second of one GPU (default: the table's)"
    )
    hardware.add_argument(
        "--bandwidth-efficiency", type=_number, metavar="R", help="share of the memory bandwidth reached, 0 to 1"
    )
    hardware.add_argument("--pcie-generation", type=_whole, metavar="N", help="1 to 6, as the link runs under load")
    hardware.add_argument("--pcie-width", type=_whole, metavar="LANES", help="lanes of that link")
    hardware.add_argument(
        "--nvlink",
        nargs="?",
        type=_number,
        const=True,
        metavar="N",
        help="GPUs talk over NVLink, at N bytes per second one way (default: the table's)",
    )
    hardware.add_argument("--allreduce-latency", type=_seconds, metavar="S", help="seconds of one small all-reduce")
    hardware.add_argument("--allreduce-algorithm", choices=get_args(AllreduceAlgorithm), default="ring")
    hardware.add_argument(
        "--fixed-seconds", type=_seconds, metavar="S", help="scheduling and sampling per round (default: 0.5ms)"
    )

    deployment = parser.add_argument_group("deployment")
    for name in ("tensor", "pipeline", "data", "expert"):
        deployment.add_argument(f"--{name}-parallel", type=_whole, default=1, metavar="N")
    deployment.add_argument("--dp-attention", action="store_true")

    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--speculative", choices=get_args(SpeculativeAlgorithm), default="none")
    speculation.add_argument(
        "--draft-steps", type=_whole, metavar="N", help=f"draft passes per round (default: {DEFAULT_DRAFT_STEPS})"
    )
    speculation.add_argument(
        "--draft-tokens", type=_whole, metavar="N", help="tokens one verify pass checks (default: steps + 1)"
    )
    speculation.add_argument("--draft-model-config", type=Path, metavar="PATH", help="config.json of a separate draft model")

    load = parser.add_argument_group("load")
    load.add_argument("--batch", type=_number, metavar="N", help="running requests (default: 1)")
    load.add_argument(
        "--context", type=_number, metavar="N", help=f"tokens each request holds (default: {DEFAULT_CONTEXT_TOKENS:.0f})"
    )
    load.add_argument("--accept-length", type=_number, metavar="N", help="tokens per request and round, bonus token included")

    parser.add_argument(
        "--set",
        action="append",
        type=_override,
        default=[],
        metavar="COMPONENT.QUANTITY=VALUE",
        help="an explicit value for one term, such as weights.bytes=27e9",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction. Returns 0, or 2 after one sentence on stderr when the inputs make none."""
    try:
        prediction = _prediction(arguments, load_gpus())
    except (ValueError, OSError) as error:
        print(f"ceilingd predict: {printable(_in_flags(str(error)))}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(as_json(prediction), indent=2, allow_nan=False))
    else:
        print_table(prediction)
    return 0


def _prediction(arguments: argparse.Namespace, gpus: GpuTable) -> Prediction:
    """Everything that is shown. Raises `ValueError` or `OSError` with a sentence."""
    gpu = _gpu(arguments.gpu, gpus)
    assumed: list[str] = []
    shape = _shape(arguments)
    deployment = Deployment(
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
        data_parallel=arguments.data_parallel,
        expert_parallel=arguments.expert_parallel,
        dp_attention=arguments.dp_attention,
        quantization=arguments.quantization,
        kv_cache_dtype="fp8" if arguments.kv_cache_dtype.startswith("fp8") else "bf16",
    )
    speculation = _speculation(arguments, assumed)
    link, link_name = _link(arguments, gpu, assumed)
    hardware = Hardware(
        memory_bandwidth_bytes_per_second=_memory_bandwidth(arguments.memory_bandwidth, gpu),
        bandwidth_efficiency=_or_assumed(
            arguments.bandwidth_efficiency,
            "bandwidth_efficiency",
            default_efficiency(gpu.name if gpu else None, deployment.quantization or shape.quantization),
            assumed,
        ),
        matrix_flops_per_second=gpu.matrix_flops_per_second if gpu else {},
        link_bandwidth_bytes_per_second=link,
        allreduce_latency_seconds=_allreduce_latency(arguments, link_name, assumed),
        allreduce_algorithm=arguments.allreduce_algorithm,
    )
    load = Load(
        batch=_or_assumed(arguments.batch, "batch", 1.0, assumed),
        context_tokens_per_request=_or_assumed(arguments.context, "context_tokens", DEFAULT_CONTEXT_TOKENS, assumed),
        accept_length=1.0 if arguments.accept_length is None and not speculation.active else arguments.accept_length,
    )
    inputs = CeilingInputs(
        shape=shape,
        hardware=hardware,
        load=load,
        deployment=deployment,
        speculation=speculation,
        fixed_seconds=_or_assumed(arguments.fixed_seconds, "fixed_seconds", DEFAULT_FIXED_SECONDS, assumed),
        overrides=_overrides(arguments.set),
        assumed=tuple(assumed),
    )
    nvlink = gpu.nvlink_bytes_per_second if gpu and link_name != "NVLink" else None
    return Prediction(
        inputs=inputs,
        ceiling=predict(inputs),
        levers=levers(inputs, nvlink),
        model=str(arguments.model_config) if arguments.model_config else f"{shape.parameters:,} parameters",
        gpu=gpu.name if gpu else None,
        link=link_name,
        at_efficiency=arguments.bandwidth_efficiency is not None,
    )


def _shape(arguments: argparse.Namespace) -> ModelShape:
    if arguments.model_config is not None:
        return _read_shape(arguments.model_config)
    require_within(arguments.parameters, PARAMETERS, "parameters")
    return shape_from_parameters(round(arguments.parameters))


def _read_shape(path: Path) -> ModelShape:
    try:
        return parse_hf_config(read_config(path))
    except FileNotFoundError:
        missing = "this folder holds no config.json" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {missing}; give the config.json of the model, or the folder that holds it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a config.json that may be read") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _gpu(name: str | None, gpus: GpuTable) -> GpuSpec | None:
    if name is None:
        return None
    if not name.strip():
        raise ValueError("gpu: the name is empty; give one such as RTX A6000, or --memory-bandwidth instead")
    found = gpus.find(name)
    if found is None:
        near = gpus.similar(name)
        known = f"did you mean {_alternatives(near)}?" if near else f"it has {', '.join(spec.name for spec in gpus)}."
        raise ValueError(f"gpu: {name} is not in the table; {known} For any other GPU give --memory-bandwidth instead.")
    return found


def _alternatives(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _memory_bandwidth(given: float | None, gpu: GpuSpec | None) -> float:
    if given is not None:
        return given
    if gpu is None:
        raise ValueError("memory_bandwidth_bytes_per_second: give it in bytes per second, or name a GPU with --gpu")
    return gpu.memory_bandwidth_bytes_per_second


def _speculation(arguments: argparse.Namespace, assumed: list[str]) -> Speculation:
    steps, tokens = arguments.draft_steps, arguments.draft_tokens
    if arguments.speculative == "none":
        if steps is not None or tokens is not None or arguments.draft_model_config is not None:
            raise ValueError("speculation.algorithm: draft flags need one of mtp, eagle, eagle3, standalone, ngram")
        return Speculation()
    if steps is None and tokens is None:
        steps = DEFAULT_DRAFT_STEPS
        assumed.append("draft_steps")
    if steps is None:
        if tokens < 2:
            raise ValueError(f"draft_tokens: must be at least 2, the drafted token and the one before it, not {tokens}")
        steps = tokens - 1
    draft = None if arguments.draft_model_config is None else _read_shape(arguments.draft_model_config)
    return Speculation(arguments.speculative, steps, steps + 1 if tokens is None else tokens, draft)


def _link(arguments: argparse.Namespace, gpu: GpuSpec | None, assumed: list[str]) -> tuple[float | None, str | None]:
    """(bytes per second one way, name) of the link between the GPUs; `None` with one rank or where nothing is known."""
    generation, width = arguments.pcie_generation, arguments.pcie_width
    if arguments.nvlink is not None and (generation is not None or width is not None):
        raise ValueError("nvlink: the GPUs talk over NVLink or over PCIe: give only one of them")
    # What is given must make sense also where it is not used.
    link_bandwidth(1 if generation is None else generation, 1 if width is None else width)
    if arguments.nvlink is not None and arguments.nvlink is not True:
        require_within(arguments.nvlink, LINK_BANDWIDTH_BYTES_PER_SECOND, "nvlink")
    if arguments.tensor_parallel == 1:
        return None, None
    wants_pcie = generation is not None or width is not None
    if arguments.nvlink is not None or (gpu is not None and gpu.nvlink == "built_in" and not wants_pcie):
        if arguments.nvlink is None:
            assumed.append("link")
        elif arguments.nvlink is not True:
            return arguments.nvlink, "NVLink"
        if gpu is None or gpu.nvlink_bytes_per_second is None:
            raise ValueError("nvlink: the table has no NVLink bandwidth for this GPU: give it in bytes per second, one way")
        return gpu.nvlink_bytes_per_second, "NVLink"
    if generation is None or width is None:
        if gpu is None or gpu.pcie_generation is None or gpu.pcie_width_lanes is None:
            if wants_pcie:
                raise ValueError("pcie_generation: give it together with --pcie-width")
            return None, None
        assumed.append("link")
        generation, width = generation or gpu.pcie_generation, width or gpu.pcie_width_lanes
    return link_bandwidth(generation, width), f"PCIe Gen{generation} x{width}"


def _allreduce_latency(arguments: argparse.Namespace, link_name: str | None, assumed: list[str]) -> float:
    default = default_allreduce_latency(nvlink=link_name == "NVLink", ranks=arguments.tensor_parallel)
    if arguments.tensor_parallel == 1 and arguments.allreduce_latency is None:
        return default
    return _or_assumed(arguments.allreduce_latency, "allreduce_latency", default, assumed)


def _or_assumed(given: float | None, name: str, default: float, assumed: list[str]) -> float:
    if given is not None:
        return given
    assumed.append(name)
    return default


# ------------------------------------------------------------------------------------------------- Values on the line

_POWERS_OF_TEN = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
_TIME_POWERS_OF_TEN = {"": 0, "s": 0, "ms": -3, "us": -6, "µs": -6}


def _number(text: str) -> float:
    """A finite number with an optional power-of-1000 letter: 27e9, 27b, 768G, 768GB/s."""
    plain = re.sub(r"(?<=[a-z])b(/s)?$", "", text.strip().lower())
    return _scaled(text, plain, _POWERS_OF_TEN, "a number such as 27e9, 27b or 768G")


def _seconds(text: str) -> float:
    """A finite number of seconds: 8e-6, 8us, 5.6ms."""
    return _scaled(text, text.strip().lower(), _TIME_POWERS_OF_TEN, "a time such as 8e-6, 8us or 5.6ms")


def _scaled(text: str, plain: str, powers_of_ten: dict[str, int], expected: str) -> float:
    match = re.fullmatch(r"([+-]?[0-9]{1,30}(?:\.[0-9]{0,30})?|[+-]?\.[0-9]{1,30})(?:e([+-]?[0-9]{1,3}))?\s*([a-zµ]*)", plain)
    if match is None or match[3] not in powers_of_ten:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    # One decimal literal, so that 20us is 2e-05 and not 20 * 1e-06 with its rounding.
    value = float(f"{match[1]}e{int(match[2] or 0) + powers_of_ten[match[3]]}")
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value) or not 0 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 1,000,000")
    return int(value)


def _override(text: str) -> tuple[str, str, float]:
    """(component, quantity, value) of `weights.bytes=27e9`."""
    match = re.fullmatch(r"\s*(\w+)\.(bytes|seconds|count)\s*=(.*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not COMPONENT.bytes=, .seconds= or .count= and a value")
    return match[1], match[2], _seconds(match[3]) if match[2] == "seconds" else _number(match[3])


def _overrides(values: list[tuple[str, str, float]]) -> dict[str, Override]:
    """By component; a quantity given twice takes the last value, as flags do."""
    overrides: dict[str, Override] = {}
    for component, quantity, value in values:
        before = overrides.get(component, Override())
        match quantity:
            case "bytes":
                overrides[component] = replace(before, bytes_per_gpu=value)
            case "seconds":
                overrides[component] = replace(before, seconds=value)
            case _:
                overrides[component] = replace(before, count=value)
    return overrides


_FLAGS = {
    "memory_bandwidth_bytes_per_second": "--memory-bandwidth",
    "link_bandwidth_bytes_per_second": "--pcie-generation and --pcie-width, --nvlink or --gpu",
    "allreduce_latency_seconds": "--allreduce-latency",
    "context_tokens_per_request": "--context",
    "speculation.algorithm": "--speculative",
    "speculation.draft_shape": "--draft-model-config",
    "generation": "--pcie-generation",
    "width_lanes": "--pcie-width",
    "overrides": "--set",
}
"""Flags whose names differ from the model's fields."""


def _in_flags(message: str) -> str:
    """The model's sentence with the field it begins with named as the flag that sets it."""
    field, colon, rest = message.partition(": ")
    if not re.fullmatch(r"[a-z_.]+", field) or not colon:
        return message
    if field.startswith("overrides."):
        return f"--set {field.removeprefix('overrides.')}: {rest}"
    return f"{_FLAGS.get(field, '--' + field.replace('_', '-'))}: {rest}"
