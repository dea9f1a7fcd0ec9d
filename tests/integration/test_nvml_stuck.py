"""NVML calls that do not return: given up in time, never piled up, and the loop goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from ceilingd.sources.source import SourceError
from support.fake_nvml import TWO_A6000
from support.nvml import nvml_on

if TYPE_CHECKING:
    from ceilingd.sources.nvml import Nvml, NvmlSource
    from support.fake_nvml import FakeNvml

LIMIT = 0.08
PATIENCE_SECONDS = 10.0


async def stuck_on(source: NvmlSource[Any], function: str) -> float:
    """Read `source`, which must say that `function` is stuck; the seconds that it took to say so."""
    began = time.monotonic()
    with pytest.raises(SourceError, match=f"^{function} has not returned for [0-9.]+ s: ") as caught:
        await source.read()
    assert caught.value.reason == "nvml_call_stuck"
    return time.monotonic() - began


async def returned(nvml: Nvml) -> None:
    """Wait until no call is stuck any more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while nvml.stuck_seconds(time.monotonic()):
            await asyncio.sleep(0.001)


async def test_a_stuck_call_is_given_up_at_its_limit_and_nothing_queues_behind_it(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        before = await nvml.gpus.read()
        assert nvml.stuck_seconds(time.monotonic()) == 0.0
        fake_nvml.clear_calls()
        fake_nvml.update({"0.nvmlDeviceGetPowerUsage.hang": 1})
        assert LIMIT <= await stuck_on(nvml.gpus, "nvmlDeviceGetPowerUsage") < LIMIT + 1.0
        early = nvml.stuck_seconds(time.monotonic())
        assert early >= LIMIT
        for source in (nvml.gpus, nvml.links, nvml.gpus, nvml.links):
            assert await stuck_on(source, "nvmlDeviceGetPowerUsage") < LIMIT  # at once, not after another limit
        await asyncio.sleep(0.02)
        assert nvml.stuck_seconds(time.monotonic()) >= early + 0.02
        assert fake_nvml.calls("nvmlDeviceGetPowerUsage") == []  # it is logged when it returns

        fake_nvml.update({"0.nvmlDeviceGetPowerUsage.hang": None})
        await returned(nvml)
        assert (await nvml.gpus.read()).gpus == before.gpus
        assert len((await nvml.links.read()).links) == 2
        # The one that hung, of which nobody heard, and one for each GPU by each of the two reads after it.
        assert [call.target for call in fake_nvml.calls("nvmlDeviceGetPowerUsage")] == ["0", "0", "1", "0", "1"]
        assert fake_nvml.calls("nvmlInitWithFlags") == []


async def test_a_read_given_up_makes_no_further_calls(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        await nvml.gpus.read()
        fake_nvml.update({"0.nvmlDeviceGetUtilizationRates.hang": 1})
        await stuck_on(nvml.links, "nvmlDeviceGetUtilizationRates")
        fake_nvml.clear_calls()
        fake_nvml.update({"0.nvmlDeviceGetUtilizationRates.hang": None})
        await returned(nvml)
        await nvml.close()
        assert [call.function for call in fake_nvml.calls()] == ["nvmlDeviceGetUtilizationRates", "nvmlShutdown"]


async def test_the_event_loop_runs_on_while_a_call_hangs(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with nvml_on(fake_nvml, call_timeout_seconds=0.3) as nvml:
        await nvml.gpus.read()
        fake_nvml.update({"0.nvmlDeviceGetPowerUsage.hang": 1})
        reading = asyncio.create_task(stuck_on(nvml.gpus, "nvmlDeviceGetPowerUsage"))
        ticks = 0
        while not reading.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert await reading >= 0.3
        assert ticks >= 15  # 60 on an idle machine; 1 if the loop itself made the call


async def test_a_stuck_traffic_call_leaves_the_links_and_gpus_live(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "1.nvmlDeviceGetPcieThroughput.hang": 1})
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        await nvml.gpus.read()
        await stuck_on(nvml.traffic, "nvmlDeviceGetPcieThroughput")
        assert nvml.stuck_seconds(time.monotonic()) >= LIMIT
        assert len((await nvml.links.read()).links) == 2
        assert len((await nvml.gpus.read()).gpus) == 2
        await stuck_on(nvml.traffic, "nvmlDeviceGetPcieThroughput")
        fake_nvml.update({"1.nvmlDeviceGetPcieThroughput.hang": None})
        await returned(nvml)
        assert len((await nvml.traffic.read()).gpus) == 2


async def test_the_limit_is_for_each_call_and_not_for_the_read(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "*.nvmlDeviceGetPcieThroughput.sleep_ms": 60})
    async with nvml_on(fake_nvml, call_timeout_seconds=0.2) as nvml:
        await nvml.gpus.read()
        began = time.monotonic()
        assert len((await nvml.traffic.read()).gpus) == 2
        assert time.monotonic() - began >= 0.24


async def test_a_slow_initialization_is_waited_for_and_used_when_it_returns(fake_nvml: FakeNvml) -> None:
    """Without persistence mode the driver loads each GPU at the first use, which takes seconds: longer than the limit."""
    fake_nvml.set({**TWO_A6000, "sys.nvmlInitWithFlags.hang": 1})
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        await stuck_on(nvml.gpus, "nvmlInit")
        await stuck_on(nvml.gpus, "nvmlInit")
        await stuck_on(nvml.links, "nvmlInit")
        await stuck_on(nvml.traffic, "nvmlInit")
        fake_nvml.update({"sys.nvmlInitWithFlags.hang": None})
        await returned(nvml)
        assert len((await nvml.gpus.read()).gpus) == 2
        assert len(fake_nvml.calls("nvmlInitWithFlags")) == 1
        assert fake_nvml.calls("nvmlShutdown") == []


async def test_the_library_is_not_initialized_again_under_a_call_that_hangs(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetPcieThroughput.hang": 1})
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        await nvml.gpus.read()
        await stuck_on(nvml.traffic, "nvmlDeviceGetPcieThroughput")
        fake_nvml.update({"*.*.error": 999})
        with pytest.raises(SourceError, match="Unknown Error"):
            await nvml.gpus.read()
        fake_nvml.update({"*.*.error": None})
        await stuck_on(nvml.gpus, "nvmlDeviceGetPcieThroughput")
        assert fake_nvml.calls("nvmlShutdown") == []
        fake_nvml.update({"0.nvmlDeviceGetPcieThroughput.hang": None})
        await returned(nvml)
        assert len((await nvml.gpus.read()).gpus) == 2
        functions = [call.function for call in fake_nvml.calls()]
        assert functions.index("nvmlDeviceGetPcieThroughput") < functions.index("nvmlShutdown")


async def test_closing_is_bounded_while_a_call_hangs(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetPcieThroughput.hang": 1})
    async with nvml_on(fake_nvml, call_timeout_seconds=LIMIT) as nvml:
        await nvml.gpus.read()
        await stuck_on(nvml.traffic, "nvmlDeviceGetPcieThroughput")
        async with asyncio.timeout(3 * LIMIT + 1.0):
            await nvml.close()
        assert fake_nvml.calls("nvmlShutdown") == []  # not under the call that hangs


def test_a_process_ends_while_a_call_hangs(fake_nvml: FakeNvml) -> None:
    """Here found by the dynamic loader, as the system's library is."""
    fake_nvml.set({**TWO_A6000, "0.nvmlDeviceGetPowerUsage.hang": 1})
    program = """
import asyncio
from ceilingd.clock import SystemClock
from ceilingd.sources.nvml import Nvml
from ceilingd.sources.source import SourceError

async def main():
    nvml = Nvml(SystemClock(), call_timeout_seconds=0.1)
    try:
        await nvml.gpus.read()
    except SourceError as error:
        print(error.reason)
    await nvml.close()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | fake_nvml.environment,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "nvml_call_stuck\n", "")
