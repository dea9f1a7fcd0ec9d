"""The GPUs as NVML reads them: identity, load, clocks, memory, power."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ceilingd.collectors.family import Family, Row, Rows, flag
from ceilingd.records import GpuReading, Snapshot, memory_bandwidth

GPU = ("gpu", "uuid")
"""The labels of every series about one GPU: NVML index and UUID."""


def gpu_readings(snapshot: Snapshot) -> tuple[GpuReading, ...]:
    """The GPUs that can be read now, in NVML index order; none while the driver does not answer."""
    return snapshot.nvml.reading.gpus if snapshot.nvml.reading is not None else ()


def gpu_labels(gpu: GpuReading) -> tuple[str, str]:
    """The values of `GPU`."""
    return str(gpu.info.index), gpu.info.uuid


def each_gpu(value: Callable[[GpuReading], float | None]) -> Rows:
    """One row for each GPU that has this value."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for gpu in gpu_readings(snapshot):
            present = value(gpu)
            if present is not None:
                yield gpu_labels(gpu), present

    return rows


def _info(snapshot: Snapshot) -> Iterator[Row]:
    reading = snapshot.nvml.reading
    if reading is None:
        return
    for gpu in reading.gpus:
        info = gpu.info
        labels = (
            *gpu_labels(gpu),
            info.name,
            info.pci_bus_id,
            info.vbios_version or "",
            reading.driver_version,
            reading.nvml_version,
            reading.cuda_version or "",
            _text(gpu.memory_total_bytes),
            _text(info.memory_bus_width_bits),
        )
        yield labels, 1


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _up(snapshot: Snapshot) -> Iterator[Row]:
    for gpu in gpu_readings(snapshot):
        yield gpu_labels(gpu), 1
    if snapshot.nvml.reading is None or not snapshot.nvml.reading.unreadable:
        return
    # NVML does not tell the UUID of a GPU that it cannot read; who used it before still knows.
    uuids = {gpu.index: gpu.uuid for server in snapshot.servers for gpu in server.gpus}
    uuids.update({link.index: link.uuid for link in snapshot.links})
    for index, _ in snapshot.nvml.reading.unreadable:
        yield (str(index), uuids.get(index, "")), flag(False)


def _clocks_event_reasons(snapshot: Snapshot) -> Iterator[Row]:
    for gpu in gpu_readings(snapshot):
        for reason in gpu.clocks_event_reasons or ():
            yield (*gpu_labels(gpu), reason), 1


def _power_limit(gpu: GpuReading) -> float | None:
    return gpu.power_limit_watts if gpu.power_limit_watts is not None else gpu.info.power_limit_watts


FAMILIES = (
    Family(
        "ceilingd_gpu_info",
        "info",
        "Identity of each GPU that can be read; join on uuid.",
        (
            *GPU,
            "name",
            "pci_bus_id",
            "vbios_version",
            "driver_version",
            "nvml_version",
            "cuda_version",
            "memory_bytes",
            "memory_bus_width_bits",
        ),
        _info,
    ),
    Family(
        "ceilingd_gpu_up",
        "gauge",
        "1 for a GPU that can be read, 0 for one that NVML counts but cannot read (lost, fallen off the bus).",
        GPU,
        _up,
    ),
    Family(
        "ceilingd_gpu_utilization_ratio",
        "gauge",
        "Share of the driver's last sample period in which a kernel ran. 1 does not mean that the GPU is used well.",
        GPU,
        each_gpu(lambda gpu: gpu.utilization_ratio),
    ),
    Family(
        "ceilingd_gpu_memory_controller_utilization_ratio",
        "gauge",
        "Share of the driver's last sample period in which memory was read or written. Not a share of the bandwidth.",
        GPU,
        each_gpu(lambda gpu: gpu.memory_utilization_ratio),
    ),
    Family("ceilingd_gpu_memory_used_bytes", "gauge", "Memory in use.", GPU, each_gpu(lambda gpu: gpu.memory_used_bytes)),
    Family("ceilingd_gpu_memory_total_bytes", "gauge", "Memory installed.", GPU, each_gpu(lambda gpu: gpu.memory_total_bytes)),
    Family("ceilingd_gpu_memory_clock_hertz", "gauge", "Memory clock now.", GPU, each_gpu(lambda gpu: gpu.memory_clock_hertz)),
    Family(
        "ceilingd_gpu_memory_clock_max_hertz",
        "gauge",
        "Highest memory clock of this GPU.",
        GPU,
        each_gpu(lambda gpu: gpu.info.memory_clock_max_hertz),
    ),
    Family("ceilingd_gpu_sm_clock_hertz", "gauge", "SM clock now.", GPU, each_gpu(lambda gpu: gpu.sm_clock_hertz)),
    Family(
        "ceilingd_gpu_sm_clock_max_hertz",
        "gauge",
        "Highest SM clock of this GPU.",
        GPU,
        each_gpu(lambda gpu: gpu.info.sm_clock_max_hertz),
    ),
    Family(
        "ceilingd_gpu_memory_bandwidth_bytes_per_second",
        "gauge",
        "Theoretical memory bandwidth at the present memory clock: clock x 2 x bus width.",
        GPU,
        each_gpu(lambda gpu: memory_bandwidth(gpu.memory_clock_hertz, gpu.info.memory_bus_width_bits)),
    ),
    Family(
        "ceilingd_gpu_memory_bandwidth_max_bytes_per_second",
        "gauge",
        "Theoretical memory bandwidth at the highest memory clock.",
        GPU,
        each_gpu(lambda gpu: gpu.info.memory_bandwidth_max_bytes_per_second),
    ),
    Family(
        "ceilingd_gpu_power_watts",
        "gauge",
        "Board power, averaged by the driver.",
        GPU,
        each_gpu(lambda gpu: gpu.power_watts),
    ),
    Family("ceilingd_gpu_power_limit_watts", "gauge", "Board power limit in force.", GPU, each_gpu(_power_limit)),
    Family(
        "ceilingd_gpu_energy_joules_total",
        "counter",
        "Energy used since the driver was loaded.",
        GPU,
        each_gpu(lambda gpu: gpu.energy_joules),
    ),
    Family(
        "ceilingd_gpu_temperature_celsius",
        "gauge",
        "Temperature of the GPU die.",
        GPU,
        each_gpu(lambda gpu: gpu.temperature_celsius),
    ),
    Family(
        "ceilingd_gpu_performance_state",
        "gauge",
        "Performance state: 0 is the fastest (P0), 15 the slowest.",
        GPU,
        each_gpu(lambda gpu: gpu.performance_state),
    ),
    Family(
        "ceilingd_gpu_clocks_event_reason",
        "gauge",
        "1 for each reason that holds the clocks down now; no series for a reason that does not apply.",
        (*GPU, "reason"),
        _clocks_event_reasons,
    ),
    Family(
        "ceilingd_gpu_nvlink_active_links",
        "gauge",
        "NVLink links that are up; 0 without a bridge.",
        GPU,
        each_gpu(lambda gpu: gpu.info.nvlink_active_links),
    ),
)
