"""NVML: GPUs, their links and their traffic as three sources over one library. The only import of pynvml.

Threads. Everything that is quick, and the life of the library (load, initialize, shut down), happens on one worker.
`nvmlDeviceGetPcieThroughput` blocks for a 21 ms window per direction and so has a second worker of its own. NVML's
calls are thread-safe, but its initialization must not change under a call: before the library is initialized again the
traffic worker is drained.

Costs, per call on an H200 with driver 580.159.04: 1 to 11 us for what the links are sampled with (31 us for the width);
0.2 ms for replays and bus width; 1.2 to 3.2 ms for the clock maxima, so these are asked once; 2.4 to 5 ms for energy.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ceilingd.parse import nvml as parse
from ceilingd.records import (
    GpuInfo,
    GpuReading,
    LinkReading,
    LinkReadings,
    NvmlReading,
    TrafficReading,
    TrafficReadings,
)
from ceilingd.sources import nvml_errors
from ceilingd.sources.source import SourceError
from ceilingd.sources.worker import CallStuckError, Worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from ceilingd.clock import Clock

Item = TypeVar("Item")
T = TypeVar("T")

NVML_BACKOFF_MAX_SECONDS = 60.0
FOLLOWER_BACKOFF_MAX_SECONDS = 1.0
"""Links and traffic only wait for the source `nvml`, which costs nothing: they are back a second after it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Query:
    """One question to a device: a function of pynvml and its arguments after the handle."""

    function: str
    arguments: tuple[int, ...] = ()
    otherwise: _Query | None = None
    """What to ask where the device or driver does not offer this."""


# Values of the enumerations in nvml.h.
_SM, _MEM = 1, 2  # nvmlClockType_t
_TRANSMIT, _RECEIVE = 0, 1  # nvmlPcieUtilCounter_t, as the GPU sees it
_GPU_SENSOR = 0  # nvmlTemperatureSensors_t
_MEMORY_VERSION_2 = 0x02000028  # nvmlMemory_v2: counts the driver's reserve apart, which version 1 takes for used memory
_NVLINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS

_NAME = _Query("nvmlDeviceGetName")
_VBIOS_VERSION = _Query("nvmlDeviceGetVbiosVersion")
_SERIAL = _Query("nvmlDeviceGetSerial")
_MEMORY_BUS_WIDTH = _Query("nvmlDeviceGetMemoryBusWidth")
_MEMORY_CLOCK_MAX = _Query("nvmlDeviceGetMaxClockInfo", (_MEM,))
_SM_CLOCK_MAX = _Query("nvmlDeviceGetMaxClockInfo", (_SM,))
_GENERATION_MAX_GPU = _Query("nvmlDeviceGetGpuMaxPcieLinkGeneration")
_GENERATION_MAX_SYSTEM = _Query("nvmlDeviceGetMaxPcieLinkGeneration")
_WIDTH_MAX = _Query("nvmlDeviceGetMaxPcieLinkWidth")
_POWER_LIMIT_DEFAULT = _Query("nvmlDeviceGetPowerManagementDefaultLimit")
_NVLINK_STATES = tuple(_Query("nvmlDeviceGetNvLinkState", (link,)) for link in range(_NVLINKS_MAX))

_UTILIZATION = _Query("nvmlDeviceGetUtilizationRates")
_MEMORY = _Query("nvmlDeviceGetMemoryInfo", (_MEMORY_VERSION_2,), otherwise=_Query("nvmlDeviceGetMemoryInfo"))
_MEMORY_CLOCK = _Query("nvmlDeviceGetClockInfo", (_MEM,))
_SM_CLOCK = _Query("nvmlDeviceGetClockInfo", (_SM,))
_POWER = _Query("nvmlDeviceGetPowerUsage")
_POWER_LIMIT = _Query("nvmlDeviceGetEnforcedPowerLimit")
_ENERGY = _Query("nvmlDeviceGetTotalEnergyConsumption")
# The names below without a "V" and with "Throttle" are those of older drivers; CUDA 14 removes them.
_TEMPERATURE = _Query("nvmlDeviceGetTemperatureV", (_GPU_SENSOR,), otherwise=_Query("nvmlDeviceGetTemperature", (_GPU_SENSOR,)))
_PERFORMANCE_STATE = _Query("nvmlDeviceGetPerformanceState")
_EVENT_REASONS = _Query("nvmlDeviceGetCurrentClocksEventReasons", otherwise=_Query("nvmlDeviceGetCurrentClocksThrottleReasons"))
_REPLAYS = _Query("nvmlDeviceGetPcieReplayCounter")

_GENERATION = _Query("nvmlDeviceGetCurrPcieLinkGeneration")
_WIDTH = _Query("nvmlDeviceGetCurrPcieLinkWidth")

_TRANSMIT_RATE = _Query("nvmlDeviceGetPcieThroughput", (_TRANSMIT,))
_RECEIVE_RATE = _Query("nvmlDeviceGetPcieThroughput", (_RECEIVE,))


@dataclass(slots=True, eq=False)
class _Device:
    """A GPU as long as it can be read: dropped when it is lost, made anew when it comes back."""

    index: int
    handle: Any
    info: GpuInfo
    not_offered: set[_Query] = field(default_factory=set)
    """Not asked again: what a device does not offer costs as much as what it does."""


@dataclass(slots=True, eq=False)
class _Session:
    """NVML from one initialization to the next."""

    driver_version: str
    nvml_version: str
    cuda_version: str | None
    gpu_count: int
    devices: tuple[_Device, ...] = ()
    """Those that could be read last time, in NVML index order."""


class _Conversation:
    """The questions of one reading of one device, asked on one worker."""

    __slots__ = ("_answered", "_handle", "_not_offered", "_pynvml", "_unknown", "_worker")

    def __init__(self, worker: Worker, pynvml: Any, handle: Any, not_offered: set[_Query]) -> None:
        self._worker = worker
        self._pynvml = pynvml
        self._handle = handle
        self._not_offered = not_offered
        self._answered = 0
        self._unknown = 0

    def ask(self, query: _Query) -> Any:
        """The raw answer; `None` where the device does not offer it or cannot tell now.

        Raises `pynvml.NVMLError` where the device or the library as a whole has failed."""
        if query in self._not_offered:
            return None if query.otherwise is None else self.ask(query.otherwise)
        try:
            answer = self._worker.call(getattr(self._pynvml, query.function), self._handle, *query.arguments)
        except self._pynvml.NVMLError as error:
            if error.value in nvml_errors.OF_THE_LIBRARY or error.value in nvml_errors.OF_THE_GPU:
                raise
            if error.value in nvml_errors.NOT_OFFERED:
                self._not_offered.add(query)
                return self.ask(query)
            self._unknown += error.value == nvml_errors.UNKNOWN
            return None
        except UnicodeDecodeError:
            return None
        self._answered += 1
        return answer

    def close(self) -> None:
        """Raise NVML's Unknown Error if that was the answer to most questions. A driver may give it to a single one for
        ever, which is no reason to give up the rest; after access to the devices was lost, some are still answered from
        what the library remembers, which is no reason to trust the rest."""
        if self._unknown > self._answered:
            raise self._pynvml.NVMLError(nvml_errors.UNKNOWN)


class NvmlSource(Generic[T]):
    """One of the three `Source`s of `Nvml`."""

    def __init__(
        self,
        name: str,
        *,
        interval_seconds: float,
        timeout_seconds: float,
        backoff_max_seconds: float,
        read: Callable[[], Awaitable[T]],
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.interval_seconds = interval_seconds
        self.timeout_seconds = timeout_seconds
        self.backoff_max_seconds = backoff_max_seconds
        self._read = read
        self._close = close

    async def read(self) -> T:
        """See `Nvml`. Raises `SourceError`; its reasons are those of `nvml_errors`."""
        return await self._read()

    async def close(self) -> None:
        """`nvml`: see `Nvml.close`. The others hold nothing of their own."""
        if self._close is not None:
            await self._close()


class Nvml:
    """The library, its devices and the sources that read them.

    `gpus` (`nvml`) initializes the library at its first read and again after it was lost. Without that, `links`
    (`nvml_links`) and `traffic` (`nvml_traffic`) fail with `nvml_not_initialized`; while it goes on, they wait for it.
    GPUs are known by UUID, which is read anew with each initialization: an index means nothing beyond one.

    `library`: the file to load as libnvidia-ml.so.1; `None` leaves it to the dynamic loader. `call_timeout_seconds`: the
    longest wait for one call. `procfs_root`: where driver/nvidia/version is found, for the message about a mismatch.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        library: Path | None = None,
        sample_interval_seconds: float = 1.0,
        link_sample_interval_seconds: float = 0.2,
        call_timeout_seconds: float = 2.0,
        procfs_root: Path = Path("/proc"),
    ) -> None:
        self._clock = clock
        self._library = library
        self._procfs_root = procfs_root
        self._quick = Worker("nvml", call_timeout_seconds=call_timeout_seconds, clock=clock)
        self._slow = Worker("nvml-traffic", call_timeout_seconds=call_timeout_seconds, clock=clock)
        self._pynvml: Any = None
        self._session: _Session | None = None
        self._initialized = False
        self._failed = False
        # A read is many calls, each within the limit; a whole read this slow is of no use as a sample.
        timeout_seconds = 2 * call_timeout_seconds
        self.gpus: NvmlSource[NvmlReading] = NvmlSource(
            "nvml",
            interval_seconds=sample_interval_seconds,
            timeout_seconds=timeout_seconds,
            backoff_max_seconds=NVML_BACKOFF_MAX_SECONDS,
            read=self._gpus,
            close=self.close,
        )
        self.links: NvmlSource[LinkReadings] = NvmlSource(
            "nvml_links",
            interval_seconds=link_sample_interval_seconds,
            timeout_seconds=timeout_seconds,
            backoff_max_seconds=FOLLOWER_BACKOFF_MAX_SECONDS,
            read=self._links,
        )
        self.traffic: NvmlSource[TrafficReadings] = NvmlSource(
            "nvml_traffic",
            interval_seconds=sample_interval_seconds,
            timeout_seconds=timeout_seconds,
            backoff_max_seconds=FOLLOWER_BACKOFF_MAX_SECONDS,
            read=self._traffic,
        )

    def stuck_seconds(self, now: float) -> float:
        """How long the call that has passed its limit has been running at the monotonic instant `now`; 0 when none has."""
        return max(self._quick.stuck_seconds(now), self._slow.stuck_seconds(now))

    async def close(self) -> None:
        """Shut the library down and end both threads; where a call is stuck, leave that to the end of the process.

        Takes at most three times the call limit; never raises. Nothing can be read from then on."""
        self._session = None
        initialized, self._initialized = self._initialized, False
        if await self._slow.close() and initialized:
            with suppress(CallStuckError):
                await self._quick.run(self._shut_down)
        await self._quick.close()

    # ------------------------------------------------------------------------------------- on the event loop

    async def _gpus(self) -> NvmlReading:
        try:
            if self._failed and self._initialized:
                await self._slow.drain()
            return await self._quick.run(self._read_gpus)
        except CallStuckError as stuck:
            raise nvml_errors.call_stuck(stuck.call, stuck.seconds) from None

    async def _links(self) -> LinkReadings:
        return await self._follow(self._quick, self._read_links)

    async def _traffic(self) -> TrafficReadings:
        return await self._follow(self._slow, self._read_traffic)

    async def _follow(self, worker: Worker, read: Callable[[_Session], T]) -> T:
        try:
            if self._session is None:
                await self._quick.drain()  # at the start `nvml` is just initializing: that is no failure
            session = self._session
            if session is None:
                raise nvml_errors.not_initialized()
            return await worker.run(lambda: self._explained(worker, lambda: read(session)))
        except CallStuckError as stuck:
            failure = nvml_errors.call_stuck(stuck.call, stuck.seconds)
        except SourceError as error:
            failure = error
        # What fails here fails the source `nvml` too, and that one says it; but a call stuck on the slow worker is ours.
        ours = failure.reason == nvml_errors.CALL_STUCK and worker is self._slow
        raise SourceError(failure.reason, str(failure), consequence=not ours)

    # ------------------------------------------------------------------------------------- on the workers

    def _explained(self, worker: Worker, read: Callable[[], T]) -> T:
        """What `read` gives, run on `worker`; NVML's errors turned into ours."""
        try:
            return read()
        except self._pynvml.NVMLError as error:
            if error.value == nvml_errors.VERSION_MISMATCH:
                failure = nvml_errors.version_mismatch(self._kernel_driver_version(), self._library_version(worker))
            else:
                failure = nvml_errors.failure(error.value, str(error))
        raise failure

    def _read_each(
        self, items: Iterable[Item], read: Callable[[Item], T]
    ) -> tuple[tuple[T, ...], tuple[tuple[Item, str], ...]]:
        """Of each item its reading, or the reason why there is none.

        Raises `pynvml.NVMLError` where the library has failed: by the code, or because all items give Unknown Error."""
        readings: list[T] = []
        unreadable: list[tuple[Item, str]] = []
        unknown = nvml_errors.reason(nvml_errors.UNKNOWN)
        for item in items:
            try:
                readings.append(read(item))
            except self._pynvml.NVMLError as error:
                if error.value in nvml_errors.OF_THE_LIBRARY:
                    raise
                unreadable.append((item, nvml_errors.reason(error.value)))
            except ValueError:  # a UUID that is no text, a bus id that is none
                unreadable.append((item, nvml_errors.INVALID_IDENTITY))
        if unreadable and not readings and all(reason == unknown for _, reason in unreadable):
            raise self._pynvml.NVMLError(nvml_errors.UNKNOWN)
        return tuple(readings), tuple(unreadable)

    def _read_gpus(self) -> NvmlReading:
        self._load()
        try:
            return self._explained(self._quick, lambda: self._read_session(self._session or self._open()))
        except SourceError:
            self._session = None
            self._failed = True
            raise

    def _read_session(self, session: _Session) -> NvmlReading:
        now = self._clock.monotonic()
        before = {device.index: device for device in session.devices}
        devices: list[_Device] = []

        def read(index: int) -> GpuReading:
            device = before.get(index) or self._open_device(index)
            reading = self._read_gpu(device)
            devices.append(device)
            return reading

        gpus, unreadable = self._read_each(range(session.gpu_count), read)
        session.devices = tuple(devices)
        self._session = session
        return NvmlReading(now, session.driver_version, session.nvml_version, session.cuda_version, gpus, unreadable)

    def _read_gpu(self, device: _Device) -> GpuReading:
        conversation = _Conversation(self._quick, self._pynvml, device.handle, device.not_offered)
        ask = conversation.ask
        utilization = ask(_UTILIZATION)
        memory = ask(_MEMORY)
        reading = GpuReading(
            info=device.info,
            utilization_ratio=utilization and parse.percent_to_ratio(utilization.gpu),
            memory_utilization_ratio=utilization and parse.percent_to_ratio(utilization.memory),
            memory_used_bytes=memory and parse.known(memory.used),
            memory_total_bytes=memory and parse.positive(memory.total),
            memory_clock_hertz=parse.megahertz_to_hertz(ask(_MEMORY_CLOCK)),
            sm_clock_hertz=parse.megahertz_to_hertz(ask(_SM_CLOCK)),
            power_watts=parse.milliwatts_to_watts(ask(_POWER)),
            power_limit_watts=parse.power_limit_watts(ask(_POWER_LIMIT)),
            energy_joules=parse.millijoules_to_joules(ask(_ENERGY)),
            temperature_celsius=parse.celsius(ask(_TEMPERATURE)),
            performance_state=parse.performance_state(ask(_PERFORMANCE_STATE)),
            clocks_event_reasons=parse.clocks_event_reasons(ask(_EVENT_REASONS)),
            pcie_replays_total=parse.known(ask(_REPLAYS)),
        )
        conversation.close()
        return reading

    def _read_links(self, session: _Session) -> LinkReadings:
        now = self._clock.monotonic()
        links, _ = self._read_each(session.devices, self._read_link)
        return LinkReadings(now, links)

    def _read_link(self, device: _Device) -> LinkReading:
        conversation = _Conversation(self._quick, self._pynvml, device.handle, device.not_offered)
        ask = conversation.ask
        utilization = ask(_UTILIZATION)
        reading = LinkReading(
            index=device.index,
            uuid=device.info.uuid,
            generation=parse.link_generation(ask(_GENERATION)),
            width_lanes=parse.link_width_lanes(ask(_WIDTH)),
            utilization_ratio=utilization and parse.percent_to_ratio(utilization.gpu),
            power_watts=parse.milliwatts_to_watts(ask(_POWER)),
            sm_clock_hertz=parse.megahertz_to_hertz(ask(_SM_CLOCK)),
            gpu_idle=parse.gpu_idle(ask(_EVENT_REASONS)),
        )
        conversation.close()
        return reading

    def _read_traffic(self, session: _Session) -> TrafficReadings:
        now = self._clock.monotonic()
        gpus, _ = self._read_each(session.devices, lambda device: self._read_gpu_traffic(session, device))
        return TrafficReadings(now, gpus)

    def _read_gpu_traffic(self, session: _Session, device: _Device) -> TrafficReading:
        if self._session is not session:
            raise nvml_errors.not_initialized()
        conversation = _Conversation(self._slow, self._pynvml, device.handle, device.not_offered)
        reading = TrafficReading(
            index=device.index,
            uuid=device.info.uuid,
            transmit_bytes_per_second=parse.traffic_bytes_per_second(conversation.ask(_TRANSMIT_RATE)),
            receive_bytes_per_second=parse.traffic_bytes_per_second(conversation.ask(_RECEIVE_RATE)),
        )
        conversation.close()
        return reading

    # ------------------------------------------------------------------------------------- the library's life

    def _load(self) -> None:
        """Import pynvml (0.1 s, so not with the program) and load the library that the settings name."""
        if self._pynvml is not None:
            return
        if self._library is not None:
            # pynvml asks for libnvidia-ml.so.1; the dynamic loader then takes what is loaded under that SONAME.
            try:
                self._quick.call(_load_library, self._library)
            except OSError as error:
                raise nvml_errors.library_unusable(self._library, str(error)) from None
        self._pynvml = importlib.import_module("pynvml")

    def _open(self) -> _Session:
        """Initialize the library, unless an earlier call that took too long to wait for has done so in the end."""
        call, pynvml = self._quick.call, self._pynvml
        if self._failed and self._initialized:
            with suppress(pynvml.NVMLError):
                call(pynvml.nvmlShutdown)
            self._initialized = False
        self._failed = False
        if not self._initialized:
            call(pynvml.nvmlInit)
            self._initialized = True
        try:
            cuda_version = parse.cuda_version(call(pynvml.nvmlSystemGetCudaDriverVersion_v2))
        except pynvml.NVMLError as error:
            if error.value in nvml_errors.OF_THE_LIBRARY:
                raise
            cuda_version = None
        return _Session(
            driver_version=call(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=call(pynvml.nvmlSystemGetNVMLVersion),
            cuda_version=cuda_version,
            gpu_count=call(pynvml.nvmlDeviceGetCount),
        )

    def _open_device(self, index: int) -> _Device:
        call, pynvml = self._quick.call, self._pynvml
        handle = call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = call(pynvml.nvmlDeviceGetUUID, handle)
        bus_id = call(pynvml.nvmlDeviceGetPciInfo, handle).busId
        not_offered: set[_Query] = set()
        conversation = _Conversation(self._quick, pynvml, handle, not_offered)
        ask = conversation.ask
        info = GpuInfo(
            index=index,
            uuid=uuid,
            name=ask(_NAME) or "",
            pci_bus_id=parse.pci_bus_id(bus_id),
            vbios_version=ask(_VBIOS_VERSION),
            serial=ask(_SERIAL),
            memory_bus_width_bits=parse.positive(ask(_MEMORY_BUS_WIDTH)),
            memory_clock_max_hertz=parse.megahertz_to_hertz(ask(_MEMORY_CLOCK_MAX)),
            sm_clock_max_hertz=parse.megahertz_to_hertz(ask(_SM_CLOCK_MAX)),
            link_generation_max_gpu=parse.link_generation(ask(_GENERATION_MAX_GPU)),
            link_generation_max_system=parse.link_generation(ask(_GENERATION_MAX_SYSTEM)),
            link_width_max_lanes=parse.link_width_lanes(ask(_WIDTH_MAX)),
            power_limit_watts=parse.power_limit_watts(ask(_POWER_LIMIT_DEFAULT)),
            nvlink_active_links=_active_nvlinks(ask),
        )
        conversation.close()
        return _Device(index, handle, info, not_offered)

    def _shut_down(self) -> None:
        with suppress(self._pynvml.NVMLError):
            self._quick.call(self._pynvml.nvmlShutdown)

    def _kernel_driver_version(self) -> str | None:
        try:
            text = (self._procfs_root / "driver/nvidia/version").read_text(errors="replace")
        except OSError:
            return None
        return parse.driver_version_of_kernel(text)

    def _library_version(self, worker: Worker) -> str | None:
        try:
            version: str = worker.call(self._pynvml.nvmlSystemGetNVMLVersion)  # works without initialization
        except self._pynvml.NVMLError:
            return None
        return version


def _load_library(path: Path) -> None:
    ctypes.CDLL(str(path))


def _active_nvlinks(ask: Callable[[_Query], Any]) -> int | None:
    """Links that are up. A device answers for the links that it has, from 0; `None` where it does not for the first."""
    active: int | None = None
    for query in _NVLINK_STATES:
        state = ask(query)
        if state is None:
            break
        active = (active or 0) + (state == 1)
    return active
