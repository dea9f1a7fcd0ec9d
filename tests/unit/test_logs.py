"""One pipeline: what reaches stderr, in which form, and what never does."""

from __future__ import annotations

import io
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from ceilingd import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    logs.configure(stream=stream)
    return stream


def test_without_a_terminal_each_event_is_one_line_of_json(stream: io.StringIO) -> None:
    structlog.get_logger("ceilingd.sampler").warning("source failed", source="nvml", count=3)
    [event] = events(stream)
    assert list(event) == ["timestamp", "level", "event", "logger", "source", "count"]
    assert event["timestamp"].endswith("Z")
    assert "T" in event["timestamp"]
    del event["timestamp"]
    assert event == {"level": "warning", "event": "source failed", "logger": "ceilingd.sampler", "source": "nvml", "count": 3}


def test_the_standard_library_goes_the_same_way(stream: io.StringIO) -> None:
    logging.getLogger("aiohttp.server").error("cannot %s", "answer", extra={"api_key": "sk-1"})
    [event] = events(stream)
    assert (event["event"], event["logger"], event["level"]) == ("cannot answer", "aiohttp.server", "error")
    assert event["api_key"] == logs.REDACTED


def test_warnings_are_logged(stream: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old call", UserWarning, stacklevel=1)
    [event] = events(stream)
    assert (event["logger"], event["level"]) == ("py.warnings", "warning")
    assert "old call" in event["event"]


def test_a_terminal_gets_lines_for_people() -> None:
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger("ceilingd.app").info("listening", url="http://127.0.0.1:1")
    assert "listening" in stream.getvalue()
    assert "url=http://127.0.0.1:1" in stream.getvalue()
    assert "\033[" not in stream.getvalue()


def test_colours_come_only_when_asked_for() -> None:
    stream = Terminal()
    logs.configure(stream=stream, color=True)
    structlog.get_logger("x").info("listening")
    assert "\033[" in stream.getvalue()


@pytest.mark.parametrize(("format", "as_json"), [("json", True), ("console", False)])
def test_the_format_can_be_forced(format: Any, as_json: bool) -> None:
    stream = Terminal() if as_json else io.StringIO()
    logs.configure(format=format, stream=stream)
    structlog.get_logger("x").info("listening")
    assert stream.getvalue().startswith("{") is as_json


def test_the_level_holds_for_both_kinds_of_logger() -> None:
    stream = io.StringIO()
    logs.configure("warning", stream=stream)
    structlog.get_logger("x").info("quiet")
    logging.getLogger("y").info("quiet")
    structlog.get_logger("x").warning("loud")
    assert [event["event"] for event in events(stream)] == ["loud"]


def test_configuring_twice_writes_each_event_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure(stream=first)
    logs.configure(stream=second)
    structlog.get_logger("x").info("once")
    assert first.getvalue() == ""
    assert len(events(second)) == 1


@pytest.mark.parametrize(
    "key", ["api_key", "admin_api_key", "Authorization", "token", "hf_token", "password", "client-secret", "apikey"]
)
def test_secrets_are_redacted_by_key(stream: io.StringIO, key: str) -> None:
    structlog.get_logger("x").info("asked", **{key: "sk-1", "headers": {key: ["sk-1"]}, "list": [{key: "sk-1"}]})
    assert "sk-1" not in stream.getvalue()
    assert stream.getvalue().count(logs.REDACTED) == 3


@pytest.mark.parametrize("key", ["tokens_per_second", "context_tokens", "api_key_file", "keys", "token_count"])
def test_what_only_sounds_like_a_secret_is_kept(stream: io.StringIO, key: str) -> None:
    structlog.get_logger("x").info("seen", **{key: 72.5})
    assert events(stream)[0][key] == 72.5


@pytest.mark.parametrize("text", ["got Authorization: Bearer sk-1", "basic sk-1 refused", "http://user:sk-1@host/metrics"])
def test_secrets_are_redacted_inside_text(stream: io.StringIO, text: str) -> None:
    structlog.get_logger("x").info(text, error=OSError(text))
    assert "sk-1" not in stream.getvalue()
    assert stream.getvalue().count(logs.REDACTED) == 2


def test_a_server_can_neither_flood_the_log_nor_command_the_terminal() -> None:
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("answer", body="\033[2J\n" + "x" * 50_000)
    assert "\033" not in stream.getvalue()
    assert "(50005 characters)" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1
    assert len(stream.getvalue()) < 2 * logs.TEXT_LIMIT_CHARACTERS


def test_json_stays_json_with_values_that_json_lacks(stream: io.StringIO) -> None:
    structlog.get_logger("x").info("odd", ratio=float("nan"), deep=[[[[[[1]]]]]], where=io, none=None, yes=True)
    line = stream.getvalue()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    event = json.loads(line, parse_constant=refuse)
    assert (event["ratio"], event["none"], event["yes"]) == ("nan", None, True)


def test_a_defect_has_its_traceback_in_one_field_without_the_values_of_variables(stream: io.StringIO) -> None:
    password = "sk-1"
    try:
        raise ValueError(f"impossible {len(password)}")
    except ValueError:
        structlog.get_logger("x").exception("defect")
    [event] = events(stream)
    [error] = event["exception"]
    assert (error["exc_type"], error["exc_value"]) == ("ValueError", "impossible 4")
    assert error["frames"][-1]["name"] == "test_a_defect_has_its_traceback_in_one_field_without_the_values_of_variables"
    assert "sk-1" not in stream.getvalue()


@pytest.mark.parametrize(("level", "traceback"), [("info", False), ("debug", True)])
def test_an_expected_failure_has_its_traceback_only_at_debug(level: Any, traceback: bool) -> None:
    stream = io.StringIO()
    logs.configure(level, stream=stream)
    try:
        raise ConnectionError("nothing listens")
    except ConnectionError:
        structlog.get_logger("x").warning("source failed", exc_info=True)
    [event] = events(stream)
    assert ("exception" in event) is traceback
    assert event.get("error") == (None if traceback else "ConnectionError: nothing listens")


def test_a_log_that_cannot_be_written_stops_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    logs.configure(stream=Closed())
    structlog.get_logger("x").error("lost")
    assert capsys.readouterr().err == ""
