"""NVML's error codes: what each one concerns, and what is wrong and the cure in one sentence."""

from __future__ import annotations

from ceilingd.parse.nvml import driver_version_of_library
from ceilingd.sources.source import SourceError

# nvml.h, nvmlReturn_t. Numbers rather than pynvml's names: this file must load where no NVML is wanted.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
GPU_NOT_FOUND = 28
UNKNOWN = 999

OF_THE_LIBRARY = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH})
"""NVML as a whole does not work: it must be shut down and initialized again."""
OF_THE_GPU = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
"""This GPU cannot be read now; the others can."""
NOT_OFFERED = frozenset(
    {INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED}
)
"""This device or driver does not answer this question, however often it is asked."""

INVALID_IDENTITY = "nvml_invalid_identity"
"""Reason for a GPU whose UUID or PCI bus id cannot be one."""
CALL_STUCK = "nvml_call_stuck"

_REASONS = {
    UNINITIALIZED: "nvml_not_initialized",
    NO_PERMISSION: "nvml_no_permission",
    DRIVER_NOT_LOADED: "nvml_driver_not_loaded",
    LIBRARY_NOT_FOUND: "nvml_library_not_found",
    GPU_IS_LOST: "nvml_gpu_lost",
    GPU_NOT_FOUND: "nvml_gpu_lost",
    RESET_REQUIRED: "nvml_reset_required",
    VERSION_MISMATCH: "nvml_version_mismatch",
    UNKNOWN: "nvml_unknown_error",
}
_SENTENCES = {
    UNINITIALIZED: "NVML has lost its initialization (error 1) and is initialized again",
    NO_PERMISSION: (
        "no permission to use the NVIDIA driver (NVML error 4): give the user read and write access to /dev/nvidiactl and "
        "/dev/nvidia*"
    ),
    DRIVER_NOT_LOADED: (
        "the NVIDIA kernel driver is not loaded (NVML error 9): run `modprobe nvidia` or `nvidia-smi` as root, and look in "
        "dmesg if that fails; a container also needs /dev/nvidiactl and /dev/nvidia*"
    ),
    LIBRARY_NOT_FOUND: (
        "libnvidia-ml.so.1 was not found: install the NVIDIA driver, run a container with the NVIDIA runtime and "
        "NVIDIA_DRIVER_CAPABILITIES=utility, or name the file in nvml_library"
    ),
    GPU_IS_LOST: "the GPU has fallen off the bus (NVML error 15): look for Xid 79 in dmesg, and reboot or power-cycle the host",
    GPU_NOT_FOUND: "the GPU is gone (NVML error 28): look for Xid 79 in dmesg, and reboot or power-cycle the host",
    RESET_REQUIRED: (
        "the GPU must be reset before it can be used (NVML error 16): stop what uses it and run `nvidia-smi -r`, or reboot"
    ),
    UNKNOWN: (
        "NVML answers Unknown Error (999), so access to the GPU devices is lost, in a container mostly because its cgroup "
        "rules were rewritten (`systemctl daemon-reload` does that): restart the container, with each /dev/nvidia* passed as a "
        "device so that it does not happen again"
    ),
}


def reason(code: int) -> str:
    """One word of a fixed list for an NVML error code; `nvml_error` for a code that has none of its own."""
    return _REASONS.get(code, "nvml_error")


def failure(code: int, text: str = "") -> SourceError:
    """The error to report for an NVML error code; `text` is NVML's own wording, used where there is no sentence of ours."""
    sentence = _SENTENCES.get(code) or f"NVML failed with error {code} ({text[:80]}): see whether nvidia-smi works, and dmesg"
    return SourceError(reason(code), sentence)


def version_mismatch(kernel_version: str | None, nvml_version: str | None) -> SourceError:
    """Error 18 with both versions, `None` where one cannot be told. The cure is the same whichever is older."""
    kernel = kernel_version or "of another version"
    library = driver_version_of_library(nvml_version) if nvml_version else "of another version"
    return SourceError(
        reason(VERSION_MISMATCH),
        f"the loaded NVIDIA kernel driver is {kernel} but the NVML library is {library} (NVML error 18): reboot or reload the "
        "driver, and restart ceilingd or its container if the driver was updated while it ran",
    )


def library_unusable(path: object, text: str) -> SourceError:
    """The file named in the settings cannot be loaded; `text` is the dynamic loader's wording."""
    return SourceError(
        reason(LIBRARY_NOT_FOUND),
        f"nvml_library {path} cannot be loaded ({text}): name the libnvidia-ml.so.1 of this driver, or leave it out",
    )


def not_initialized() -> SourceError:
    """Links and traffic have nothing to read until the source `nvml` has initialized the library."""
    message = "NVML is not initialized; the source nvml says why and tries again"
    return SourceError(reason(UNINITIALIZED), message, consequence=True)


def call_stuck(call: str, seconds: float) -> SourceError:
    """A call in flight passed its limit."""
    return SourceError(
        CALL_STUCK,
        f"{call} has not returned for {seconds:.3g} s: the driver hangs, and no further call is made until this one returns; "
        "look for Xid messages in dmesg, and reset the GPU or reboot if it stays",
    )
