"""What the installed script writes where: JSON lines to a pipe, lines for people to a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.e2e
DEMO = [str(installed.CEILINGD), "demo", "--listen-address", "127.0.0.1:0"]


def lines_of(process: subprocess.Popen[bytes], terminal: int) -> Iterator[str]:
    """Lines as they appear on a terminal, until the process closes it."""
    rest = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # what Linux says when the other end of a terminal is closed
            piece = b""
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode().rstrip("\r") for line in whole)
        if not piece:
            return


def on_a_terminal(until: Callable[[str], bool], **environment: str) -> tuple[list[str], int]:
    """Run the demo with stderr on a terminal, interrupt it once a line satisfies `until`; its lines and exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        DEMO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    try:
        seen = []
        for line in lines_of(process, ours):
            seen.append(line)
            if until(line):
                process.send_signal(signal.SIGINT)
        return seen, process.wait(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def test_on_a_terminal_the_log_is_for_people_in_colour() -> None:
    lines, code = on_a_terminal(lambda line: "listening" in line)
    assert code == 0
    assert any("listening" in line and "\033[" in line for line in lines)
    assert not any(line.startswith("{") for line in lines)


def test_no_color_is_respected() -> None:
    lines, code = on_a_terminal(lambda line: "listening" in line, NO_COLOR="1")
    assert code == 0
    assert any("listening" in line for line in lines)
    assert "\033" not in "".join(lines)


def test_on_a_pipe_every_line_is_json() -> None:
    process = subprocess.Popen(DEMO, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process:
        events = []
        for line in process.stderr:
            events.append(json.loads(line))
            if events[-1]["event"] == "listening":
                process.terminate()
    assert process.returncode == 0
    assert [event["event"] for event in events if event["event"] != "demo phase"][-2:] == ["stopping", "stopped"]


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["metrics"], ["metrics", "--markdown"]])
def test_a_reader_that_leaves_early_sees_no_traceback(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [str(installed.CEILINGD), *command],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert result.stderr == ""
