"""NVML that does not work, as a whole or for one GPU: what is said, what still reads, and how it comes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ceilingd.clock import SystemClock
from ceilingd.sources.nvml import Nvml
from ceilingd.sources.source import SourceError
from support.fake_nvml import TWO_A6000
from support.nvml import nvml_on

if TYPE_CHECKING:
    from pathlib import Path

    from ceilingd.sources.nvml import NvmlSource
    from support.fake_nvml import FakeNvml

FIRST, SECOND = str(TWO_A6000["0.uuid"]), str(TWO_A6000["1.uuid"])


async def failure(source: NvmlSource[Any]) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await source.read()
    return caught.value


async def uuids(nvml: Nvml) -> list[list[str]]:
    """UUIDs that each of the three sources reads."""
    return [
        [gpu.info.uuid for gpu in (await nvml.gpus.read()).gpus],
        [link.uuid for link in (await nvml.links.read()).links],
        [gpu.uuid for gpu in (await nvml.traffic.read()).gpus],
    ]


LIBRARY_FAILURES = [
    (1, "nvml_not_initialized", "initialized again"),
    (4, "nvml_no_permission", "give the user read and write access to /dev/nvidiactl"),
    (9, "nvml_driver_not_loaded", "run `modprobe nvidia`"),
    (12, "nvml_library_not_found", "install the NVIDIA driver"),
    (18, "nvml_version_mismatch", "reboot or reload the driver"),
    (20, "nvml_error", "NVML failed with error 20 (Insufficient Memory)"),
    (999, "nvml_unknown_error", "restart the container"),
    (15, "nvml_gpu_lost", "look for Xid 79 in dmesg"),
    (16, "nvml_reset_required", "nvidia-smi -r"),
]


@pytest.mark.parametrize(("code", "reason", "cure"), LIBRARY_FAILURES)
async def test_a_failing_initialization_is_named_with_its_cure_and_tried_again(
    fake_nvml: FakeNvml, code: int, reason: str, cure: str
) -> None:
    fake_nvml.set({**TWO_A6000, "sys.nvmlInitWithFlags.error": code})
    async with nvml_on(fake_nvml) as nvml:
        for _ in range(2):
            error = await failure(nvml.gpus)
            assert error.reason == reason
            assert cure in str(error)
            assert (await failure(nvml.links)).reason == "nvml_not_initialized"
            assert (await failure(nvml.traffic)).reason == "nvml_not_initialized"
        assert len(fake_nvml.calls("nvmlInitWithFlags")) == 2
        assert fake_nvml.calls("nvmlShutdown") == []
        fake_nvml.set(TWO_A6000)
        assert await uuids(nvml) == [[FIRST, SECOND]] * 3


@pytest.mark.parametrize(("code", "reason"), [(1, "nvml_not_initialized"), (9, "nvml_driver_not_loaded"),
                                              (18, "nvml_version_mismatch"), (999, "nvml_unknown_error")])  # fmt: skip
async def test_a_library_that_fails_while_running_is_shut_down_and_initialized_again(
    fake_nvml: FakeNvml, code: int, reason: str
) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        fake_nvml.update({"*.*.error": code, "sys.*.error": code})
        assert (await failure(nvml.links)).reason == reason
        assert (await failure(nvml.traffic)).reason == reason
        assert (await failure(nvml.gpus)).reason == reason
        assert (await failure(nvml.links)).reason == "nvml_not_initialized"
        assert (await failure(nvml.traffic)).reason == "nvml_not_initialized"
        assert (await failure(nvml.gpus)).reason == reason
        fake_nvml.set(TWO_A6000)
        fake_nvml.clear_calls()
        assert await uuids(nvml) == [[FIRST, SECOND]] * 3
        functions = [call.function for call in fake_nvml.calls()]
    assert "nvmlInitWithFlags" in functions


async def test_after_unknown_error_the_library_is_shut_down_before_it_is_initialized(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        fake_nvml.update({"*.*.error": 999})
        await failure(nvml.gpus)
        fake_nvml.clear_calls()
        fake_nvml.set(TWO_A6000)
        await nvml.gpus.read()
        assert [call.function for call in fake_nvml.calls()][:2] == ["nvmlShutdown", "nvmlInitWithFlags"]


async def test_unknown_errors_on_most_calls_are_not_hidden_by_a_few_remembered_answers(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        await nvml.gpus.read()
        remembered = {f"*.nvmlDeviceGet{name}.error": 0 for name in ("MemoryInfo_v2", "ClockInfo", "EnforcedPowerLimit")}
        fake_nvml.update({"*.*.error": 999, **remembered})
        assert (await failure(nvml.gpus)).reason == "nvml_unknown_error"


async def test_version_mismatch_names_both_versions(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    version = tmp_path / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    fake_nvml.set({"sys.nvmlInitWithFlags.error": 18, "sys.nvml": "13.580.95.05"})
    async with nvml_on(fake_nvml, procfs_root=tmp_path) as nvml:
        error = await failure(nvml.gpus)
    assert str(error).startswith(
        "the loaded NVIDIA kernel driver is 535.104.05 but the NVML library is 580.95.05 (NVML error 18): "
    )


async def test_version_mismatch_without_versions_still_has_its_cure(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.set({"sys.nvmlInitWithFlags.error": 18, "sys.nvmlSystemGetNVMLVersion.error": 18})
    async with nvml_on(fake_nvml, procfs_root=tmp_path) as nvml:
        error = await failure(nvml.gpus)
    assert "is of another version but the NVML library is of another version" in str(error)
    assert "reboot or reload the driver" in str(error)


async def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_text("no library")
    nvml = Nvml(SystemClock(), library=path)
    error = await failure(nvml.gpus)
    assert error.reason == "nvml_library_not_found"
    assert f"nvml_library {path} cannot be loaded" in str(error)
    await nvml.gpus.close()


def test_a_host_without_the_library_says_so() -> None:
    """In a process of its own: this one has the fake loaded, or will have, and a process cannot unload it."""
    program = """
import asyncio
from ceilingd.clock import SystemClock
from ceilingd.sources.nvml import Nvml
from ceilingd.sources.source import SourceError

async def main():
    nvml = Nvml(SystemClock())
    for source in (nvml.gpus, nvml.gpus, nvml.links):
        try:
            await source.read()
        except SourceError as error:
            print(error.reason, error, sep=": ")
    await nvml.gpus.close()

asyncio.run(main())
"""
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second, links = ended.stdout.splitlines()
    assert first == second
    assert first.startswith("nvml_library_not_found: libnvidia-ml.so.1 was not found: install the NVIDIA driver")
    assert links.startswith("nvml_not_initialized: ")


def test_importing_the_sources_does_not_import_pynvml() -> None:
    program = "import ceilingd.sources.nvml, sys; print('pynvml' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "False\n"


@pytest.mark.parametrize(("code", "reason"), [(15, "nvml_gpu_lost"), (16, "nvml_reset_required"), (28, "nvml_gpu_lost"),
                                              (999, "nvml_unknown_error")])  # fmt: skip
async def test_one_lost_gpu_does_not_hide_the_other_and_comes_back(fake_nvml: FakeNvml, code: int, reason: str) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml) as nvml:
        before = await nvml.gpus.read()
        fake_nvml.update({"0.*.error": code})
        assert [link.uuid for link in (await nvml.links.read()).links] == [SECOND]
        for _ in range(2):
            lost = await nvml.gpus.read()
            assert lost.gpus == before.gpus[1:]
            assert lost.unreadable == ((0, reason),)
            assert [link.uuid for link in (await nvml.links.read()).links] == [SECOND]
            assert [gpu.uuid for gpu in (await nvml.traffic.read()).gpus] == [SECOND]
        fake_nvml.update({"0.*.error": None})
        back = await nvml.gpus.read()
        assert (back.gpus, back.unreadable) == (before.gpus, ())
        assert await uuids(nvml) == [[FIRST, SECOND]] * 3
    assert len(fake_nvml.calls("nvmlInitWithFlags")) == 1


async def test_a_gpu_lost_before_the_start_is_unreadable_until_it_answers(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "1.*.error": 15})
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
        assert [gpu.info.uuid for gpu in reading.gpus] == [FIRST]
        assert reading.unreadable == ((1, "nvml_gpu_lost"),)
        fake_nvml.set(TWO_A6000)
        assert await uuids(nvml) == [[FIRST, SECOND]] * 3


async def test_when_the_only_gpu_is_lost_nvml_still_answers(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({"count": 1, "0.*.error": 15})
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
        assert (reading.gpus, reading.unreadable) == ((), ((0, "nvml_gpu_lost"),))
        assert (await nvml.links.read()).links == ()
        assert (await nvml.traffic.read()).gpus == ()


async def test_another_board_at_the_same_index_is_another_gpu(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({"count": 1, "0.uuid": FIRST})
    async with nvml_on(fake_nvml) as nvml:
        assert await uuids(nvml) == [[FIRST]] * 3
        fake_nvml.update({"0.*.error": 15})
        await nvml.gpus.read()
        fake_nvml.set({"count": 1, "0.uuid": SECOND})
        assert await uuids(nvml) == [[SECOND]] * 3


async def test_a_gpu_that_the_user_may_not_open_does_not_hide_the_other(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetHandleByIndex_v2.error": 4})
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
    assert [gpu.info.uuid for gpu in reading.gpus] == [SECOND]
    assert reading.unreadable == ((0, "nvml_no_permission"),)


async def test_a_gpu_without_a_usable_identity_does_not_hide_the_other(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "1.bus_id": "N/A"})
    async with nvml_on(fake_nvml) as nvml:
        reading = await nvml.gpus.read()
    assert [gpu.info.uuid for gpu in reading.gpus] == [FIRST]
    assert reading.unreadable == ((1, "nvml_invalid_identity"),)


async def test_readings_follow_the_uuid_when_indices_change(fake_nvml: FakeNvml) -> None:
    hardware = {**TWO_A6000, "0.pcie.gen": 4, "1.pcie.gen": 1, "0.pcie.tx_kbps": 40, "1.pcie.tx_kbps": 10}
    swapped = dict(hardware)
    for key in ("uuid", "bus_id", "serial", "pcie.gen", "pcie.tx_kbps"):
        swapped[f"0.{key}"], swapped[f"1.{key}"] = hardware[f"1.{key}"], hardware[f"0.{key}"]

    async def by_uuid(nvml: Nvml) -> dict[str, tuple[str, str | None, int | None, float | None]]:
        gpus = {gpu.info.uuid: gpu.info for gpu in (await nvml.gpus.read()).gpus}
        generations = {link.uuid: link.generation for link in (await nvml.links.read()).links}
        rates = {gpu.uuid: gpu.transmit_bytes_per_second for gpu in (await nvml.traffic.read()).gpus}
        return {uuid: (info.pci_bus_id, info.serial, generations[uuid], rates[uuid]) for uuid, info in gpus.items()}

    fake_nvml.set(hardware)
    async with nvml_on(fake_nvml) as nvml:
        before = await by_uuid(nvml)
        fake_nvml.update({"*.*.error": 999})
        await failure(nvml.gpus)
        fake_nvml.set(swapped)
        after = await by_uuid(nvml)
        assert [link.uuid for link in (await nvml.links.read()).links] == [SECOND, FIRST]
    assert before == after
    assert before[FIRST] == ("0000:41:00.0", "1320000000001", 4, 40e3)
    assert before[SECOND] == ("0000:c1:00.0", "1320000000002", 1, 10e3)


async def test_what_was_not_offered_is_asked_again_after_a_new_initialization(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetPowerUsage.error": 3})
    async with nvml_on(fake_nvml) as nvml:
        before = (await nvml.gpus.read()).gpus[0]
        assert before.power_watts is None
        fake_nvml.update({"*.*.error": 999})
        await failure(nvml.gpus)
        fake_nvml.set(TWO_A6000)
        assert (await nvml.gpus.read()).gpus[0] == replace(before, power_watts=272.345)


async def test_a_healthy_start_has_no_failures(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "sys.nvmlInitWithFlags.sleep_ms": 50})
    async with nvml_on(fake_nvml) as nvml:
        reading, links, traffic = await asyncio.gather(nvml.gpus.read(), nvml.links.read(), nvml.traffic.read())
    assert (len(reading.gpus), len(links.links), len(traffic.gpus)) == (2, 2, 2)


async def test_links_and_traffic_do_not_initialize(fake_nvml: FakeNvml) -> None:
    async with nvml_on(fake_nvml) as nvml:
        for source in (nvml.links, nvml.traffic):
            assert (await failure(source)).reason == "nvml_not_initialized"
    assert fake_nvml.calls() == []


async def test_back_off_is_long_for_nvml_and_short_for_those_that_follow_it(fake_nvml: FakeNvml) -> None:
    async with nvml_on(
        fake_nvml, sample_interval_seconds=1.5, link_sample_interval_seconds=0.1, call_timeout_seconds=3.0
    ) as nvml:
        sources = (nvml.gpus, nvml.links, nvml.traffic)
        assert [source.name for source in sources] == ["nvml", "nvml_links", "nvml_traffic"]
        assert [source.interval_seconds for source in sources] == [1.5, 0.1, 1.5]
        assert [source.backoff_max_seconds for source in sources] == [60.0, 1.0, 1.0]
        assert {source.timeout_seconds for source in sources} == {6.0}
