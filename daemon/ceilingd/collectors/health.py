"""Can the daemon be trusted now: its sources, the driver, its event loop, its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ceilingd.collectors.family import Family, Row, Rows, Value, flag
from ceilingd.records import Snapshot, SourceHealth

SOURCE = ("source",)


def sources(snapshot: Snapshot) -> tuple[SourceHealth, ...]:
    """Every source once: those of the sampler, then servers that it does not list."""
    by_name = {health.name: health for health in snapshot.sources}
    for server in snapshot.servers:
        by_name.setdefault(server.health.name, server.health)
    return tuple(by_name.values())


def _each_source(value: Callable[[SourceHealth], Value]) -> Rows:
    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for health in sources(snapshot):
            yield (health.name,), value(health)

    return rows


def _errors(snapshot: Snapshot) -> Iterator[Row]:
    for health in sources(snapshot):
        for reason, count in health.errors_total:
            yield (health.name, reason), count


def _sample_age(snapshot: Snapshot) -> Iterator[Row]:
    for health in sources(snapshot):
        if health.last_success_monotonic_seconds is not None:
            yield (health.name,), snapshot.monotonic_seconds - health.last_success_monotonic_seconds


def _config_successful(snapshot: Snapshot) -> Iterator[Row]:
    if snapshot.config_loaded_timestamp_seconds is not None:
        yield (), 1


def _config_timestamp(snapshot: Snapshot) -> Iterator[Row]:
    if snapshot.config_loaded_timestamp_seconds is not None:
        yield (), snapshot.config_loaded_timestamp_seconds


def _one(value: Callable[[Snapshot], float]) -> Rows:
    """The only row of a family without labels."""
    return lambda snapshot: (((), value(snapshot)),)


FAMILIES = (
    Family(
        "ceilingd_nvml_up",
        "gauge",
        "1 while NVML answers; at 0 all GPU series are absent.",
        (),
        _one(lambda snapshot: flag(snapshot.nvml.up)),
    ),
    Family(
        "ceilingd_nvml_call_stuck_seconds",
        "gauge",
        "How long the NVML call in flight has been running beyond its limit; 0 when none is.",
        (),
        _one(lambda snapshot: snapshot.nvml.stuck_seconds),
    ),
    Family(
        "ceilingd_source_up",
        "gauge",
        "1 while the last read of the source worked; at 0 what it said before is dropped.",
        SOURCE,
        _each_source(lambda health: flag(health.up)),
    ),
    Family(
        "ceilingd_source_samples_total",
        "counter",
        "Reads of the source that gave a reading.",
        SOURCE,
        _each_source(lambda health: health.samples_total),
    ),
    Family(
        "ceilingd_source_errors_total",
        "counter",
        "Reads that failed, by reason.",
        (*SOURCE, "reason"),
        _errors,
    ),
    Family(
        "ceilingd_source_sample_age_seconds",
        "gauge",
        "Time since the last read that worked, when the snapshot was made; absent before the first.",
        SOURCE,
        _sample_age,
    ),
    Family(
        "ceilingd_source_sample_duration_seconds",
        "histogram",
        "How long reads of the source took.",
        SOURCE,
        _each_source(lambda health: health.durations),
    ),
    Family(
        "ceilingd_snapshot_timestamp_seconds",
        "gauge",
        "Unix time at which the values of this exposition were put together.",
        (),
        _one(lambda snapshot: snapshot.timestamp_seconds),
    ),
    Family(
        "ceilingd_event_loop_lag_seconds",
        "gauge",
        "Longest delay of the event loop since the snapshot before.",
        (),
        _one(lambda snapshot: snapshot.event_loop_lag_seconds),
    ),
    Family(
        "ceilingd_config_last_reload_successful",
        "gauge",
        "1 if the last attempt to load the configuration worked.",
        (),
        _config_successful,
    ),
    Family(
        "ceilingd_config_last_reload_success_timestamp_seconds",
        "gauge",
        "Unix time at which the configuration in force was loaded.",
        (),
        _config_timestamp,
    ),
)
