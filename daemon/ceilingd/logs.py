"""One pipeline for structlog and the standard library's logging: JSON lines or a console, on stderr only."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from ceilingd.text import printable

TEXT_LIMIT_CHARACTERS = 2000
"""A field longer than this is cut: servers' answers and file contents end up in error texts."""
DEPTH_LIMIT = 4

_SECRET_KEY = re.compile(
    r"(?:.*[_-])?(?:api_?key|authorization|token|password|passwd|secret|cookie|credentials)", re.IGNORECASE
)
_SECRET_TEXT = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[^\s\"',;]+|(?<=://)[^/\s@]+@")
REDACTED = "[redacted]"


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "json", "console"] = "auto",
    *,
    stream: TextIO | None = None,
    color: bool = False,
) -> None:
    """Send every log record and every Python warning of the process to `stream` (stderr when `None`).

    `auto` means console on a terminal and JSON lines elsewhere. `color` is for the console alone. May be called again."""
    stream = stream if stream is not None else sys.stderr
    as_json = format == "json" or (format == "auto" and not stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Exceptions(always=level == "debug"),
        clean,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    rendering: list[Processor] = (
        [
            # Frames with file, line and function; never the values of variables, which may be secrets.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            _in_order,
            structlog.processors.JSONRenderer(serializer=json.dumps, ensure_ascii=False),
        ]
        if as_json
        else [
            structlog.dev.ConsoleRenderer(
                colors=color, exception_formatter=structlog.dev.plain_traceback, pad_event_to=24, sort_keys=False
            )
        ]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # A log that cannot be written (a closed pipe, a full disk) must not fill stderr with tracebacks about itself.
    logging.raiseExceptions = False


def _in_order(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """What every line has comes first."""
    first = ("timestamp", "level", "event", "logger")
    return {key: event[key] for key in first if key in event} | {key: event[key] for key in event if key not in first}


class _Exceptions:
    """Keeps the traceback of defects (logged as errors) and drops that of expected failures, which are one sentence."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        info = event.get("exc_info")
        if not info or self._always or event.get("level") in ("error", "critical"):
            return event
        del event["exc_info"]
        error = info if isinstance(info, BaseException) else (info[1] if isinstance(info, tuple) else sys.exc_info()[1])
        if error is not None:
            event.setdefault("error", f"{type(error).__name__}: {error}")
        return event


def clean(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """A processor: secrets redacted, text bounded and free of control characters, numbers that JSON lacks as text."""
    for key, value in event.items():
        if key != "exc_info" and not key.startswith("_"):
            event[key] = REDACTED if _SECRET_KEY.fullmatch(key) else _cleaned(value, DEPTH_LIMIT)
    return event


def _cleaned(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > 0 and isinstance(value, Mapping):
        return {
            str(key): REDACTED if _SECRET_KEY.fullmatch(str(key)) else _cleaned(inner, depth - 1)
            for key, inner in value.items()
        }
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(inner, depth - 1) for inner in value]
    text = str(value)
    if len(text) > TEXT_LIMIT_CHARACTERS:
        text = f"{text[:TEXT_LIMIT_CHARACTERS]}... ({len(text)} characters)"
    text = _SECRET_TEXT.sub(lambda match: f"{match[1]}{REDACTED}" if match[1] else f"{REDACTED}@", text)
    return printable(text)  # a terminal would obey escape sequences that a server sent
