"""What a release holds: the package with its data, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "daemon" / "ceilingd"
METADATA = re.compile(r"ceilingd-[0-9][^/]*\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)")


def test_the_wheel_holds_the_package_its_data_and_its_type_marker(tmp_path: Path) -> None:
    # No isolation: the build backend is a test tool here, so nothing is downloaded.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    held = {
        path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".json")
    }
    assert {name for name in names if not METADATA.fullmatch(name)} == held | {"ceilingd/py.typed"}
    assert {"ceilingd/data/gpus.toml", "ceilingd/data/demo/qwen3.6-27b.json"} <= names
