"""The installed console script as a process: how it stops, and what its exit code and its one sentence say."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import pytest

from support import installed

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import CompletedProcess

pytestmark = pytest.mark.e2e


def one_sentence(result: CompletedProcess[str]) -> str:
    """The only line on stderr."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_daemon_in_time_and_without_a_complaint(number: signal.Signals, tmp_path: Path) -> None:
    with installed.daemon("demo", "--listen-address", "127.0.0.1:0", directory=tmp_path) as demo:
        code, seconds = demo.stop(number)
    assert code == 0
    assert seconds < 2
    assert [event for event in demo.events() if event["level"] in ("warning", "error", "critical")] == []


def test_a_port_in_use_is_one_sentence_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = installed.run("demo", "--listen-address", f"127.0.0.1:{port}")
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in one_sentence(result)


def test_an_unknown_key_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "ceilingd.toml"
    path.write_text('listen_adress = "127.0.0.1:0"\n')
    result = installed.run("run", "--config", str(path))
    assert result.returncode == 2
    assert "listen_adress" in one_sentence(result)


def test_a_config_file_that_is_not_there_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    result = installed.run("run", "--config", str(path))
    assert result.returncode == 2
    assert str(path) in one_sentence(result)


def test_an_unknown_command_is_exit_code_2() -> None:
    result = installed.run("serve")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
