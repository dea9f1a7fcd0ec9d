"""Standard streams that are closed, full or narrow, and signals at bad moments: an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.e2e

CEILINGD = f"{sys.executable} -m ceilingd"
RUN = f"{CEILINGD} run --config /dev/null --listen-address 127.0.0.1:0 --log-format json"


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", f"exec {command}"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_the_daemon_runs_and_stops_with_closed_streams(closed: str) -> None:
    with start(f"{RUN} {closed}") as process:
        try:
            assert process.stderr is not None
            assert "listening" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(timeout=20) == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["metrics", "metrics --markdown", "check --config /dev/null"])
@pytest.mark.parametrize(("stream", "code"), [(">/dev/full", 1), (">&-", 0), (">&- 2>&-", 0)])
def test_output_that_goes_nowhere_is_no_traceback(command: str, stream: str, code: int) -> None:
    done = subprocess.run(["sh", "-c", f"{CEILINGD} {command} {stream}"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr == ("ceilingd: the output cannot be written: No space left on device\n" if code else "")


def test_an_ascii_stdout_gets_what_it_can_show() -> None:
    program = "import sys; from ceilingd import cli; cli.main(['--version']); print('\u00e9', file=sys.stdout)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "?")


@pytest.mark.parametrize("apart_seconds", [0.0, 0.001, 0.003, 0.01])
def test_two_interrupts_in_a_row_end_the_daemon_without_a_traceback(apart_seconds: float) -> None:
    with start(RUN) as process:
        try:
            assert process.stderr is not None
            assert "listening" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            time.sleep(apart_seconds)  # the moment is what is tested
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            # Killed by the signal, as which a shell too says 130: the interpreter's last act is to take the handlers off.
            assert process.wait(timeout=20) in (0, 130, -signal.SIGINT)
            assert "Traceback" not in rest
        finally:
            process.kill()
