"""README says what is true: its commands exist, with the flags it names, and its generated parts are up to date."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from ceilingd.collectors import FAMILIES
from support import installed, readme

ROOT = Path(__file__).parents[2]
README = readme.README.read_text()


def shell_commands(text: str) -> list[str]:
    """Every command of every shell block: comments and prompts gone, continued lines joined."""
    commands = []
    for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                commands.append(shlex.join(words))
    return commands


def commands_of(program: str) -> list[str]:
    return [command for command in shell_commands(README) if shlex.split(command)[0] == program]


@cache
def help_of(*subcommand: str) -> str:
    result = installed.run(*subcommand, "--help")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_first_commands_are_the_two_that_need_no_setup() -> None:
    assert shell_commands(README)[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", commands_of("make"))
def test_make_knows_the_target(command: str) -> None:
    result = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands_of("ceilingd"))
def test_ceilingd_knows_the_command_and_its_flags(command: str) -> None:
    words = shlex.split(command)[1:]
    subcommand = [word for word in words[:1] if not word.startswith("-")]
    assert all(word in help_of() for word in subcommand)
    known = set(re.findall(r"--[a-z][a-z0-9-]*", help_of(*subcommand)))
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_every_command_is_in_the_table() -> None:
    table = set(re.findall(r"^\| `ceilingd ([a-z]+)", README, re.MULTILINE))
    assert table == set(re.findall(r"^    ([a-z]+)  ", help_of(), re.MULTILINE))


def test_the_generated_parts_are_up_to_date() -> None:
    assert readme.generated(README) == README, "make docs"


def test_the_prediction_shown_is_the_one_that_comes_out() -> None:
    match = re.search(r"^```sh\n(ceilingd predict .*?)```\n+```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert match is not None
    [command] = shell_commands(match[0])
    result = installed.run(*shlex.split(command)[1:])
    assert result.returncode == 0, result.stderr
    assert match[2].splitlines() == [line.rstrip() for line in result.stdout.splitlines()]


def test_the_metrics_shown_exist() -> None:
    shown = set(re.findall(r"^(ceilingd_\w+)\{", README, re.MULTILINE))
    assert shown
    assert shown <= {family.name for family in FAMILIES}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"])
def test_links_lead_to_files_that_exist(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
