"""What the three NVML sources read, through nvidia-ml-py, from hardware that answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ceilingd.records import GpuInfo, GpuReading, LinkReading, TrafficReading
from support.fake_nvml import TWO_A6000
from support.nvml import nvml_on

if TYPE_CHECKING:
    from support.fake_nvml import FakeNvml

H200_SURVEY = json.loads((Path(__file__).parents[1] / "data/h200/nvml_survey.json").read_text())

A6000_INFO = GpuInfo(
    index=0,
    uuid="GPU-a6000000-0000-4000-8000-000000000000",
    name="NVIDIA RTX A6000",
    pci_bus_id="0000:41:00.0",
    vbios_version="94.02.5C.00.02",
    serial="1320000000001",
    memory_bus_width_bits=384,
    memory_clock_max_hertz=8.001e9,
    sm_clock_max_hertz=2.1e9,
    link_generation_max_gpu=4,
    link_generation_max_system=4,
    link_width_max_lanes=16,
    power_limit_watts=300.0,
    nvlink_active_links=0,
)
A6000_READING = GpuReading(
    info=A6000_INFO,
    utilization_ratio=0.97,
    memory_utilization_ratio=0.88,
    memory_used_bytes=48318382080,
    memory_total_bytes=51527024640,
    memory_clock_hertz=8.001e9,
    sm_clock_hertz=1.8e9,
    power_watts=272.345,
    power_limit_watts=300.0,
    energy_joules=123456.789,
    temperature_celsius=71.0,
    performance_state=2,
    clocks_event_reasons=("sw_power_cap",),
    pcie_replays_total=3,
)
A6000_LINK = LinkReading(
    index=0,
    uuid=A6000_INFO.uuid,
    generation=4,
    width_lanes=16,
    utilization_ratio=0.97,
    power_watts=272.345,
    sm_clock_hertz=1.8e9,
    gpu_idle=False,
)
A6000_TRAFFIC = TrafficReading(index=0, uuid=A6000_INFO.uuid, transmit_bytes_per_second=45e6, receive_bytes_per_second=52e6)
SECOND: dict[str, Any] = {"index": 1, "uuid": "GPU-a6000000-0000-4000-8000-000000000001"}

STATIC_FUNCTIONS = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetGpuMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetHandleByIndex_v2",
)


async def test_two_a6000_are_read_in_full(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
        links = await nvml.links.read()
        traffic = await nvml.traffic.read()
    assert (reading.driver_version, reading.nvml_version, reading.cuda_version) == ("575.57.08", "12.575.57.08", "12.9")
    second_info = replace(A6000_INFO, **SECOND, pci_bus_id="0000:c1:00.0", serial="1320000000002")
    assert reading.gpus == (A6000_READING, replace(A6000_READING, info=second_info))
    assert reading.unreadable == ()
    assert links.links == (A6000_LINK, replace(A6000_LINK, **SECOND))
    assert traffic.gpus == (A6000_TRAFFIC, replace(A6000_TRAFFIC, **SECOND))
    assert reading.monotonic_seconds <= links.monotonic_seconds <= traffic.monotonic_seconds
    assert A6000_INFO.memory_bandwidth_max_bytes_per_second == pytest.approx(768e9, rel=1e-3)


async def test_readings_are_live(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        fake_nvml.update({"0.pcie.gen": 1, "0.power.mw": 22000, "0.util.gpu": 0, "0.throttle": 0x1, "0.pcie.tx_kbps": 7})
        [first, second] = (await nvml.links.read()).links
        traffic = (await nvml.traffic.read()).gpus[0]
        gpu = (await nvml.gpus.read()).gpus[0]
    assert first == replace(A6000_LINK, generation=1, power_watts=22.0, utilization_ratio=0.0, gpu_idle=True)
    assert second == replace(A6000_LINK, **SECOND)
    assert traffic.transmit_bytes_per_second == 7000.0
    assert (gpu.power_watts, gpu.clocks_event_reasons) == (22.0, ("gpu_idle",))


@pytest.mark.parametrize("phase", ["idle_no_context", "load_matmul", "load_d2h_pinned"])
async def test_a_real_h200_is_read_as_its_survey_says(fake_nvml: FakeNvml, phase: str) -> None:
    said = {name: call.get("value") for name, call in H200_SURVEY[phase].items()}
    fake_nvml.set(
        {
            "count": 1,
            "sys.driver": said["nvmlSystemGetDriverVersion"],
            "sys.nvml": said["nvmlSystemGetNVMLVersion"],
            "0.name": said["nvmlDeviceGetName"],
            "0.uuid": said["nvmlDeviceGetUUID"],
            "0.serial": said["nvmlDeviceGetSerial"],
            "0.vbios": said["nvmlDeviceGetVbiosVersion"],
            "0.bus_id": said["nvmlDeviceGetPciInfo"]["busId"],
            "0.mem.bus_width": said["nvmlDeviceGetMemoryBusWidth"],
            "0.mem.total": said["nvmlDeviceGetMemoryInfo_v2"]["total"],
            "0.mem.used": said["nvmlDeviceGetMemoryInfo_v2"]["used"],
            "0.mem.reserved": said["nvmlDeviceGetMemoryInfo_v2"]["reserved"],
            "0.clock.mem": said["nvmlDeviceGetClockInfo_MEM"],
            "0.clock.mem.max": said["nvmlDeviceGetMaxClockInfo_MEM"],
            "0.clock.sm": said["nvmlDeviceGetClockInfo_SM"],
            "0.clock.sm.max": said["nvmlDeviceGetMaxClockInfo_SM"],
            "0.pcie.gen": said["nvmlDeviceGetCurrPcieLinkGeneration"],
            "0.pcie.gen.max": said["nvmlDeviceGetMaxPcieLinkGeneration"],
            "0.pcie.gen.device_max": said["nvmlDeviceGetGpuMaxPcieLinkGeneration"],
            "0.pcie.width": said["nvmlDeviceGetCurrPcieLinkWidth"],
            "0.pcie.width.max": said["nvmlDeviceGetMaxPcieLinkWidth"],
            "0.pcie.tx_kbps": said["nvmlDeviceGetPcieThroughput_TX"],
            "0.pcie.rx_kbps": said["nvmlDeviceGetPcieThroughput_RX"],
            "0.pcie.replays": said["nvmlDeviceGetPcieReplayCounter"],
            "0.util.gpu": said["nvmlDeviceGetUtilizationRates"]["gpu"],
            "0.util.memory": said["nvmlDeviceGetUtilizationRates"]["memory"],
            "0.power.mw": said["nvmlDeviceGetPowerUsage"],
            "0.power.limit_mw": said["nvmlDeviceGetEnforcedPowerLimit"],
            "0.energy.mj": said["nvmlDeviceGetTotalEnergyConsumption"],
            "0.temp": said["nvmlDeviceGetTemperatureV"],
            "0.pstate": said["nvmlDeviceGetPerformanceState"],
            "0.throttle": said["nvmlDeviceGetCurrentClocksEventReasons"],
            # NvLinkState said NOT_SUPPORTED in that guest, as the fake does where no links are described.
        }
    )
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
        [link] = (await nvml.links.read()).links
        [traffic] = (await nvml.traffic.read()).gpus
    expected = {
        "idle_no_context": (0.0, 0.0, 0, 345e6, 78.838, 37.0, ("gpu_idle",), 696e3, 663e3),
        "load_matmul": (0.99, 0.25, 1267531776, 1530e6, 689.589, 60.0, ("sw_power_cap",), 7265e3, 17168e3),
        "load_d2h_pinned": (0.98, 0.02, 9605808128, 1980e6, 135.976, 40.0, (), 58598598e3, 484e3),
    }[phase]
    [gpu] = reading.gpus
    assert (
        gpu.utilization_ratio,
        gpu.memory_utilization_ratio,
        gpu.memory_used_bytes,
        gpu.sm_clock_hertz,
        gpu.power_watts,
        gpu.temperature_celsius,
        gpu.clocks_event_reasons,
        traffic.transmit_bytes_per_second,
        traffic.receive_bytes_per_second,
    ) == expected
    assert (link.generation, link.width_lanes, link.gpu_idle) == (5, 16, phase == "idle_no_context")
    assert (reading.driver_version, reading.nvml_version) == ("580.159.04", "13.580.159.04")
    assert gpu.info == GpuInfo(
        index=0,
        uuid="GPU-00000000-1111-2222-3333-444444444444",
        name="NVIDIA H200",
        pci_bus_id="0000:00:06.0",
        vbios_version="96.00.A5.00.1A",
        serial="1650000000000",
        memory_bus_width_bits=6016,
        memory_clock_max_hertz=3201e6,
        sm_clock_max_hertz=1980e6,
        link_generation_max_gpu=5,
        link_generation_max_system=5,
        link_width_max_lanes=16,
        power_limit_watts=700.0,
        nvlink_active_links=None,
    )
    assert gpu.info.memory_bandwidth_max_bytes_per_second == pytest.approx(4814e9, rel=1e-3)


@pytest.mark.parametrize(("active", "expected"), [(18, 18), (17, 17), (0, 0)])
async def test_nvlinks_that_are_up_are_counted(fake_nvml: FakeNvml, active: int, expected: int) -> None:
    fake_nvml.set({"count": 1, "0.nvlink.count": 18, "0.nvlink.active": active})
    async with nvml_on(fake_nvml) as nvml:
        assert (await nvml.gpus.read()).gpus[0].info.nvlink_active_links == expected


OPTIONAL_CALLS = {
    "nvmlDeviceGetUtilizationRates": ("utilization_ratio", "memory_utilization_ratio"),
    "nvmlDeviceGetClockInfo": ("memory_clock_hertz", "sm_clock_hertz"),
    "nvmlDeviceGetPowerUsage": ("power_watts",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_watts",),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy_joules",),
    "nvmlDeviceGetPerformanceState": ("performance_state",),
    "nvmlDeviceGetPcieReplayCounter": ("pcie_replays_total",),
}


@pytest.mark.parametrize("code", [3, 4, 13], ids=["not_supported", "no_permission", "function_not_found"])
@pytest.mark.parametrize("function", OPTIONAL_CALLS)
async def test_what_a_device_does_not_offer_is_absent_and_not_asked_again(
    fake_nvml: FakeNvml, function: str, code: int
) -> None:
    fake_nvml.set({**TWO_A6000, f"0.{function}.error": code})
    async with nvml_on(fake_nvml) as nvml:
        first = await nvml.gpus.read()
        fake_nvml.clear_calls()
        again = await nvml.gpus.read()
        asked = {call.target for call in fake_nvml.calls(function)}
    missing = OPTIONAL_CALLS[function]
    absent: dict[str, Any] = dict.fromkeys(missing)
    assert first.gpus[0] == again.gpus[0] == replace(A6000_READING, **absent)
    assert [getattr(again.gpus[1], name) for name in missing] == [getattr(A6000_READING, name) for name in missing]
    assert asked == {"1"}


async def test_a_call_that_fails_once_is_asked_again(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetPowerUsage.error": 10})
    async with nvml_on(fake_nvml) as nvml:
        assert (await nvml.gpus.read()).gpus[0] == replace(A6000_READING, power_watts=None)
        fake_nvml.update({"0.nvmlDeviceGetPowerUsage.error": None})
        assert (await nvml.gpus.read()).gpus[0] == A6000_READING


async def test_one_call_that_always_gives_unknown_error_costs_only_its_own_value(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "*.nvmlDeviceGetTotalEnergyConsumption.error": 999})
    async with nvml_on(fake_nvml) as nvml:
        for _ in range(2):
            assert (await nvml.gpus.read()).gpus[0] == replace(A6000_READING, energy_joules=None)
    assert len(fake_nvml.calls("nvmlInitWithFlags")) == 1


async def test_older_drivers_are_asked_by_the_older_names(fake_nvml: FakeNvml) -> None:
    newer = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV")
    fake_nvml.set({**TWO_A6000, **{f"*.{function}.error": 13 for function in newer}})
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        fake_nvml.clear_calls()
        gpu = (await nvml.gpus.read()).gpus[0]
        link = (await nvml.links.read()).links[0]
        asked = {call.function for call in fake_nvml.calls()}
    # Version 1 of the memory call has no way to tell the driver's reserve from used memory.
    assert gpu == replace(A6000_READING, memory_used_bytes=48318382080 + 459276288)
    assert link == A6000_LINK
    assert not asked & set(newer)


PLACEHOLDERS = {
    "*.pcie.gen": 0,
    "*.pcie.gen.max": 9,
    "*.pcie.gen.device_max": 0,
    "*.pcie.width": 3,
    "*.pcie.width.max": 0,
    "*.pcie.tx_kbps": 0xFFFFFFFF,
    "*.pcie.rx_kbps": 0xFFFFFFFF,
    "*.pcie.replays": 0xFFFFFFFF,
    "*.mem.used": 0xFFFFFFFFFFFFFFFF,
    "*.mem.total": 0xFFFFFFFFFFFFFFFF,
    "*.mem.bus_width": 0,
    "*.clock.mem": 0xFFFFFFFF,
    "*.clock.mem.max": 0,
    "*.clock.sm": 0,
    "*.clock.sm.max": 0xFFFFFFFF,
    "*.power.mw": 0xFFFFFFFF,
    "*.power.limit_mw": 0,
    "*.power.limit_default_mw": 0xFFFFFFFF,
    "*.energy.mj": 0xFFFFFFFFFFFFFFFF,
    "*.pstate": 32,
    "*.util.gpu": 0xFFFFFFFF,
    "*.util.memory": 101,
    "*.throttle": 0xFFFFFFFFFFFFFFFF,
}


async def test_placeholders_are_absent(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, **PLACEHOLDERS})
    async with nvml_on(fake_nvml) as nvml:
        gpu = (await nvml.gpus.read()).gpus[0]
        link = (await nvml.links.read()).links[0]
        traffic = (await nvml.traffic.read()).gpus[0]

    def present(record: object) -> set[str]:
        return {field.name for field in fields(record) if getattr(record, field.name) is not None}  # type: ignore[arg-type]

    assert present(gpu) == {"info", "temperature_celsius"}
    assert present(gpu.info) == {
        "index", "uuid", "name", "pci_bus_id", "vbios_version", "serial", "nvlink_active_links",
    }  # fmt: skip
    assert present(link) == {"index", "uuid"}
    assert present(traffic) == {"index", "uuid"}


async def test_what_does_not_change_is_asked_once(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        for _ in range(3):
            await nvml.gpus.read()
            await nvml.links.read()
            await nvml.traffic.read()
        asked = Counter((call.function, call.target) for call in fake_nvml.calls())
    for function in STATIC_FUNCTIONS[:-1]:
        assert (asked[function, "0"], asked[function, "1"]) == (1, 1), function
    assert asked["nvmlDeviceGetHandleByIndex_v2", "sys"] == 2
    assert asked["nvmlDeviceGetMaxClockInfo", "0"] == 2  # memory and SM
    assert asked["nvmlInitWithFlags", "sys"] == 1


async def test_a_link_sample_is_six_cheap_calls_a_gpu(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        fake_nvml.clear_calls()
        await nvml.links.read()
        asked = Counter(call.function for call in fake_nvml.calls())
    assert asked == {
        "nvmlDeviceGetCurrPcieLinkGeneration": 2,
        "nvmlDeviceGetCurrPcieLinkWidth": 2,
        "nvmlDeviceGetUtilizationRates": 2,
        "nvmlDeviceGetPowerUsage": 2,
        "nvmlDeviceGetClockInfo": 2,
        "nvmlDeviceGetCurrentClocksEventReasons": 2,
    }


async def test_slow_traffic_has_a_thread_of_its_own(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "*.nvmlDeviceGetPcieThroughput.hang": 1})
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        traffic = asyncio.create_task(nvml.traffic.read())
        for _ in range(3):  # would wait for the traffic for ever on one thread
            assert len((await nvml.links.read()).links) == 2
        assert not traffic.done()
        fake_nvml.update({"*.nvmlDeviceGetPcieThroughput.hang": None})
        assert len((await traffic).gpus) == 2
        threads: dict[bool, set[int]] = {True: set(), False: set()}
        for call in fake_nvml.calls():
            threads[call.function == "nvmlDeviceGetPcieThroughput"].add(call.thread)
    assert len(threads[True]) == len(threads[False]) == 1
    assert threads[True] != threads[False]


async def test_a_host_without_gpus_is_an_empty_reading(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({"count": 0})
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
        assert (reading.gpus, reading.unreadable) == ((), ())
        assert (await nvml.links.read()).links == ()
        assert (await nvml.traffic.read()).gpus == ()


async def test_closing_shuts_the_library_down(fake_nvml: FakeNvml) -> None:
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        await nvml.links.close()
        await nvml.traffic.close()
        assert fake_nvml.calls("nvmlShutdown") == []
        await nvml.gpus.close()
        assert [call.result for call in fake_nvml.calls("nvmlShutdown")] == [0]
    assert len(fake_nvml.calls("nvmlShutdown")) == 1
