"""The join: which GPUs serve what, and the inputs of the ceiling model from what engine, driver and configuration say.

Pure. What is missing becomes a `NoCeiling` with its reason; what is taken on trust is named in `assumed`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ceilingd.ceiling.collectives import default_allreduce_latency
from ceilingd.ceiling.decode import default_efficiency
from ceilingd.ceiling.inputs import (
    DEFAULT_FIXED_SECONDS,
    CeilingInputs,
    Deployment,
    Hardware,
    Load,
    Speculation,
    SpeculativeAlgorithm,
)
from ceilingd.ceiling.quantization import Quantization
from ceilingd.ceiling.shape import ModelShape
from ceilingd.gpus import GpuSpec
from ceilingd.links.rates import GENERATIONS, WIDTHS_LANES, link_bandwidth
from ceilingd.records import DecodeObservation, EngineIdentity, GpuInfo, LinkStatus, NoCeiling, ServerGpu


@dataclass(frozen=True, slots=True)
class Declared:
    """What the configuration says about the model's constants; `None` where it is silent."""

    bandwidth_efficiency: float | None = None
    fixed_seconds: float | None = None
    allreduce_latency_seconds: float | None = None
    memory_bandwidth_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """By UUID or PCI bus id, in lower case."""


def server_gpus(
    declared: Sequence[int | str] | None,
    identity: EngineIdentity | None,
    gpus: Iterable[GpuInfo],
    local: bool,
) -> tuple[tuple[ServerGpu, ...], tuple[str, ...]]:
    """The GPUs of a server, in rank order, and what was assumed.

    `declared` are NVML indices, UUIDs or PCI bus ids. Without them a server on this host is taken to sit where its own
    arguments put it (`base_gpu_id`, `gpu_id_step`), which holds unless CUDA_VISIBLE_DEVICES hides or reorders GPUs: assumed.
    Empty when the GPUs cannot be told or one of them is not there."""
    by_key: dict[int | str, GpuInfo] = {}
    for gpu in gpus:
        by_key.update({gpu.index: gpu, gpu.uuid.lower(): gpu, gpu.pci_bus_id: gpu})
    assumed: tuple[str, ...] = ()
    if declared is not None:
        keys: list[int | str] = [key.lower() if isinstance(key, str) else key for key in declared]
    elif identity is not None and local and identity.complete and (identity.node_count or 1) == 1:
        ranks = (identity.tensor_parallel or 1) * (identity.pipeline_parallel or 1)
        if not identity.dp_attention:
            ranks *= identity.data_parallel or 1
        first, step = identity.base_gpu_id or 0, identity.gpu_id_step or 1
        keys = [first + rank * step for rank in range(ranks)]
        assumed = ("gpu_mapping",)
    else:
        return (), ()
    found = [by_key.get(key) for key in keys]
    placed = [gpu for gpu in found if gpu is not None]
    if len(placed) != len(keys):
        return (), ()
    per_replica = _gpus_per_replica(identity, len(placed))
    return (
        tuple(
            ServerGpu(str(position // per_replica), position % per_replica, gpu.index, gpu.uuid)
            for position, gpu in enumerate(placed)
        ),
        assumed,
    )


def _gpus_per_replica(identity: EngineIdentity | None, gpu_count: int) -> int:
    """GPUs that hold one copy of the model: all of them but with plain data parallelism."""
    replicas = 1
    if identity is not None and not identity.dp_attention:
        replicas = identity.data_parallel or 1
    return max(gpu_count // replicas, 1)


def ceiling_inputs(
    identity: EngineIdentity | None,
    shapes: tuple[ModelShape, ModelShape | None] | NoCeiling | None,
    observation: DecodeObservation | None,
    gpus: Sequence[tuple[GpuInfo, LinkStatus | None, GpuSpec | None]],
    declared: Declared,
    assumed: tuple[str, ...] = (),
    listed: Sequence[int | str] | None = None,
) -> CeilingInputs | NoCeiling:
    """The inputs for one DP rank. `gpus` are those of its replica, `listed` what the configuration names for the server;
    `shapes` the target and a separate draft model."""
    if identity is None or not identity.complete:
        return NoCeiling("identity_unknown", "the server has not told yet what it serves (/server_info)")
    if shapes is None:
        return NoCeiling("model_config_missing", "config.json of the model is being read")
    if isinstance(shapes, NoCeiling):
        return shapes
    shape, draft_shape = shapes
    ranks = (identity.tensor_parallel or 1) * (identity.pipeline_parallel or 1)
    if not gpus and listed:
        names = ", ".join(map(str, listed))
        return NoCeiling("gpus_unknown", f"gpus = [{names}] of this server names a GPU that the driver does not show now")
    if not gpus:
        return NoCeiling("gpus_unknown", "which GPUs serve this model is not known: list them as gpus = [...] of this server")
    if len(gpus) != ranks:
        return NoCeiling(
            "gpus_unknown",
            f"by the server's own word a copy of the model sits on {ranks} GPU{'s' * (ranks != 1)}, but {len(gpus)} "
            f"{'are' if len(gpus) != 1 else 'is'} listed: name all of them, in rank order, as gpus = [...] of this server",
        )
    quantization = quantization_of(identity, shape)
    if isinstance(quantization, NoCeiling):
        return quantization
    speculation = speculation_of(identity, shape, draft_shape)
    if isinstance(speculation, NoCeiling):
        return speculation
    named = list(assumed)
    hardware = _hardware(quantization or shape.quantization, gpus, declared, named)
    if isinstance(hardware, NoCeiling):
        return hardware
    if observation is None or not observation.running_requests:
        return NoCeiling("not_decoding", "no decoding was seen lately: a ceiling needs a batch and a context")
    if observation.context_tokens is None:
        named.append("context_tokens")
    if declared.fixed_seconds is None:
        named.append("fixed_seconds")
    kv_cache_dtype = (identity.kv_cache_dtype or "auto").lower()
    return CeilingInputs(
        shape=shape,
        hardware=hardware,
        load=Load(
            batch=observation.running_requests,
            context_tokens_per_request=(observation.context_tokens or 0.0) / observation.running_requests,
            accept_length=observation.accept_length,
        ),
        deployment=Deployment(
            tensor_parallel=identity.tensor_parallel or 1,
            pipeline_parallel=identity.pipeline_parallel or 1,
            data_parallel=identity.data_parallel or 1,
            expert_parallel=identity.expert_parallel or 1,
            dp_attention=identity.dp_attention,
            quantization=quantization,
            kv_cache_dtype="fp8" if kv_cache_dtype.startswith("fp8") else "bf16",
        ),
        speculation=speculation,
        fixed_seconds=DEFAULT_FIXED_SECONDS if declared.fixed_seconds is None else declared.fixed_seconds,
        assumed=tuple(dict.fromkeys(named)),
    )


_ENGINE_QUANTIZATION: dict[str, Quantization] = {
    # Quantization that SGLang applies itself while loading a checkpoint that is not quantized (`--quantization`).
    "fp8": "fp8_channel",
    "w8a8_fp8": "fp8_channel",
    "w8a8_int8": "int8_channel",
}


def quantization_of(identity: EngineIdentity, shape: ModelShape) -> Quantization | NoCeiling | None:
    """The checkpoint's own format wins (`None` leaves it to the shape); else what the engine quantizes to on loading."""
    if shape.quantization is not None or identity.quantization is None:
        return None
    known = _ENGINE_QUANTIZATION.get(identity.quantization.lower())
    if known is None:
        return NoCeiling(
            "unknown_quantization",
            f"the engine says quantization {identity.quantization!r}, and the model's config.json says none: "
            "point model_config at the config.json of the quantized checkpoint",
        )
    return known


def speculation_of(identity: EngineIdentity, shape: ModelShape, draft_shape: ModelShape | None) -> Speculation | NoCeiling:
    """What the engine calls EAGLE is MTP where the checkpoint brings its own draft layers and no other draft is named."""
    algorithm = (identity.speculative_algorithm or "NONE").upper()
    if algorithm == "NONE":
        return Speculation()
    steps = identity.speculative_num_steps
    tokens = identity.speculative_num_draft_tokens
    own_draft = identity.speculative_draft_model_path in (None, identity.model_path)
    names: dict[str, SpeculativeAlgorithm] = {"EAGLE3": "eagle3", "STANDALONE": "standalone", "NGRAM": "ngram"}
    if algorithm in ("EAGLE", "NEXTN"):
        name: SpeculativeAlgorithm = "mtp" if own_draft and shape.draft_layers else "eagle"
    elif algorithm in names:
        name = names[algorithm]
    else:
        return NoCeiling("unsupported_deployment", f"speculative algorithm {algorithm} is not modelled yet")
    if steps is None and tokens is None:
        return NoCeiling(
            "identity_unknown", "the server names a speculative algorithm but neither its steps nor its draft tokens"
        )
    if name not in ("mtp", "ngram") and draft_shape is None:
        return NoCeiling(
            "model_config_missing",
            "the config.json of the draft model was not found: set draft_model_config of this server",
        )
    steps = steps if steps is not None else (tokens or 1) - 1
    return Speculation(name, steps, tokens if tokens is not None else steps + 1, draft_shape if name != "mtp" else None)


def _hardware(
    quantization: Quantization | None,
    gpus: Sequence[tuple[GpuInfo, LinkStatus | None, GpuSpec | None]],
    declared: Declared,
    assumed: list[str],
) -> Hardware | NoCeiling:
    """The slowest GPU of the group and the slowest link between them."""
    bandwidths = []
    for info, _, spec in gpus:
        told = declared.memory_bandwidth_bytes_per_second
        bandwidth = told.get(info.uuid.lower()) or told.get(info.pci_bus_id) or info.memory_bandwidth_max_bytes_per_second
        if bandwidth is None and spec is not None:
            bandwidth = spec.memory_bandwidth_bytes_per_second
            assumed.append("memory_bandwidth")
        if bandwidth is None:
            return NoCeiling(
                "memory_bandwidth_unknown",
                f"neither the driver nor the GPU table knows the memory bandwidth of {info.name}: "
                "set memory_bandwidth_bytes_per_second of this GPU",
            )
        bandwidths.append(bandwidth)
    efficiency = declared.bandwidth_efficiency
    if efficiency is None:
        efficiency = min(default_efficiency(info.name, quantization) for info, _, _ in gpus)
        assumed.append("bandwidth_efficiency")
    hardware = Hardware(min(bandwidths), efficiency, _slowest_flops([spec for _, _, spec in gpus]))
    if len(gpus) == 1:
        return hardware
    link, over_nvlink = _slowest_link(gpus)
    if link is None:
        return NoCeiling("gpus_unknown", "the link of one of this server's GPUs cannot be read")
    if over_nvlink:
        assumed.append("nvlink_bandwidth")
    latency = declared.allreduce_latency_seconds
    if latency is None:
        latency = default_allreduce_latency(over_nvlink, len(gpus))
        assumed.append("allreduce_latency")
    return replace(hardware, link_bandwidth_bytes_per_second=link, allreduce_latency_seconds=latency)


def _slowest_link(gpus: Sequence[tuple[GpuInfo, LinkStatus | None, GpuSpec | None]]) -> tuple[float | None, bool]:
    """(bytes per second one way, over NVLink?). NVLink counts where every GPU of the group has active links."""
    if all(info.nvlink_active_links and spec is not None and spec.nvlink_bytes_per_second for info, _, spec in gpus):
        return min(spec.nvlink_bytes_per_second or 0.0 for _, _, spec in gpus if spec is not None), True
    rates = []
    for _, link, _ in gpus:
        if link is None or link.generation not in GENERATIONS or link.width_lanes not in WIDTHS_LANES:
            return None, False
        rates.append(link_bandwidth(link.generation, link.width_lanes))
    return min(rates), False


def _slowest_flops(specs: Sequence[GpuSpec | None]) -> dict[str, float]:
    """Per format the least of the group; a format that one of them lacks (or a GPU nobody knows) is left out."""
    if any(spec is None for spec in specs):
        return {}
    tables = [spec.matrix_flops_per_second for spec in specs if spec is not None]
    return {kind: min(table[kind] for table in tables) for kind in tables[0] if all(kind in table for table in tables)}
