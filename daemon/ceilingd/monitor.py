"""Holds the latest reading of every source and what was judged from it, and makes the snapshot.

Readings come in through `accept` and `lose`; `snapshot` runs model and judgement over what is there. No I/O, no waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import structlog

from ceilingd.ceiling.decode import predict
from ceilingd.clock import Clock
from ceilingd.config import Config, ServerSettings
from ceilingd.gpus import GpuTable
from ceilingd.join import Declared, ceiling_inputs, server_gpus
from ceilingd.links.judge import Evidence, ExpectedLink, JudgeSettings, LinkJudgement, advance, expected_link
from ceilingd.models import ModelPlace, Models
from ceilingd.observation import STEPS_PER_REPORT, STEPS_PER_SNAPSHOT, ObservationWindow, observe, tokens_moved
from ceilingd.records import (
    Ceiling,
    DecodeObservation,
    EngineIdentity,
    EngineReading,
    GpuInfo,
    LinkReadings,
    LinkStatus,
    NoCeiling,
    NvmlReading,
    NvmlStatus,
    ProcessSample,
    RankStatus,
    ServerGpu,
    ServerStatus,
    Snapshot,
    SourceHealth,
    TrafficReadings,
)

TOKENS_FRESH_INTERVALS = 1.5
TOKENS_FRESH_SECONDS_MAX = 3.0
"""A reading in which tokens moved is evidence of work until the next one is due, but never for longer than this: well
below the grace of the judgement, so that one short request cannot make a link degraded."""
REPORT_SLACK = 1.25
"""A report of the engine counts as due until this many times its usual period."""
STALE_INTERVALS = 3.0
"""A reading older than this many intervals of its source is not shown, whatever its source is doing."""
SCRAPE_SECONDS_MAX = 10.0
"""A server may take this long to answer before its last reading counts as stale, however long it is given."""
TRAFFIC_GAP_SECONDS = 10.0
"""Traffic is integrated between samples at most this far apart; over a longer gap nobody knows what moved."""


@dataclass(slots=True)
class _Server:
    """What is remembered about one server between readings."""

    settings: ServerSettings
    reading: EngineReading | None = None
    window: ObservationWindow = field(default_factory=ObservationWindow)
    observations: tuple[DecodeObservation, ...] = ()
    rejected: dict[str, int] = field(default_factory=dict)
    moved: bool = False
    """Did tokens move between the last two readings?"""
    moved_monotonic_seconds: float = float("-inf")
    report_seconds: float = 0.0
    """How far apart the engine's reports are, as last observed."""
    gpus: tuple[ServerGpu, ...] = ()
    gpus_assumed: tuple[str, ...] = ()
    judged: EngineReading | None = None
    """The reading that was last held against the ceiling: each counts once."""


@dataclass(slots=True)
class _Traffic:
    """Integrated PCIe traffic of one GPU."""

    sampled_monotonic_seconds: float
    transmit_bytes_per_second: float | None
    receive_bytes_per_second: float | None
    transmit_bytes_total: float = 0.0
    receive_bytes_total: float = 0.0
    live: bool = True


def server_source_name(settings: ServerSettings) -> str:
    """The name of the source that reads this server."""
    return f"sglang/{settings.name}"


class Monitor:
    """The join of all sources; the sampler's sink."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        models: Models,
        gpu_table: GpuTable,
        *,
        demo: bool = False,
        settled_monotonic_seconds: float = 0.0,
        stuck_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._models = models
        self._gpu_table = gpu_table
        self._demo = demo
        self._stuck_seconds = stuck_seconds
        self._log = structlog.get_logger("ceilingd.monitor")
        self._started = clock.wall()
        self._sequence = 0
        self._nvml: NvmlReading | None = None
        self._infos: dict[str, GpuInfo] = {}
        self._links: LinkReadings | None = None
        self._judgements: dict[str, LinkJudgement] = {}
        self._traffic: dict[str, _Traffic] = {}
        self._servers = {server_source_name(settings): _Server(settings) for settings in config.servers}
        self._gpu_settings = {key.lower(): settings for key, settings in config.gpus.items()}
        self._declared = Declared(
            config.ceiling.bandwidth_efficiency,
            config.ceiling.fixed_seconds,
            config.ceiling.allreduce_latency_seconds,
            {
                key: settings.memory_bandwidth_bytes_per_second
                for key, settings in self._gpu_settings.items()
                if settings.memory_bandwidth_bytes_per_second is not None
            },
        )
        self._judge_settings = JudgeSettings(
            config.links.grace_seconds,
            config.links.recovery_seconds,
            config.links.agreeing_samples,
            settled_monotonic_seconds,
        )

    # ------------------------------------------------------------------------------------------- readings come in

    def accept(self, source: str, reading: Any) -> None:
        """Take the newest reading of a source."""
        match reading:
            case NvmlReading():
                self._say_unreadable(reading)
                self._nvml = reading
                self._infos = {gpu.info.uuid: gpu.info for gpu in reading.gpus}
                self._map_gpus()
            case LinkReadings():
                self._links = reading
                self._judge(reading)
            case TrafficReadings():
                self._integrate(reading)
            case EngineReading():
                self._observe(self._servers[source], reading)
            case _:
                raise TypeError(f"{source} delivered a {type(reading).__name__}")

    def lose(self, source: str) -> None:
        """Drop what a source said: an old value never passes as a live one. Counters and judgements stay."""
        if source == "nvml":
            self._nvml = None
            self._infos = {}
            self._map_gpus()
        elif source == "nvml_links":
            self._links = None
        elif source == "nvml_traffic":
            for traffic in self._traffic.values():
                traffic.live = False
        elif source in self._servers:
            server = self._servers[source]
            server.reading, server.window, server.observations, server.moved = None, ObservationWindow(), (), False

    def _observe(self, server: _Server, reading: EngineReading) -> None:
        server.moved = server.reading is not None and tokens_moved(server.reading, reading)
        if server.moved:
            server.moved_monotonic_seconds = reading.monotonic_seconds
        server.window, server.observations, rejected = observe(server.window, reading)
        server.report_seconds = _report_seconds(reading, server.observations) or server.report_seconds
        for reason in rejected:
            server.rejected[reason] = server.rejected.get(reason, 0) + 1
        renamed = server.reading is None or server.reading.identity is not reading.identity
        server.reading = reading
        if renamed:
            self._map_gpus()

    def _map_gpus(self) -> None:
        """Which GPUs each server is on; to be told anew when either side changes."""
        for server in self._servers.values():
            identity = server.reading.identity if server.reading is not None else None
            server.gpus, server.gpus_assumed = server_gpus(
                server.settings.gpus, identity, self._infos.values(), is_local(server.settings.url)
            )

    def _judge(self, readings: LinkReadings) -> None:
        now = readings.monotonic_seconds
        moved, due = self._uuids_with_tokens(now)
        for reading in readings.links:
            info = self._infos.get(reading.uuid)
            if info is None:
                continue
            traffic = self._traffic.get(reading.uuid)
            rates = (
                ()
                if traffic is None or not traffic.live
                else (traffic.transmit_bytes_per_second, traffic.receive_bytes_per_second)
            )
            known = [rate for rate in rates if rate is not None]
            evidence = Evidence(
                tokens_moved=moved.get(reading.uuid),
                tokens_due=reading.uuid in due,
                traffic_bytes_per_second=sum(known) if known else None,
                power_limit_watts=info.power_limit_watts,
                sm_clock_max_hertz=info.sm_clock_max_hertz,
            )
            before = self._judgements.get(reading.uuid, LinkJudgement())
            expected = self._expected(info)
            after = advance(before, reading, expected, evidence, now, self._judge_settings)
            self._judgements[reading.uuid] = after
            self._say_degraded(info, expected, before, after)

    def _say_degraded(self, info: GpuInfo, expected: ExpectedLink, before: LinkJudgement, after: LinkJudgement) -> None:
        """The one fault that nothing else logs. Grace and recovery bound how often."""
        was, now = before.state == "degraded", after.state == "degraded"
        if was == now:
            return
        say = self._log.warning if now else self._log.info
        say(
            "link degraded" if now else "link no longer degraded",
            gpu=info.index,
            uuid=info.uuid,
            pci_bus_id=info.pci_bus_id,
            state=after.state,
            generation=after.generation,
            width_lanes=after.width_lanes,
            generation_expected=expected.generation,
            width_expected_lanes=expected.width_lanes,
        )

    def _say_unreadable(self, reading: NvmlReading) -> None:
        before = dict(self._nvml.unreadable) if self._nvml is not None else {}
        now = dict(reading.unreadable)
        for index in now.keys() - before.keys():
            self._log.warning("gpu unreadable", gpu=index, reason=now[index])
        for index in before.keys() - now.keys():
            self._log.info("gpu readable again", gpu=index)

    def _uuids_with_tokens(self, now: float) -> tuple[dict[str, bool], set[str]]:
        """Per GPU that some live server is mapped to: did tokens just move? And the GPUs whose next tokens are due."""
        fresh = min(TOKENS_FRESH_INTERVALS * self._config.sample_interval_seconds, TOKENS_FRESH_SECONDS_MAX)
        moved: dict[str, bool] = {}
        due: set[str] = set()
        for server in self._servers.values():
            reading = server.reading
            if reading is None:
                continue
            since = now - server.moved_monotonic_seconds
            running = any(rank.running_requests for rank in reading.ranks)
            for gpu in server.gpus:
                moved[gpu.uuid] = moved.get(gpu.uuid, False) or (server.moved and since <= fresh)
                if running and since <= REPORT_SLACK * server.report_seconds:
                    due.add(gpu.uuid)
        return moved, due

    def _integrate(self, readings: TrafficReadings) -> None:
        now = readings.monotonic_seconds
        for reading in readings.gpus:
            before = self._traffic.get(reading.uuid)
            after = _Traffic(now, reading.transmit_bytes_per_second, reading.receive_bytes_per_second)
            if before is not None:
                gap = now - before.sampled_monotonic_seconds
                seconds = gap if gap <= TRAFFIC_GAP_SECONDS else 0.0
                after.transmit_bytes_total = before.transmit_bytes_total + (reading.transmit_bytes_per_second or 0.0) * seconds
                after.receive_bytes_total = before.receive_bytes_total + (reading.receive_bytes_per_second or 0.0) * seconds
            self._traffic[reading.uuid] = after

    # ------------------------------------------------------------------------------------------- the snapshot

    def snapshot(
        self,
        health: Sequence[SourceHealth],
        *,
        event_loop_lag_seconds: float = 0.0,
        config_loaded_timestamp_seconds: float | None = None,
        process: tuple[ProcessSample, ...] = (),
    ) -> Snapshot:
        """Everything known now, judged and predicted."""
        self._sequence += 1
        self._drop_stale()
        by_name = {entry.name: entry for entry in health}
        links = self._link_statuses()
        nvml_health = by_name.get("nvml")
        return Snapshot(
            sequence=self._sequence,
            timestamp_seconds=self._clock.wall(),
            monotonic_seconds=self._clock.monotonic(),
            started_timestamp_seconds=self._started,
            demo=self._demo,
            nvml=NvmlStatus(
                nvml_health is not None and nvml_health.up and self._nvml is not None, self._nvml, self._stuck_seconds()
            ),
            links=links,
            servers=tuple(
                self._server_status(server, by_name[name], {link.uuid: link for link in links})
                for name, server in self._servers.items()
            ),
            sources=tuple(health),
            event_loop_lag_seconds=event_loop_lag_seconds,
            config_loaded_timestamp_seconds=config_loaded_timestamp_seconds,
            process=process,
        )

    def _drop_stale(self) -> None:
        """Lose what is too old. A source that hangs says nothing for as long as its time limit allows."""
        now = self._clock.monotonic()
        interval, link_interval = self._config.sample_interval_seconds, self._config.link_sample_interval_seconds
        patience = self._config.nvml_call_timeout_seconds
        if self._nvml is not None and now - self._nvml.monotonic_seconds > STALE_INTERVALS * interval + patience:
            self.lose("nvml")
        if self._links is not None and now - self._links.monotonic_seconds > STALE_INTERVALS * link_interval + patience:
            self.lose("nvml_links")
        patience = min(self._config.server_timeout_seconds, SCRAPE_SECONDS_MAX)
        for name, server in self._servers.items():
            reading = server.reading
            if reading is not None and now - reading.monotonic_seconds > STALE_INTERVALS * interval + patience:
                self.lose(name)

    def _link_statuses(self) -> tuple[LinkStatus, ...]:
        if self._links is None or self._nvml is None:
            return ()
        statuses = []
        for reading in self._links.links:
            info, judgement = self._infos.get(reading.uuid), self._judgements.get(reading.uuid)
            if info is None or judgement is None:
                continue
            expected = self._expected(info)
            traffic = self._traffic.get(reading.uuid)
            status = LinkStatus(
                index=info.index,
                uuid=info.uuid,
                state=judgement.state,
                generation=judgement.generation,
                width_lanes=judgement.width_lanes,
                generation_expected=expected.generation,
                width_expected_lanes=expected.width_lanes,
                working=judgement.working,
                transitions_total=judgement.transitions_total,
                degraded_seconds_total=judgement.degraded_seconds_total,
                busy_seconds=judgement.busy_seconds,
            )
            if traffic is not None and traffic.live:
                # A rate that the device does not have has no total either: 0 would read as "nothing moved".
                transmit, receive = traffic.transmit_bytes_per_second, traffic.receive_bytes_per_second
                status = replace(
                    status,
                    transmit_bytes_per_second=transmit,
                    receive_bytes_per_second=receive,
                    transmit_bytes_total=None if transmit is None else traffic.transmit_bytes_total,
                    receive_bytes_total=None if receive is None else traffic.receive_bytes_total,
                )
            statuses.append(status)
        return tuple(statuses)

    def _server_status(self, server: _Server, health: SourceHealth, links: Mapping[str, LinkStatus]) -> ServerStatus:
        reading = server.reading
        url = public_url(server.settings.url)
        if reading is None:
            # A server that hangs is not up, even while its source still waits for it.
            health = replace(health, up=False)
            return ServerStatus(server.settings.name, url, health, None, rejected_total=tuple(server.rejected.items()))
        gpus, assumed = server.gpus, server.gpus_assumed
        observations = {observation.dp_rank: observation for observation in server.observations}
        ranks = []
        for rank in reading.ranks:
            observation = observations.get(rank.dp_rank)
            ceiling = self._ceiling(
                server.settings, reading.identity, observation, _replica(gpus, rank.dp_rank), links, assumed
            )
            if server.judged is not reading and _above_ceiling(observation, ceiling):
                server.rejected["above_physical_ceiling"] = server.rejected.get("above_physical_ceiling", 0) + 1
            ranks.append(RankStatus(rank.dp_rank, rank, observation, ceiling))
        server.judged = reading
        named = {name: None for rank in ranks if isinstance(rank.ceiling, Ceiling) for name in rank.ceiling.assumed}
        named.update(dict.fromkeys(assumed))
        return ServerStatus(
            server.settings.name, url, health, reading, tuple(ranks), gpus, tuple(named), tuple(server.rejected.items())
        )

    def _ceiling(
        self,
        settings: ServerSettings,
        identity: EngineIdentity | None,
        observation: DecodeObservation | None,
        gpus: Sequence[ServerGpu],
        links: Mapping[str, LinkStatus],
        assumed: tuple[str, ...],
    ) -> Ceiling | NoCeiling:
        shapes = None
        if identity is not None and identity.complete:
            shapes = self._models.lookup(ModelPlace.of(settings.model_config_path, settings.draft_model_config_path, identity))
        placed = [
            (info, links.get(info.uuid), self._gpu_table.find(info.name))
            for info in (self._infos.get(gpu.uuid) for gpu in gpus)
            if info is not None
        ]
        inputs = ceiling_inputs(identity, shapes, observation, placed, self._declared, assumed, settings.gpus)
        if isinstance(inputs, NoCeiling):
            return inputs
        try:
            return predict(inputs)
        except ValueError as error:
            return NoCeiling("unsupported_deployment", str(error))

    def _expected(self, info: GpuInfo) -> ExpectedLink:
        declared = self._gpu_settings.get(info.uuid.lower()) or self._gpu_settings.get(info.pci_bus_id)
        return expected_link(
            info.link_generation_max_gpu,
            info.link_generation_max_system,
            info.link_width_max_lanes,
            declared.expected_generation if declared is not None else None,
            declared.expected_width if declared is not None else None,
        )


def _report_seconds(reading: EngineReading, observations: Sequence[DecodeObservation]) -> float | None:
    """Seconds between two reports of this engine at the rounds it runs; `None` while none was observed."""
    rounds = [observation.round_seconds for observation in observations if observation.round_seconds is not None]
    if not rounds:
        return None
    interval = reading.identity.decode_log_interval if reading.identity is not None else None
    steps = {"decode_moments": STEPS_PER_SNAPSHOT, "counters": 1, "gauges": interval or STEPS_PER_REPORT}
    return max(rounds) * steps[reading.decode_source]


def _above_ceiling(observation: DecodeObservation | None, ceiling: Ceiling | NoCeiling) -> bool:
    """Is the observed round shorter than the hardware allows? Then an input of the model is wrong about this server."""
    if isinstance(ceiling, NoCeiling) or observation is None or observation.round_seconds is None:
        return False
    return observation.round_seconds < ceiling.peak.seconds


def _replica(gpus: Sequence[ServerGpu], dp_rank: str) -> tuple[ServerGpu, ...]:
    """The GPUs of one DP rank: its own with plain data parallelism, all of them where ranks share (DP attention)."""
    own = tuple(gpu for gpu in gpus if gpu.dp_rank == dp_rank)
    shared = len({gpu.dp_rank for gpu in gpus}) == 1
    return own or (tuple(gpus) if shared else ())


def public_url(url: str) -> str:
    """Scheme, host, port and path: nothing that could be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def is_local(url: str) -> bool:
    """Does this URL name this host by a loopback address?"""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")
