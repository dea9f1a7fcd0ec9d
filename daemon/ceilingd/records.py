"""The frozen records that pass between modules: sources -> readings -> model and judgement -> `Snapshot` -> exposition.

Base units throughout (seconds, bytes, hertz, watts, ratios in 0..1). `None` means: this hardware, engine or moment does
not say. It is never replaced by 0, NaN or the last value. Collections are tuples, so a snapshot never changes once made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# --------------------------------------------------------------------------------------------------- GPUs (NVML)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """What does not change while the driver is loaded. Asked once per (re-)initialization of NVML."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    """Lower case, four-digit domain, as sysfs spells it: `0000:41:00.0`."""
    vbios_version: str | None = None
    serial: str | None = None
    memory_bus_width_bits: int | None = None
    memory_clock_max_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    link_generation_max_gpu: int | None = None
    """What the GPU itself can do, whatever slot it sits in (`nvmlDeviceGetGpuMaxPcieLinkGeneration`)."""
    link_generation_max_system: int | None = None
    """What this GPU can do in this system (`nvmlDeviceGetMaxPcieLinkGeneration`)."""
    link_width_max_lanes: int | None = None
    power_limit_watts: float | None = None
    nvlink_active_links: int | None = None
    """Links that are up; 0 without a bridge; `None` where the device or guest does not say."""

    @property
    def memory_bandwidth_max_bytes_per_second(self) -> float | None:
        """Peak DRAM bandwidth: clock x 2 transfers x bus width, for GDDR and HBM alike (A6000: 8001 MHz, 384 bit,
        768 GB/s; H200: 3201 MHz, 6016 bit, 4,814 GB/s). `None` where NVML does not give both."""
        return memory_bandwidth(self.memory_clock_max_hertz, self.memory_bus_width_bits)


def memory_bandwidth(clock_hertz: float | None, bus_width_bits: int | None) -> float | None:
    """Bytes per second of a DRAM interface as NVML reports it: memory clock x 2 x bus width / 8."""
    if clock_hertz is None or bus_width_bits is None:
        return None
    return clock_hertz * 2 * bus_width_bits / 8


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at the sample interval. A field that the device does not support is `None`."""

    info: GpuInfo
    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    """Duty cycle of the memory controller, not bandwidth."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_clock_hertz: float | None = None
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    performance_state: int | None = None
    clocks_event_reasons: tuple[str, ...] | None = None
    """Names of the active reasons (`gpu_idle`, `sw_power_cap`, ...); empty when none is active."""
    pcie_replays_total: int | None = None
    """As the device counts; starts non-zero, only growth means something."""


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """All GPUs at one instant, in NVML index order, with the versions that read them."""

    monotonic_seconds: float
    driver_version: str
    nvml_version: str
    cuda_version: str | None
    gpus: tuple[GpuReading, ...]
    unreadable: tuple[tuple[int, str], ...] = ()
    """(NVML index, reason) of GPUs that NVML counts but cannot read now (lost, fallen off the bus)."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One GPU's link and the cheap signs of work beside it, at the link sample interval."""

    index: int
    uuid: str
    generation: int | None
    """1 to 6; `None` where the device gives none or a value that no link can have."""
    width_lanes: int | None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    sm_clock_hertz: float | None = None
    gpu_idle: bool | None = None
    """The clocks event reason GpuIdle: proof of idleness, where the driver gives reasons."""


@dataclass(frozen=True, slots=True)
class LinkReadings:
    """All links at one instant, in NVML index order."""

    monotonic_seconds: float
    links: tuple[LinkReading, ...]


@dataclass(frozen=True, slots=True)
class TrafficReading:
    """One GPU's PCIe traffic, averaged by the driver over its own 20 ms window; counts packet overhead (about 8 %)."""

    index: int
    uuid: str
    transmit_bytes_per_second: float | None
    receive_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class TrafficReadings:
    monotonic_seconds: float
    gpus: tuple[TrafficReading, ...]


# --------------------------------------------------------------------------------------------------- Engine (SGLang)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What one server is, from `/model_info` and the allow-list of `/server_info`. Holds no secret by construction."""

    version: str | None = None
    model_path: str | None = None
    served_model_name: str | None = None
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    """Independent or attention data-parallel ranks: the number of `dp_rank`s that decode on their own batch."""
    expert_parallel: int | None = None
    dp_attention: bool = False
    node_count: int | None = None
    base_gpu_id: int | None = None
    gpu_id_step: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    speculative_algorithm: str | None = None
    """Upper case as the engine resolves it (NEXTN shows as EAGLE); `None` without speculation."""
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_model_path: str | None = None
    attention_backend: str | None = None
    disable_cuda_graph: bool | None = None
    disaggregation_mode: str | None = None
    """`None`, `prefill` or `decode`."""
    context_length: int | None = None
    max_running_requests: int | None = None
    decode_log_interval: int | None = None
    mamba_ssm_dtype: str | None = None
    complete: bool = False
    """True once `/server_info` was read: before that only what `/model_info` says is here."""


@dataclass(frozen=True, slots=True)
class DecodeMoments:
    """SGLang's cumulative sums over decode steps since start (`/v1/loads`, 0.5.17 and later), per DP rank.

    b = running requests of a step, t = seconds between consecutive decode launches, g = tokens generated. Steps after
    idle or prefill are left out by the engine."""

    steps: float
    sum_batch: float
    sum_seconds: float
    sum_batch_squared: float
    sum_batch_seconds: float
    sum_tokens: float


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One data-parallel rank at one instant, aggregated over its TP/PP/EP copies (maximum, never a sum)."""

    dp_rank: str
    """"0" without data parallelism."""
    running_requests: float | None = None
    queue_requests: float | None = None
    context_tokens: float | None = None
    """Tokens held by the running requests, all of them together."""
    kv_cache_usage_ratio: float | None = None
    decode_steps_total: float | None = None
    decode_tokens_total: float | None = None
    finished_tokens_total: float | None = None
    """`generation_tokens_total`: moves only when a request ends. Proof of decoding, useless as a rate."""
    moments: DecodeMoments | None = None
    accept_length: float | None = None
    """The engine's own gauge: sticky, per interval, 0 without speculation."""
    tokens_per_second: float | None = None
    """The engine's own gauge: sticky."""
    prefill_busy_seconds_total: float | None = None
    prefill_tokens_total: float | None = None
    weight_memory_bytes: float | None = None
    """One GPU's share."""
    kv_cache_memory_bytes: float | None = None
    snapshot_timestamp: float | None = None
    """Unix time at which the scheduler wrote this (`/v1/loads` only): a dead scheduler leaves its last one."""
    snapshot_age_seconds: float | None = None
    """How old that was when the server answered, on the clock of its host, which may have been set in between; `None` where
    it says that it is from the future."""


DecodeSource = Literal["decode_moments", "counters", "gauges"]


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One scrape of one server. `ranks` are in the order of their `dp_rank`, numerically."""

    monotonic_seconds: float
    decode_source: DecodeSource
    """The best source this server offers now: it decides how observations are made from two readings."""
    identity: EngineIdentity | None
    """`None` until the server answered `/model_info`."""
    ranks: tuple[EngineRank, ...]
    body_bytes: int
    scrape_seconds: float
    start_time: float | None = None
    """Unix start time of the engine where it tells; a change means a restart."""


# --------------------------------------------------------------------------------------------------- Judgement and model

LinkState = Literal["full", "idle_downshift", "degraded", "unverified", "unsupported"]
LINK_STATES: tuple[LinkState, ...] = ("full", "idle_downshift", "degraded", "unverified", "unsupported")


@dataclass(frozen=True, slots=True)
class DecodeObservation:
    """What one DP rank did over the observation window: it decoded, or it provably rested (`running_requests` 0, all else
    `None`). Absent altogether while neither is proven."""

    dp_rank: str
    decode_source: DecodeSource
    window_seconds: float
    steps: float | None
    running_requests: float | None
    """Mean batch over the steps; `None` while it decodes and the engine has not said yet how large the batch is."""
    context_tokens: float | None
    accept_length: float | None
    """Tokens per request and verify step, bonus token included; 1 without speculation; `None` while too few steps ran."""
    tokens_per_second: float | None
    """Of wall-clock time: prefill is in it. Never more than batch, accept length and round make."""
    round_seconds: float | None
    prefill_share_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Component:
    """One term of a decode round on the slowest rank."""

    name: str
    """weights, experts, kv_cache, linear_state, allreduce, logits_gather, draft or fixed."""
    bytes_per_gpu: float
    flops_per_gpu: float
    count: float
    """How many operations the term stands for (all-reduces, draft passes); 1 where that has no meaning."""
    seconds: float
    bound: Literal["memory", "compute", "link", "latency", "fixed"]


@dataclass(frozen=True, slots=True)
class Round:
    """A predicted decode round at one bandwidth assumption. `seconds` is exactly the sum of its components."""

    components: tuple[Component, ...]
    seconds: float

    @property
    def bottleneck(self) -> str:
        """Name of the longest component."""
        return max(self.components, key=lambda component: component.seconds).name


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The prediction for one DP rank. Tokens per second; `perfect` accepts every draft token, `observed` the given ones."""

    peak: Round
    """At the full theoretical memory bandwidth: a hard bound."""
    achievable: Round
    """At the learned, configured or assumed share of it."""
    bandwidth_efficiency: float
    perfect_peak: float
    perfect_achievable: float
    observed_peak: float | None
    """`None` while the accept length is unknown."""
    observed_achievable: float | None
    parameters_main: int | None
    """The language model, embedding and head included (tied once)."""
    parameters_draft: int | None
    parameters_vision: int | None
    parameters_streamed: int | None
    """Every parameter read in one decode pass of the target model, all ranks together."""
    parameters_active: int | None
    """Parameters that take part in one token (for a dense model: the streamed ones)."""
    assumed: tuple[str, ...] = ()
    """Names of inputs nobody measured or configured: `bandwidth_efficiency`, `memory_bandwidth`, `gpu_mapping`, ..."""


@dataclass(frozen=True, slots=True)
class NoCeiling:
    """Why there is no prediction. `reason` is from a fixed list and becomes a label; `message` is for a person."""

    reason: Literal[
        "identity_unknown", "model_config_missing", "model_config_unreadable", "unknown_architecture", "unknown_quantization",
        "gpus_unknown", "memory_bandwidth_unknown", "not_decoding", "unsupported_deployment",
    ]  # fmt: skip
    message: str


# --------------------------------------------------------------------------------------------------- Snapshot


@dataclass(frozen=True, slots=True)
class DurationHistogram:
    """Cumulative counts of read durations; `bounds` in seconds, `counts` one longer (the last is +Inf)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float

    def observe(self, seconds: float) -> DurationHistogram:
        """A histogram with one more observation."""
        counts = tuple(
            count + (index == len(self.bounds) or seconds <= self.bounds[index]) for index, count in enumerate(self.counts)
        )
        return DurationHistogram(self.bounds, counts, self.sum_seconds + seconds)


DURATION_BOUNDS_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
EMPTY_DURATIONS = DurationHistogram(DURATION_BOUNDS_SECONDS, (0,) * (len(DURATION_BOUNDS_SECONDS) + 1), 0.0)


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """The account of one source. Kept through failures, while its data is dropped at once."""

    name: str
    interval_seconds: float = 1.0
    up: bool = False
    attempted: bool = False
    """True once the first read has ended, whichever way."""
    samples_total: int = 0
    errors_total: tuple[tuple[str, int], ...] = ()
    """(reason, count), reasons in order of first appearance."""
    consecutive_failures: int = 0
    last_success_monotonic_seconds: float | None = None
    last_success_timestamp_seconds: float | None = None
    last_error: str | None = None
    """One sentence, while the source is down."""
    last_error_reason: str | None = None
    durations: DurationHistogram = EMPTY_DURATIONS


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """One GPU's link: what it reads now, what is expected of it, the judgement, and what was accumulated since start."""

    index: int
    uuid: str
    state: LinkState
    generation: int | None
    width_lanes: int | None
    generation_expected: int | None
    width_expected_lanes: int | None
    working: bool
    transitions_total: int
    degraded_seconds_total: float
    busy_seconds: tuple[tuple[int, int, float], ...]
    """(generation, width, seconds with work at that setting), settings in order of first appearance."""
    transmit_bytes_per_second: float | None = None
    receive_bytes_per_second: float | None = None
    transmit_bytes_total: float | None = None
    receive_bytes_total: float | None = None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One DP rank of one server: what it does and what it could do."""

    dp_rank: str
    reading: EngineRank
    observation: DecodeObservation | None
    ceiling: Ceiling | NoCeiling


@dataclass(frozen=True, slots=True)
class ServerGpu:
    """One TP rank of one server on one GPU."""

    dp_rank: str
    tensor_parallel_rank: int
    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One configured server. `reading` is `None` while it does not answer: then only health remains."""

    name: str
    url: str
    """Without user, password and query."""
    health: SourceHealth
    reading: EngineReading | None
    ranks: tuple[RankStatus, ...] = ()
    gpus: tuple[ServerGpu, ...] = ()
    assumed: tuple[str, ...] = ()
    rejected_total: tuple[tuple[str, int], ...] = ()
    """(reason, count) of observations that were not used."""


@dataclass(frozen=True, slots=True)
class NvmlStatus:
    up: bool
    reading: NvmlReading | None
    stuck_seconds: float
    """How long the NVML call in flight has been running beyond its limit; 0 when none is."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a scrape or a page shows, made once a cycle and never changed."""

    sequence: int
    timestamp_seconds: float
    monotonic_seconds: float
    started_timestamp_seconds: float
    demo: bool
    nvml: NvmlStatus
    links: tuple[LinkStatus, ...] = ()
    servers: tuple[ServerStatus, ...] = ()
    sources: tuple[SourceHealth, ...] = ()
    event_loop_lag_seconds: float = 0.0
    config_loaded_timestamp_seconds: float | None = None
    process: tuple[ProcessSample, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One `process_*` sample of the daemon itself, read when the snapshot was made."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    value: float
