"""The command line: what it knows, what it refuses, and what it hands on."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from ceilingd import __version__, app, cli, config_load
from ceilingd.collectors import FAMILIES
from ceilingd.collectors.markdown import metrics_markdown
from ceilingd.config import Config, ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ("run", "demo", "predict", "check", "metrics")


@pytest.fixture(autouse=True)
def _no_configuration_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ceilingd.config_load.DEFAULT_FILE", tmp_path / "absent.toml")
    monkeypatch.setattr("ceilingd.logs.configure", lambda *_, **__: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, bool, float]]:
    calls: list[tuple[Config, bool, float]] = []

    def run(settings: Config, demo: bool = False, speed: float = 1.0) -> int:
        calls.append((settings, demo, speed))
        return 0

    monkeypatch.setattr(app, "run", run)
    return calls


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the words are refused."""
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    return line


# --------------------------------------------------------------------------------------------------- help


def test_without_a_command_help_is_printed_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: ceilingd" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert tuple(re.findall(r"^    ([a-z]+)  ", capsys.readouterr().out, re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_teaches_by_an_example_of_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert re.search(rf"^  ceilingd {command}\b", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", ["run", "check"])
def test_help_shows_every_setting_with_its_default_and_meaning(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for setting in config_load.settings():
        if setting.is_flag and setting.key != "servers":
            entry = text[text.index(f"  {config_load.flag(setting.key)}") :]
            assert setting.description in entry
            assert not setting.default or f"{setting.description} (default: {setting.default})" in entry
    assert "--server URL" in text


def test_the_demo_takes_settings_but_no_servers_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--help"]) == 0
    flags = set(re.findall(r"^  (--[a-z.-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {"--speed", "--listen-address", "--links.grace-seconds"} <= flags
    assert not {"--server", "--servers", "--gpus"} & flags


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ceilingd {__version__}\n"


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("--help", "pydantic aiohttp pynvml structlog prometheus_client tomllib"),
        ("--version", "pydantic aiohttp pynvml structlog prometheus_client tomllib"),
        ("predict --help", "aiohttp pynvml structlog prometheus_client pydantic_settings"),
    ],
)
def test_what_needs_no_daemon_imports_none(words: str, without: str) -> None:
    program = (
        "import sys; from ceilingd.cli import main; assert main(sys.argv[1].split()) == 0; "
        "loaded = set(sys.argv[2].split()) & set(sys.modules); assert not loaded, loaded"
    )
    result = subprocess.run([sys.executable, "-c", program, words, without], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# --------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--lsiten-address", ":1"], "ceilingd run: unknown flag --lsiten-address (did you mean --listen-address?)"),
        (["run", "--listen-adress=:1"], "ceilingd run: unknown flag --listen-adress (did you mean --listen-address?)"),
        (["run", "--qqqq"], "ceilingd run: unknown flag --qqqq"),
        (["run", "--bogus"], "ceilingd run: unknown flag --bogus; see"),
        (["run", "--listen", ":1"], "ceilingd run: unknown flag --listen"),
        (["demo", "--server", "http://a"], "ceilingd demo: unknown flag --server"),
        (["run", "extra"], "ceilingd run: unknown argument 'extra'"),
        (["--nonsense"], "ceilingd: unknown flag --nonsense"),
        (["demo", "--speed", "0"], "ceilingd demo: argument --speed: '0' is not a number from 0.1 to 100"),
        (["demo", "--speed", "nan"], "ceilingd demo: argument --speed: 'nan' is not a number from 0.1 to 100"),
        (["run", "--listen-address"], "ceilingd run: argument --listen-address: expected one argument"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words)
    assert said.startswith(line)
    assert said.endswith(" --help")


def test_an_unknown_command_is_one_line_that_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve")
    assert "serve" in said
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("command", ["run", "demo", "check"])
def test_a_bad_setting_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, command, "--sample-interval-seconds", "0")
    assert said == f'ceilingd {command}: --sample-interval-seconds is "0", but must be at least 0.05'


def test_each_bad_setting_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--sample-interval-seconds", "0", "--log-level", "loud"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


# --------------------------------------------------------------------------------------------------- what is handed on


def test_run_starts_the_daemon_with_the_settings(started: list[Any]) -> None:
    assert cli.main(["run", "--server", "http://a:1"]) == 0
    [(settings, demo, speed)] = started
    assert settings.servers == (ServerSettings(url="http://a:1"),)
    assert (demo, speed) == (False, 1.0)


def test_the_demo_passes_over_servers_and_gpus_of_the_file(started: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('log_level = "debug"\ngpus = 1\n[[servers]]\nurl = "http://a:1"\nmodel_config = "/nowhere"\n')
    assert cli.main(["demo", "--config", str(path), "--speed", "4"]) == 0
    [(settings, demo, speed)] = started
    assert (settings.servers, settings.gpus, settings.log_level) == ((), {}, "debug")
    assert (demo, speed) == (True, 4.0)


def test_what_stops_the_start_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, **__: object) -> int:
        raise app.StartError("127.0.0.1:9939 is in use: stop what listens there or choose another listen_address")

    monkeypatch.setattr(app, "run", run)
    assert cli.main(["run"]) == 1
    assert capsys.readouterr().err.startswith("ceilingd run: 127.0.0.1:9939 is in use")


def test_an_interrupt_outside_the_daemon_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", run)
    assert cli.main(["run"]) == 130


def test_metrics_lists_each_family_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [family.name for family in FAMILIES]


def test_metrics_as_markdown_is_the_generated_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--markdown"]) == 0
    assert capsys.readouterr().out == metrics_markdown()
