"""`ceilingd check` as installed: its exit codes and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import installed

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def test_a_server_that_is_down_is_exit_code_1_and_one_line_with_the_cure() -> None:
    result = installed.run("check", "--server", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr == ""
    [line] = [line for line in result.stdout.splitlines() if line.startswith("error")]
    assert line.split(maxsplit=3)[:3] == ["error", "server", "127.0.0.1:1"]
    assert "nothing listens" in line


def test_as_json_the_findings_can_be_read_by_a_program() -> None:
    result = installed.run("check", "--json", "--server", "http://127.0.0.1:1")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert {"level", "subject", "message"} == set(report["findings"][0])


@pytest.mark.parametrize("command", ["check", "run", "demo"])
def test_a_bad_file_is_exit_code_2_and_one_line_for_every_command(command: str) -> None:
    path = ROOT / "tests" / "data" / "config" / "interval-zero.bad.toml"
    result = installed.run(command, "--config", str(path))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"ceilingd {command}: {path}: sample_interval_seconds is 0, but must be at least 0.05\n"
