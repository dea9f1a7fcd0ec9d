"""What NVML answers, in base units: its raw numbers and texts to the fields of the records.

Every function takes `None` (the device did not answer) and gives `None` for it, and for the values with which drivers say
"not available" without an error: all bits set, or a number that the quantity cannot have.
"""

from __future__ import annotations

import re

from ceilingd.links.rates import GENERATIONS, WIDTHS_LANES

CLOCKS_EVENT_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""Name of each bit of the mask, from bit 0 (nvml.h, nvmlClocksEventReason*). Bits above have no documented meaning."""

_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)  # NVML_VALUE_NOT_AVAILABLE for unsigned int and unsigned long long
_PERFORMANCE_STATES = range(16)  # P0 to P15; 32 is NVML_PSTATE_UNKNOWN


def known(raw: int | None) -> int | None:
    """The number itself, where it is one."""
    return None if raw in _NOT_AVAILABLE else raw


def positive(raw: int | None) -> int | None:
    """The number where zero cannot be true: a limit, a maximum, a width, the clock of a GPU that answers."""
    return known(raw) or None


def link_generation(raw: int | None) -> int | None:
    """PCIe generation 1 to 6."""
    return raw if raw in GENERATIONS else None


def link_width_lanes(raw: int | None) -> int | None:
    """A number of lanes that a link can train to."""
    return raw if raw in WIDTHS_LANES else None


def percent_to_ratio(raw: int | None) -> float | None:
    """0 to 100 percent as 0 to 1."""
    return None if raw is None or not 0 <= raw <= 100 else raw / 100


def megahertz_to_hertz(raw: int | None) -> float | None:
    """A clock in hertz; 0 MHz is a placeholder."""
    megahertz = positive(raw)
    return None if megahertz is None else megahertz * 1e6


def milliwatts_to_watts(raw: int | None) -> float | None:
    """A power draw in watts."""
    milliwatts = known(raw)
    return None if milliwatts is None else milliwatts / 1000


def power_limit_watts(raw: int | None) -> float | None:
    """A power limit (milliwatts) in watts; 0 is a placeholder."""
    return milliwatts_to_watts(positive(raw))


def millijoules_to_joules(raw: int | None) -> float | None:
    """An energy in joules."""
    millijoules = known(raw)
    return None if millijoules is None else millijoules / 1000


def traffic_bytes_per_second(raw: int | None) -> float | None:
    """`nvmlDeviceGetPcieThroughput` in bytes per second. nvml.h calls its unit KB/s; it is 1000 bytes per second
    (against copies of known size on an H200 with driver 580: 8 % high, which is the packet overhead that it counts)."""
    thousands = known(raw)
    return None if thousands is None else thousands * 1000.0


def celsius(raw: int | None) -> float | None:
    """A temperature in degrees Celsius."""
    degrees = known(raw)
    return None if degrees is None else float(degrees)


def performance_state(raw: int | None) -> int | None:
    """0 (fastest) to 15."""
    return raw if raw in _PERFORMANCE_STATES else None


def clocks_event_reasons(mask: int | None) -> tuple[str, ...] | None:
    """Names of the reasons whose bit is set, in bit order; bits without a documented meaning are left out."""
    mask = known(mask)
    if mask is None:
        return None
    return tuple(name for bit, name in enumerate(CLOCKS_EVENT_REASONS) if mask >> bit & 1)


def gpu_idle(mask: int | None) -> bool | None:
    """Whether the reason `gpu_idle` is active."""
    mask = known(mask)
    return None if mask is None else bool(mask & 1)


def pci_bus_id(text: str) -> str:
    """The id as sysfs spells it: `00000000:41:00.0` and `0000:41:00.0` are `0000:41:00.0`, lower case.

    Raises `ValueError` for a text that is no PCI address."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no PCI bus id; expected the form 00000000:41:00.0")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def cuda_version(number: int | None) -> str | None:
    """The driver's CUDA version: 12080 is `12.8`."""
    number = positive(number)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def driver_version_of_library(nvml_version: str) -> str:
    """The driver release that an NVML library belongs to: `13.580.95.05` (CUDA major version first) is `580.95.05`."""
    return nvml_version.partition(".")[2]


def driver_version_of_kernel(proc_text: str) -> str | None:
    """The release of the loaded kernel module, from /proc/driver/nvidia/version; `None` where the text names none."""
    match = re.search(r"^NVRM version:.*?\s(\d{3,}(?:\.\d+)+)\s", proc_text, re.MULTILINE)
    return match and match[1]
