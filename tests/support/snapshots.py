"""Snapshots to render: the founding deployment, a host with nothing on it, and a large host.

The numbers of the founding case are those of its published derivation (Qwen3.6-27B, TP 2, two RTX A6000): a peak round of
42.6 ms, of which weights take 33.37, and 55.4 ms observed.
"""

from __future__ import annotations

from dataclasses import replace

from ceilingd.records import (
    EMPTY_DURATIONS,
    LINK_STATES,
    Ceiling,
    Component,
    DecodeObservation,
    EngineIdentity,
    EngineRank,
    EngineReading,
    GpuInfo,
    GpuReading,
    LinkState,
    LinkStatus,
    NoCeiling,
    NvmlReading,
    NvmlStatus,
    ProcessSample,
    RankStatus,
    Round,
    ServerGpu,
    ServerStatus,
    Snapshot,
    SourceHealth,
)

MONOTONIC_SECONDS = 1000.0
TIMESTAMP_SECONDS = 1_796_000_000.0

_PEAK_SECONDS = {
    "weights": 33.37e-3,
    "kv_cache": 0.02e-3,
    "linear_state": 0.69e-3,
    "allreduce": 1.1e-3,
    "logits_gather": 0.08e-3,
    "draft": 6.83e-3,
    "fixed": 0.5e-3,
}
_BOUNDS = {"allreduce": "latency", "logits_gather": "latency", "fixed": "fixed"}
BANDWIDTH_EFFICIENCY = 0.8


def gpu(index: int) -> GpuReading:
    """A GPU that gives everything."""
    info = GpuInfo(
        index=index,
        uuid=f"GPU-00000000-0000-4000-8000-{index:012d}",
        name="NVIDIA RTX A6000",
        pci_bus_id=f"0000:{0x41 + index:02x}:00.0",
        vbios_version="94.02.5C.00.02",
        memory_bus_width_bits=384,
        memory_clock_max_hertz=8001e6,
        sm_clock_max_hertz=2100e6,
        link_generation_max_gpu=4,
        link_generation_max_system=4,
        link_width_max_lanes=16,
        power_limit_watts=300.0,
        nvlink_active_links=0,
    )
    return GpuReading(
        info=info,
        utilization_ratio=0.98,
        memory_utilization_ratio=0.87,
        memory_used_bytes=45_000_000_000,
        memory_total_bytes=51_527_024_640,
        memory_clock_hertz=8001e6,
        sm_clock_hertz=1860e6,
        power_watts=287.5,
        power_limit_watts=300.0,
        energy_joules=1_234_567.5,
        temperature_celsius=71.0,
        performance_state=2,
        clocks_event_reasons=("sw_power_cap",),
        pcie_replays_total=3,
    )


def link(index: int, state: LinkState = "full") -> LinkStatus:
    """The link of `gpu(index)`: Gen4 x16, or Gen1 x16 in the states that are below what is expected."""
    return LinkStatus(
        index=index,
        uuid=gpu(index).info.uuid,
        state=state,
        generation=4 if state == "full" else 1,
        width_lanes=16,
        generation_expected=4,
        width_expected_lanes=16,
        working=True,
        transitions_total=5,
        degraded_seconds_total=12.5,
        busy_seconds=((4, 16, 600.0), (1, 16, 12.5)),
        transmit_bytes_per_second=1.5e9,
        receive_bytes_per_second=1.25e9,
        transmit_bytes_total=9e11,
        receive_bytes_total=7.5e11,
    )


def predicted_round(efficiency: float = 1.0) -> Round:
    """The round of the founding case; what waits for memory takes longer at less than the peak bandwidth."""
    components = tuple(
        Component(
            name=name,
            bytes_per_gpu=0.0 if name in _BOUNDS else seconds * 768e9,
            flops_per_gpu=0.0,
            count=1,
            seconds=seconds if name in _BOUNDS else seconds / efficiency,
            bound=_BOUNDS.get(name, "memory"),  # type: ignore[arg-type]
        )
        for name, seconds in _PEAK_SECONDS.items()
    )
    return Round(components, sum(component.seconds for component in components))


def ceiling(accept_length: float | None = 3.33) -> Ceiling:
    """The ceiling of one request with three MTP steps."""
    peak, achievable = predicted_round(), predicted_round(BANDWIDTH_EFFICIENCY)
    return Ceiling(
        peak=peak,
        achievable=achievable,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        perfect_peak=4 / peak.seconds,
        perfect_achievable=4 / achievable.seconds,
        observed_peak=None if accept_length is None else accept_length / peak.seconds,
        observed_achievable=None if accept_length is None else accept_length / achievable.seconds,
        parameters_main=26_895_998_464,
        parameters_draft=424_699_392,
        parameters_vision=None,
        parameters_streamed=25_625_000_000,
        parameters_active=25_625_000_000,
        assumed=("bandwidth_efficiency", "fixed_seconds"),
    )


def observation(
    dp_rank: str = "0", accept_length: float | None = 3.33, round_seconds: float | None = 55.4e-3
) -> DecodeObservation:
    """What was seen of one request over ten seconds."""
    return DecodeObservation(
        dp_rank=dp_rank,
        decode_source="decode_moments",
        window_seconds=10.0,
        steps=180.0,
        running_requests=1.0,
        context_tokens=512.0,
        accept_length=accept_length,
        tokens_per_second=None if accept_length is None or round_seconds is None else accept_length / round_seconds,
        round_seconds=round_seconds,
        prefill_share_ratio=0.0,
    )


def engine_rank(dp_rank: str = "0") -> EngineRank:
    return EngineRank(dp_rank, running_requests=1.0, queue_requests=0.0, context_tokens=500.0, kv_cache_usage_ratio=0.02)


IDENTITY = EngineIdentity(
    version="0.5.23",
    model_path="Qwen/Qwen3.6-27B",
    served_model_name="qwen",
    model_type="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration",),
    tensor_parallel=2,
    pipeline_parallel=1,
    data_parallel=1,
    expert_parallel=1,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_num_draft_tokens=4,
    attention_backend="flashinfer",
    complete=True,
)


def health(name: str, **changes: object) -> SourceHealth:
    """A source that works."""
    source = SourceHealth(
        name,
        up=True,
        attempted=True,
        samples_total=100,
        last_success_monotonic_seconds=MONOTONIC_SECONDS - 0.25,
        last_success_timestamp_seconds=TIMESTAMP_SECONDS - 0.25,
        durations=EMPTY_DURATIONS.observe(0.0004).observe(0.03).observe(60.0),
    )
    return replace(source, **changes)  # type: ignore[arg-type]


def failed(name: str, reason: str, message: str) -> SourceHealth:
    """A source that fails since its first read."""
    return SourceHealth(
        name, attempted=True, errors_total=((reason, 7),), consecutive_failures=7, last_error=message, last_error_reason=reason
    )


def server(name: str = "qwen", gpus: tuple[int, ...] = (0, 1), dp_ranks: tuple[str, ...] = ("0",)) -> ServerStatus:
    """A server that decodes on each of its ranks."""
    return ServerStatus(
        name=name,
        url="http://127.0.0.1:30000",
        health=health(f"sglang/{name}"),
        reading=EngineReading(
            monotonic_seconds=MONOTONIC_SECONDS - 0.25,
            decode_source="decode_moments",
            identity=IDENTITY,
            ranks=tuple(engine_rank(rank) for rank in dp_ranks),
            body_bytes=2345,
            scrape_seconds=0.004,
        ),
        ranks=tuple(RankStatus(rank, engine_rank(rank), observation(rank), ceiling()) for rank in dp_ranks),
        gpus=tuple(ServerGpu("0", position, index, gpu(index).info.uuid) for position, index in enumerate(gpus)),
        assumed=("gpu_mapping", "bandwidth_efficiency", "fixed_seconds"),
        rejected_total=(("counter_reset", 1),),
    )


def down(status: ServerStatus, reason: str, message: str) -> ServerStatus:
    """The same server when it does not answer."""
    return ServerStatus(status.name, status.url, failed(status.health.name, reason, message), None)


def without_ceiling(status: ServerStatus, reason: NoCeiling) -> ServerStatus:
    """The same server when nothing can be predicted of it."""
    return replace(status, assumed=(), ranks=tuple(replace(rank, ceiling=reason, observation=None) for rank in status.ranks))


PROCESS = (
    ProcessSample("process_cpu_seconds_total", "counter", "CPU.", 12.34),
    ProcessSample("process_resident_memory_bytes", "gauge", "RSS.", 61_000_000.0),
    ProcessSample("process_virtual_memory_bytes", "gauge", "VSZ.", 410_000_000.0),
    ProcessSample("process_start_time_seconds", "gauge", "Start.", TIMESTAMP_SECONDS - 3600.5),
    ProcessSample("process_open_fds", "gauge", "Open.", 19.0),
    ProcessSample("process_max_fds", "gauge", "Most.", 1024.0),
)


def host(gpus: tuple[GpuReading, ...], links: tuple[LinkStatus, ...], servers: tuple[ServerStatus, ...]) -> Snapshot:
    """A host on which every source works."""
    nvml_sources = tuple(health(name) for name in ("nvml", "nvml_links", "nvml_traffic"))
    return Snapshot(
        sequence=1,
        timestamp_seconds=TIMESTAMP_SECONDS,
        monotonic_seconds=MONOTONIC_SECONDS,
        started_timestamp_seconds=TIMESTAMP_SECONDS - 3600,
        demo=False,
        nvml=NvmlStatus(True, NvmlReading(MONOTONIC_SECONDS - 0.25, "580.95.05", "13.580.95.05", "13.0", gpus), 0.0),
        links=links,
        servers=servers,
        sources=(*nvml_sources, *(status.health for status in servers)),
        event_loop_lag_seconds=0.0004,
        config_loaded_timestamp_seconds=TIMESTAMP_SECONDS - 3600,
        process=PROCESS,
    )


def founding() -> Snapshot:
    """Two A6000 that serve Qwen3.6-27B."""
    return host((gpu(0), gpu(1)), (link(0), link(1)), (server(),))


def large() -> Snapshot:
    """Eight GPUs and two servers of four GPUs, with everything that hardware and engine can say."""
    reasons = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown")
    gpus = tuple(replace(gpu(index), clocks_event_reasons=reasons) for index in range(8))
    settings = tuple((generation, width, 10.0) for generation in (1, 2, 3, 4, 5) for width in (8, 16))
    links = tuple(replace(link(index, LINK_STATES[index % 4]), busy_seconds=settings) for index in range(8))
    servers = (server("one", (0, 1, 2, 3), ("0", "1", "2", "3")), server("two", (4, 5, 6, 7)))
    snapshot = host(gpus, links, servers)
    troubled = tuple(
        replace(
            source, errors_total=tuple((reason, 1) for reason in ("timeout", "refused", "malformed", "status", "too_large"))
        )
        for source in snapshot.sources
    )
    return replace(snapshot, sources=troubled)


def bare() -> Snapshot:
    """A host without a driver and without servers, just started."""
    no_driver = "libnvidia-ml.so.1 was not found: install the NVIDIA driver on this host"
    return Snapshot(
        sequence=1,
        timestamp_seconds=TIMESTAMP_SECONDS,
        monotonic_seconds=MONOTONIC_SECONDS,
        started_timestamp_seconds=TIMESTAMP_SECONDS,
        demo=False,
        nvml=NvmlStatus(False, None, 0.0),
        sources=(failed("nvml", "library_not_found", no_driver),),
    )
