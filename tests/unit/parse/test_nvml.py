"""Raw NVML numbers to base units, and the placeholders that are no numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ceilingd.parse import nvml as parse

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_AVAILABLE_32 = 0xFFFFFFFF
NOT_AVAILABLE_64 = 0xFFFFFFFFFFFFFFFF


@pytest.mark.parametrize(
    ("function", "raw", "value"),
    [
        (parse.known, 0, 0),
        (parse.positive, 0, None),
        (parse.positive, 384, 384),
        (parse.link_generation, 1, 1),
        (parse.link_generation, 6, 6),
        (parse.link_generation, 0, None),
        (parse.link_generation, 7, None),
        (parse.link_width_lanes, 16, 16),
        (parse.link_width_lanes, 12, 12),
        (parse.link_width_lanes, 0, None),
        (parse.link_width_lanes, 3, None),
        (parse.percent_to_ratio, 0, 0.0),
        (parse.percent_to_ratio, 97, 0.97),
        (parse.percent_to_ratio, 100, 1.0),
        (parse.percent_to_ratio, 101, None),
        (parse.megahertz_to_hertz, 8001, 8.001e9),
        (parse.megahertz_to_hertz, 0, None),
        (parse.milliwatts_to_watts, 78838, 78.838),
        (parse.milliwatts_to_watts, 0, 0.0),
        (parse.power_limit_watts, 700000, 700.0),
        (parse.power_limit_watts, 0, None),
        (parse.millijoules_to_joules, 2684404, 2684.404),
        (parse.traffic_bytes_per_second, 696, 696_000.0),
        (parse.traffic_bytes_per_second, 0, 0.0),
        (parse.celsius, 0, 0.0),
        (parse.celsius, 71, 71.0),
        (parse.performance_state, 0, 0),
        (parse.performance_state, 15, 15),
        (parse.performance_state, 32, None),
        (parse.gpu_idle, 0x1, True),
        (parse.gpu_idle, 0x4, False),
        (parse.clocks_event_reasons, 0, ()),
        (parse.clocks_event_reasons, 0x4 | 0x20, ("sw_power_cap", "sw_thermal_slowdown")),
        (parse.clocks_event_reasons, 0x1 | 1 << 40, ("gpu_idle",)),
        (parse.clocks_event_reasons, 511, parse.CLOCKS_EVENT_REASONS),
        (parse.cuda_version, 12080, "12.8"),
        (parse.cuda_version, 13000, "13.0"),
        (parse.cuda_version, 0, None),
    ],
)
def test_raw_values(function: Callable[[int], object], raw: int, value: object) -> None:
    assert function(raw) == value


@pytest.mark.parametrize("raw", [None, NOT_AVAILABLE_32, NOT_AVAILABLE_64])
@pytest.mark.parametrize(
    "function",
    [
        parse.known,
        parse.positive,
        parse.link_generation,
        parse.link_width_lanes,
        parse.percent_to_ratio,
        parse.megahertz_to_hertz,
        parse.milliwatts_to_watts,
        parse.power_limit_watts,
        parse.millijoules_to_joules,
        parse.traffic_bytes_per_second,
        parse.celsius,
        parse.performance_state,
        parse.clocks_event_reasons,
        parse.gpu_idle,
        parse.cuda_version,
    ],
)
def test_what_is_not_available_is_none(function: Callable[[int | None], object], raw: int | None) -> None:
    assert function(raw) is None


def test_reason_names_follow_the_bits_of_nvml_h() -> None:
    assert [parse.clocks_event_reasons(1 << bit) for bit in range(9)] == [
        ("gpu_idle",),
        ("applications_clocks_setting",),
        ("sw_power_cap",),
        ("hw_slowdown",),
        ("sync_boost",),
        ("sw_thermal_slowdown",),
        ("hw_thermal_slowdown",),
        ("hw_power_brake_slowdown",),
        ("display_clock_setting",),
    ]


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("00000000:41:00.0", "0000:41:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000000F:0A:1f.7", "000f:0a:1f.7"),
    ],
)
def test_pci_bus_id_is_spelled_as_in_sysfs(text: str, spelled: str) -> None:
    assert parse.pci_bus_id(text) == spelled


@pytest.mark.parametrize("text", ["", "41:00.0", "0000:41:00", "0000:41:00.8", "0000:41:00.0\n", "../../etc"])
def test_a_text_that_is_no_pci_bus_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no PCI bus id"):
        parse.pci_bus_id(text)


def test_library_version_without_the_cuda_version_is_the_driver_version() -> None:
    assert parse.driver_version_of_library("13.580.95.05") == "580.95.05"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)  "
            "Mon Aug 25 21:39:33 UTC 2025\nGCC version:  Selected multilib: .;@m64\n",
            "580.159.04",
        ),
        ("GCC version:  gcc version 12.3.0\n", None),
        ("", None),
    ],
)
def test_kernel_driver_version(text: str, version: str | None) -> None:
    assert parse.driver_version_of_kernel(text) == version
