"""The embedded demo: the founding deployment played in a loop, as Sources. Everything behind them is the production path.

Qwen3.6-27B in BF16 on two RTX A6000 (TP 2, PCIe Gen4 x16, no NVLink), MTP with 3 steps. What was measured there: a round of
55.4 ms, whatever the accept length (3.08, 3.33, 3.77, 3.98 gave 55, 60, 68, 72 tokens/s), Gen1 when idle, Gen4 under load.
Invented for the show: the timeline, the noise, and the 7 ms that a link stuck at Gen1 adds to a round (the model says at least
1.6 ms; pairs without NVLink are known to lose 10 to 25 %).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import structlog

from ceilingd.clock import Clock
from ceilingd.config import Config, ServerSettings
from ceilingd.parse.sglang import parse_loads
from ceilingd.records import (
    EngineIdentity,
    EngineReading,
    GpuInfo,
    GpuReading,
    LinkReading,
    LinkReadings,
    NvmlReading,
    TrafficReading,
    TrafficReadings,
)

SERVER_NAME = "qwen3.6-27b"
ROUND_SECONDS = 0.0554
STUCK_ROUND_SECONDS = 0.0624
ACCEPT_LENGTHS = (3.08, 3.33, 3.77, 3.98, 3.77, 3.33)
CONTENT_SECONDS = 12.0
"""How long the served content keeps one accept length."""
STEPS_PER_REPORT = 15
"""SGLang refreshes `/v1/loads` every so many decode steps."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the timeline, `seconds` long."""

    name: str
    seconds: float
    loaded: bool
    stuck: bool = False


TIMELINE = (
    Phase("load", 72, loaded=True),
    Phase("idle, links at Gen1", 26, loaded=False),
    Phase("load again", 36, loaded=True),
    Phase("GPU 1 stays at Gen1 under load", 52, loaded=True, stuck=True),
    Phase("recovered", 54, loaded=True),
)
CYCLE_SECONDS = sum(phase.seconds for phase in TIMELINE)


def phase_at(script_seconds: float) -> tuple[Phase, float]:
    """The phase at this time of the timeline, and how long it has been going on.

    >>> phase_at(0.0)[0].name, phase_at(72.0)[0].loaded, phase_at(CYCLE_SECONDS + 1.0)[1]
    ('load', False, 1.0)
    """
    left = script_seconds % CYCLE_SECONDS
    for phase in TIMELINE:
        if left < phase.seconds:
            return phase, left
        left -= phase.seconds
    return TIMELINE[-1], TIMELINE[-1].seconds


def accept_length_at(script_seconds: float) -> float:
    """What the content served at this time of the timeline accepts."""
    return ACCEPT_LENGTHS[int(script_seconds % CYCLE_SECONDS / CONTENT_SECONDS) % len(ACCEPT_LENGTHS)]


class Deployment:
    """The simulated machine: what is true now, and the engine's sums so far. `speed` compresses the timeline only."""

    def __init__(self, clock: Clock, speed: float = 1.0) -> None:
        self.clock = clock
        self._speed = speed
        self._started = self._advanced = clock.monotonic()
        self._steps = 46531.0
        self._seconds = self._steps * ROUND_SECONDS
        self._tokens = self._steps * ACCEPT_LENGTHS[0]
        self._reported = (self._steps, self._seconds, self._tokens)

    def script_seconds(self) -> float:
        return (self.clock.monotonic() - self._started) * self._speed

    def phase(self) -> tuple[Phase, float]:
        """The phase now and the real seconds since it began."""
        phase, since = phase_at(self.script_seconds())
        return phase, since / self._speed

    def seconds_of(self, phase: Phase) -> float:
        """Real seconds that a phase lasts."""
        return phase.seconds / self._speed

    def wave(self, period_seconds: float, index: int = 0) -> float:
        """-1 to 1, slowly: noise that a test can repeat."""
        return math.sin(2 * math.pi * self.clock.monotonic() / period_seconds + index)

    def sums(self) -> tuple[float, float, float]:
        """(steps, seconds in steps, tokens) as the engine last reported them."""
        now = self.clock.monotonic()
        phase, _ = self.phase()
        if phase.loaded:
            round_seconds = STUCK_ROUND_SECONDS if phase.stuck else ROUND_SECONDS
            steps = (now - self._advanced) / round_seconds
            self._steps += steps
            self._seconds += steps * round_seconds
            self._tokens += steps * accept_length_at(self.script_seconds())
            if self._steps - self._reported[0] >= STEPS_PER_REPORT:
                self._reported = (self._steps, self._seconds, self._tokens)
        self._advanced = now
        return self._reported


def _info(index: int) -> GpuInfo:
    return GpuInfo(
        index=index,
        uuid=f"GPU-de300000-0000-4000-8000-00000000000{index}",
        name="NVIDIA RTX A6000",
        pci_bus_id=("0000:41:00.0", "0000:81:00.0")[index],
        memory_bus_width_bits=384,
        memory_clock_max_hertz=8001e6,
        sm_clock_max_hertz=2100e6,
        link_generation_max_gpu=4,
        link_generation_max_system=4,
        link_width_max_lanes=16,
        power_limit_watts=300.0,
        nvlink_active_links=0,
    )


_INFOS = (_info(0), _info(1))
_SETTLE_SECONDS = 0.8
"""A GPU lowers its link about this long after the last work."""


class _DemoSource:
    """What the demo's sources have in common."""

    def __init__(self, deployment: Deployment, name: str, interval_seconds: float) -> None:
        self._deployment = deployment
        self.name = name
        self.interval_seconds = interval_seconds
        self.timeout_seconds = 5.0
        self.backoff_max_seconds = 5.0

    async def close(self) -> None:
        """Nothing to release."""


class DemoNvml(_DemoSource):
    """Two A6000 at the sample interval. Says in the log when the timeline enters another phase."""

    _said: Phase | None = None

    async def read(self) -> NvmlReading:
        deployment = self._deployment
        phase, _ = deployment.phase()
        if phase is not self._said:
            self._said = phase
            structlog.get_logger("ceilingd.demo").info("demo phase", phase=phase.name, seconds=deployment.seconds_of(phase))
        gpus = tuple(
            GpuReading(
                info=info,
                utilization_ratio=round(0.975 + 0.015 * deployment.wave(7, info.index), 2) if phase.loaded else 0.0,
                memory_utilization_ratio=round(0.80 + 0.03 * deployment.wave(9, info.index), 2) if phase.loaded else 0.0,
                memory_used_bytes=43_620_000_000,
                memory_total_bytes=51_527_024_640,
                memory_clock_hertz=8001e6 if phase.loaded else 405e6,
                sm_clock_hertz=1800e6 if phase.loaded else 210e6,
                power_watts=_power_watts(deployment, phase, info.index),
                power_limit_watts=info.power_limit_watts,
                temperature_celsius=round(71 + 3 * deployment.wave(45, info.index)) if phase.loaded else 44.0,
                performance_state=2 if phase.loaded else 8,
                clocks_event_reasons=() if phase.loaded else ("gpu_idle",),
                pcie_replays_total=0,
            )
            for info in _INFOS
        )
        return NvmlReading(deployment.clock.monotonic(), "demo", "demo", None, gpus)


class DemoLinks(_DemoSource):
    """Their links at the link sample interval."""

    async def read(self) -> LinkReadings:
        deployment = self._deployment
        phase, since = deployment.phase()
        links = tuple(
            LinkReading(
                index=info.index,
                uuid=info.uuid,
                generation=_generation(phase, since, info.index),
                width_lanes=16,
                utilization_ratio=0.98 if phase.loaded else 0.0,
                power_watts=_power_watts(deployment, phase, info.index),
                sm_clock_hertz=1800e6 if phase.loaded else 210e6,
                gpu_idle=not phase.loaded,
            )
            for info in _INFOS
        )
        return LinkReadings(deployment.clock.monotonic(), links)


class DemoTraffic(_DemoSource):
    """Their PCIe traffic: 129 all-reduces of 40 KB and four gathers of logits in a round."""

    async def read(self) -> TrafficReadings:
        deployment = self._deployment
        phase, _ = deployment.phase()
        round_seconds = STUCK_ROUND_SECONDS if phase.stuck else ROUND_SECONDS
        rate = 7.4e6 / round_seconds if phase.loaded else 2e5
        gpus = tuple(
            TrafficReading(info.index, info.uuid, rate * (1 + 0.05 * deployment.wave(5, info.index)), rate) for info in _INFOS
        )
        return TrafficReadings(deployment.clock.monotonic(), gpus)


class DemoServer(_DemoSource):
    """The SGLang server, by the `/v1/loads` body it would answer."""

    async def read(self) -> EngineReading:
        deployment = self._deployment
        body = json.dumps(self._loads()).encode()
        now = deployment.clock.monotonic()
        ranks = parse_loads(body).ranks
        return EngineReading(now, "decode_moments", _IDENTITY, ranks, len(body), 0.0)

    def _loads(self) -> dict[str, Any]:
        """A body as SGLang 0.5.23 makes it, with the fields that ceilingd reads."""
        phase, _ = self._deployment.phase()
        steps, seconds, tokens = self._deployment.sums()
        running = 1 if phase.loaded else 0
        context = 500 + int(tokens) % 1000 if phase.loaded else 0
        return {
            "version": _IDENTITY.version,
            "loads": [
                {
                    "timestamp": self._deployment.clock.wall(),
                    "dp_rank": 0,
                    "num_running_reqs": running,
                    "num_waiting_reqs": 0,
                    "num_used_tokens": context,
                    "num_active_tokens": context,
                    "max_total_num_tokens": 265420,
                    "token_usage": context / 265420,
                    "total_prefill_uncached_tokens": 388412,
                    "total_prefill_busy_us": 74123456,
                    "decode_moments": [steps, steps, seconds * 1e6, steps, seconds * 1e6, tokens],
                    "memory": {"weight_gb": 25.9, "kv_cache_gb": 12.4},
                }
            ],
        }


_IDENTITY = EngineIdentity(
    version="0.5.23",
    model_path="Qwen/Qwen3.6-27B",
    served_model_name="Qwen3.6-27B",
    model_type="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration",),
    tensor_parallel=2,
    pipeline_parallel=1,
    data_parallel=1,
    expert_parallel=1,
    node_count=1,
    base_gpu_id=0,
    gpu_id_step=1,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
    attention_backend="flashinfer",
    complete=True,
)


def _generation(phase: Phase, since: float, index: int) -> int:
    if phase.stuck and index == 1:
        return 1
    return 4 if phase.loaded or since < _SETTLE_SECONDS else 1


def _power_watts(deployment: Deployment, phase: Phase, index: int) -> float:
    return round(262 + 8 * deployment.wave(11, index), 1) if phase.loaded else round(22 + deployment.wave(17, index), 1)


def demo_config(config: Config) -> Config:
    """The configuration with the demo's server in place of any other, and nothing declared about GPUs."""
    model = Path(str(files("ceilingd") / "data" / "demo" / "qwen3.6-27b.json"))
    server = ServerSettings(url="http://demo.invalid:30000", name=SERVER_NAME, gpus=(0, 1), model_config_path=model)
    return config.model_copy(update={"servers": (server,), "gpus": {}})


def demo_sources(config: Config, clock: Clock, speed: float) -> tuple[DemoNvml | DemoLinks | DemoTraffic | DemoServer, ...]:
    """The demo's sources under the names of the real ones."""
    deployment = Deployment(clock, speed)
    interval = config.sample_interval_seconds
    return (
        DemoNvml(deployment, "nvml", interval),
        DemoLinks(deployment, "nvml_links", config.link_sample_interval_seconds),
        DemoTraffic(deployment, "nvml_traffic", interval),
        DemoServer(deployment, f"sglang/{SERVER_NAME}", interval),
    )
