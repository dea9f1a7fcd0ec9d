"""A fake libnvidia-ml.so.1 and the fixture `fake_nvml`: the real nvidia-ml-py on hardware that a test describes.

In the test's own process, give `Nvml` (or `nvml_library` in the settings) the path `fake_nvml.library`. For a daemon in a
process of its own there are two ways; both need `fake_nvml.environment` added to its environment, which carries the
state and the call log, and which also sets LD_LIBRARY_PATH, so that the fake is found as the system's library would be:

    subprocess.Popen([..., "run"], env=os.environ | fake_nvml.environment)              # found by the dynamic loader
    subprocess.Popen([..., "run", "--nvml-library", str(fake_nvml.library)], env=...)   # named in the settings

Change the hardware with `set` (all of it) or `update` (some lines) at any time. The keys are listed at the head of
fake_nvml.c; `TWO_A6000` is the founding case. What was called, and on which thread, is in `calls()`.

A process loads one NVML and never unloads it, so all tests of a process share the library: each gets its own state file
and call log by environment variable, and the fixture resets the library before and after. The library is compiled once
per version of its source into .tools/fake-nvml.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = Path(__file__).with_name("fake_nvml.c")
BUILD_FOLDER = Path(__file__).parents[3] / ".tools" / "fake-nvml"

TWO_A6000: Mapping[str, object] = {
    # Two RTX A6000 (GA102, 48 GB GDDR6, 384 bit) at Gen4 x16, in the middle of decode.
    "count": 2,
    "sys.driver": "575.57.08",
    "sys.nvml": "12.575.57.08",
    "sys.cuda": 12090,
    "0.uuid": "GPU-a6000000-0000-4000-8000-000000000000",
    "1.uuid": "GPU-a6000000-0000-4000-8000-000000000001",
    "0.bus_id": "00000000:41:00.0",
    "1.bus_id": "00000000:C1:00.0",
    "0.serial": "1320000000001",
    "1.serial": "1320000000002",
    "*.name": "NVIDIA RTX A6000",
    "*.vbios": "94.02.5C.00.02",
    "*.mem.bus_width": 384,
    "*.mem.total": 51527024640,
    "*.mem.used": 48318382080,
    "*.mem.reserved": 459276288,
    "*.clock.mem": 8001,
    "*.clock.mem.max": 8001,
    "*.clock.sm": 1800,
    "*.clock.sm.max": 2100,
    "*.pcie.gen": 4,
    "*.pcie.gen.max": 4,
    "*.pcie.gen.device_max": 4,
    "*.pcie.width": 16,
    "*.pcie.width.max": 16,
    "*.pcie.tx_kbps": 45000,
    "*.pcie.rx_kbps": 52000,
    "*.pcie.replays": 3,
    "*.power.mw": 272345,
    "*.power.limit_mw": 300000,
    "*.power.limit_default_mw": 300000,
    "*.energy.mj": 123456789,
    "*.temp": 71,
    "*.pstate": 2,
    "*.util.gpu": 97,
    "*.util.memory": 88,
    "*.throttle": 0x4,  # sw_power_cap
    "*.nvlink.count": 4,
    "*.nvlink.active": 0,
}


@dataclass(frozen=True, slots=True)
class NvmlCall:
    """One line of the call log."""

    returned: float
    """Monotonic seconds."""
    thread: int
    """The kernel's id of the calling thread."""
    function: str
    target: str
    """Index of the GPU, or `sys`."""
    result: int


class FakeNvml:
    """The hardware behind the fake library, for one test. `folder` is where its state and log are kept."""

    def __init__(self, folder: Path) -> None:
        self.library = build()
        self._state = folder / "nvml.state"
        self._log = folder / "nvml.calls"
        self._lines: dict[str, object] = {}
        self.set({})
        self.clear_calls()

    @property
    def environment(self) -> dict[str, str]:
        """What a process must find in its environment to see this hardware."""
        return {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_NVML_STATE": str(self._state),
            "FAKE_NVML_CALLS": str(self._log),
        }

    def set(self, lines: Mapping[str, object]) -> None:
        """Replace the whole state at once."""
        self._lines = dict(lines)
        new = self._state.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._lines.items()))
        new.replace(self._state)

    def update(self, lines: Mapping[str, object]) -> None:
        """Change some lines; `None` removes one."""
        merged = self._lines | dict(lines)
        self.set({key: value for key, value in merged.items() if value is not None})

    def calls(self, function: str | None = None) -> list[NvmlCall]:
        """The calls that have returned since the last `clear_calls`, in that order; those of one function if named."""
        calls = []
        for line in self._log.read_text().splitlines():
            nanoseconds, thread, name, target, result = line.split()
            calls.append(NvmlCall(int(nanoseconds) / 1e9, int(thread), name, target, int(result)))
        return [call for call in calls if function in (None, call.function)]

    def clear_calls(self) -> None:
        """Forget the calls made so far."""
        self._log.write_text("")


@pytest.fixture
def fake_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """A fake with no GPU described yet (it then has one H200) for this process and those started with its environment."""
    fake = FakeNvml(tmp_path)
    reset = ctypes.CDLL(str(fake.library)).fake_nvml_reset
    monkeypatch.setenv("FAKE_NVML_STATE", fake.environment["FAKE_NVML_STATE"])
    monkeypatch.setenv("FAKE_NVML_CALLS", fake.environment["FAKE_NVML_CALLS"])
    reset()
    yield fake
    fake.set({})  # a call that still hangs returns
    reset()


def build() -> Path:
    """The path of libnvidia-ml.so.1, compiled unless this version of the source already is.

    Fails the test, with the cure, where there is no compiler or no nvml.h."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = BUILD_FOLDER / digest / "libnvidia-ml.so.1"
    if library.exists():
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler `cc` for the fake NVML library: apt-get install gcc libc6-dev", pytrace=False)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD_FOLDER) as scratch:
        built = Path(scratch) / library.name
        command = [
            *(compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"),
            *("-I", str(_header_folder()), f"-Wl,-soname,{library.name}", "-o", str(built), str(SOURCE), "-lpthread"),
        ]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        if compiled.returncode:
            pytest.fail(f"the fake NVML library does not compile:\n{compiled.stderr}", pytrace=False)
        os.replace(built, library)  # at once, for test processes that build it at the same time
    return library


def _header_folder() -> Path:
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate())).resolve().parent
    pytest.fail("no nvml.h for the fake NVML library: pip install -e '.[test]' brings it (nvidia-nvml-dev)", pytrace=False)
