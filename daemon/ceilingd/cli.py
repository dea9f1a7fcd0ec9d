"""The command line. What a command needs is imported inside it, so that `ceilingd --help` is quick."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from ceilingd import __version__

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_OUTPUT_FAILED = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
DEMO_WITHOUT = frozenset({"servers", "gpus"})
"""The demo brings its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ceilingd` with `argv` (the process's arguments when `None`); returns the exit code, never raises for bad input."""
    if argv is None:
        _prepare_process()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # in an ASCII locale a model's name is no reason to fail
    try:
        code = _main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _OUTPUT_FAILED or error.filename is not None:
            raise
        if error.errno != errno.EPIPE:  # with EPIPE the reader has gone (`ceilingd ... | head`), and needs no sentence
            with suppress(OSError):
                print(f"ceilingd: the output cannot be written: {error.strerror}", file=sys.stderr)
        # The interpreter flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def _prepare_process() -> None:
    """Make sure of what the shell may have left out: three open standard streams, and signals that end us without a traceback.

    An event loop takes the number of a closed stream for a socket of its own and aborts when it closes it. The daemon puts its
    own handlers in place of these once it runs, and these are back while it is torn down."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`, or a shell's background job
            signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _main(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(next((word for word in words if not word.startswith("-")), None))
    try:
        namespace, unknown = parser.parse_known_args(words)
        if unknown:
            (namespace.parser or parser).refuse(unknown)
    except SystemExit as end:  # argparse's way to end after --help, --version and mistakes
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    if namespace.parser is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    run: Callable[[argparse.Namespace], int] = namespace.run
    return run(namespace)


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, instead of the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the sentence for arguments that nobody knows."""
        word = next((each for each in unknown if each.startswith("-")), None)
        if word is None:
            self.error(f"unknown argument {unknown[0]!r}")
        import difflib

        name = word.partition("=")[0]
        known = [option.lstrip("-") for option in self._option_string_actions]
        close = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.7)
        self.error(f"unknown flag {name}" + (f" (did you mean --{close[0]}?)" if close else ""))


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    summary: str
    description: str
    """Ends with one example."""
    fill: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _parser(chosen: str | None) -> _Parser:
    """The parser; only the command `chosen` gets its flags, for which most of the program is imported."""
    parser = _Parser(
        prog="ceilingd",
        description="The decode ceiling of SGLang servers and the state of their PCIe links, live, as Prometheus metrics.",
        epilog="To see it without a GPU or a server: ceilingd demo",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ceilingd {__version__}")
    parser.set_defaults(parser=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command.name == chosen:
            command.fill(subparser)
        subparser.set_defaults(parser=subparser, run=command.run)
    return parser


# --------------------------------------------------------------------------------------------------- run, demo


def _add_settings(parser: argparse.ArgumentParser) -> None:
    from ceilingd import config_load

    parser.usage = f"{parser.prog} [--config FILE] [settings]"
    config_load.add_arguments(parser)


def _add_demo_settings(parser: argparse.ArgumentParser) -> None:
    from ceilingd import config_load

    parser.add_argument(
        "--speed",
        type=_speed,
        default=1.0,
        metavar="FACTOR",
        help="how many times faster the story runs, 0.1 to 100 (default: 1)",
    )
    parser.usage = f"{parser.prog} [--speed FACTOR] [settings]"
    config_load.add_arguments(parser, without=DEMO_WITHOUT)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.1 <= speed <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.1 to 100")
    return speed


def _run(namespace: argparse.Namespace, demo: bool = False) -> int:
    from ceilingd import config_load, logs

    try:
        settings = config_load.load(namespace, without=DEMO_WITHOUT if demo else frozenset())
    except config_load.ConfigError as error:
        return _refused(namespace, error)
    logs.configure(settings.log_level, settings.log_format, color=config_load.color_wanted(sys.stderr))

    from ceilingd import app

    try:
        return app.run(settings, demo=demo, speed=namespace.speed if demo else 1.0)
    except app.StartError as error:
        print(f"{namespace.parser.prog}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _demo(namespace: argparse.Namespace) -> int:
    return _run(namespace, demo=True)


def _refused(namespace: argparse.Namespace, error: Exception) -> int:
    for problem in str(error).splitlines():
        print(f"{namespace.parser.prog}: {problem}", file=sys.stderr)
    return EXIT_USAGE


# --------------------------------------------------------------------------------------------------- predict, check, metrics


def _add_predict(parser: argparse.ArgumentParser) -> None:
    from ceilingd import predict

    predict.add_arguments(parser)


def _predict(namespace: argparse.Namespace) -> int:
    from ceilingd import predict

    return predict.run(namespace)


def _add_check(parser: argparse.ArgumentParser) -> None:
    from ceilingd import config_load

    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.usage = f"{parser.prog} [--json] [--config FILE] [settings]"
    config_load.add_arguments(parser)


def _check(namespace: argparse.Namespace) -> int:
    from ceilingd import config_load

    try:
        loaded = config_load.load_with_origin(namespace)
    except config_load.ConfigError as error:
        return _refused(namespace, error)

    from ceilingd import check, logs

    logs.configure("error", "console", color=config_load.color_wanted(sys.stderr))
    return check.run(loaded, as_json=namespace.json)


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print daemon/METRICS.md instead of one line per metric")


def _metrics(namespace: argparse.Namespace) -> int:
    if namespace.markdown:
        from ceilingd.collectors.markdown import metrics_markdown

        print(metrics_markdown(), end="")
        return 0
    from ceilingd.collectors import FAMILIES

    for family in FAMILIES:
        print(f"{family.name}  {family.kind}  {family.documentation}")
    return 0


_COMMANDS = (
    _Command(
        "run",
        "the daemon: watch this host's GPUs, links and SGLang servers",
        "Runs until SIGTERM or SIGINT and serves /metrics. Starts without an NVIDIA driver, too, and then serves what it can.\n"
        "A flag wins over the environment, that over the file, that over the default.\n\n"
        "  ceilingd run --server http://127.0.0.1:30000 --listen-address :9939",
        _add_settings,
        _run,
    ),
    _Command(
        "demo",
        "the daemon on an embedded replay: no GPU, no server, no configuration",
        "Two RTX A6000 serve Qwen3.6-27B; one link stays at Gen1 under load, then recovers. Everything behind the source\n"
        "is what `ceilingd run` uses; servers and GPUs of a configuration are passed over.\n\n"
        "  ceilingd demo --speed 4",
        _add_demo_settings,
        _demo,
    ),
    _Command(
        "predict",
        "the ceiling of a model on given hardware, offline",
        "The most tokens per second that decoding can reach, term by term. Needs no GPU and no server.\n\n"
        '  ceilingd predict --parameters 27e9 --gpu "RTX A6000" --tensor-parallel 2 --pcie-generation 4 --pcie-width 16',
        _add_predict,
        _predict,
    ),
    _Command(
        "check",
        "validate the configuration and look at everything it names, once",
        "Says where settings came from, what the driver shows, and for each server what it offers and what is missing,\n"
        "each with the cure. Exit code 0: all that was asked for works; 1: something does not; 2: the configuration is wrong.\n"
        "A missing NVIDIA driver is a warning, unless the configuration names GPUs or nvml_library: then it is an error.\n\n"
        "  ceilingd check --config ceilingd.toml",
        _add_check,
        _check,
    ),
    _Command(
        "metrics",
        "list every metric with its type and meaning",
        "One line per metric; with --markdown the page daemon/METRICS.md.\n\n  ceilingd metrics --markdown",
        _add_metrics,
        _metrics,
    ),
)
