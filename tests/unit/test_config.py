"""Settings: which origin wins, what they become, and one sentence for every mistake."""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from yarl import URL

from ceilingd import config_load
from ceilingd.config import Config, ServerSettings, gpu_key, parse_listen_address
from ceilingd.config_load import ConfigError, load, load_with_origin

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
BAD = ROOT / "tests" / "data" / "config"
ABSENT = Path("/nowhere/ceilingd.toml")


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config_load.add_arguments(parser)
    return parser.parse_args(words)


def loaded(*words: str, environment: Mapping[str, str] | None = None, default_file: Path = ABSENT) -> Config:
    return load(flags(*words), environment or {}, default_file)


def problems(*words: str, environment: Mapping[str, str] | None = None, default_file: Path = ABSENT) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loaded(*words, environment=environment, default_file=default_file)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ceilingd.toml"
    path.write_text("""
        listen_address = "127.0.0.1:1"
        sample_interval_seconds = 3
        [links]
        grace_seconds = 1
        recovery_seconds = 2
        [[servers]]
        url = "http://in-file:30000"
    """)
    return path


# --------------------------------------------------------------------------------------------------- which origin wins


def test_defaults_alone_are_valid() -> None:
    assert loaded() == Config()


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(file: Path) -> None:
    environment = {"CEILINGD_LISTEN_ADDRESS": ":2", "CEILINGD_LINKS__GRACE_SECONDS": "7", "CEILINGD_CONFIG": str(file)}
    settings = loaded("--listen-address", ":3", environment=environment)
    assert settings.listen_address == ":3"
    assert settings.links.grace_seconds == 7
    assert settings.links.recovery_seconds == 2
    assert settings.sample_interval_seconds == 3
    assert settings.link_sample_interval_seconds == Config().link_sample_interval_seconds


def test_the_flag_names_the_file_before_the_variable_does(file: Path, tmp_path: Path) -> None:
    settings = loaded("--config", str(file), environment={"CEILINGD_CONFIG": str(tmp_path / "missing.toml")})
    assert settings.listen_address == "127.0.0.1:1"


def test_the_default_file_is_read_where_it_exists(file: Path) -> None:
    assert loaded(default_file=file).listen_address == "127.0.0.1:1"


def test_server_flags_replace_the_servers_of_the_file(file: Path) -> None:
    settings = loaded("--config", str(file), "--server", "http://a:1", "--server", "https://b/")
    assert [(server.name, server.url) for server in settings.servers] == [("a:1", "http://a:1"), ("b:443", "https://b")]


def test_lists_and_tables_come_as_json_from_flags_and_environment(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    servers = json.dumps([{"url": "http://a:1", "name": "x", "gpus": [1, "41:00.0"], "model_config": str(tmp_path)}])
    for settings in (loaded("--servers", servers), loaded(environment={"CEILINGD_SERVERS": servers})):
        [server] = settings.servers
        assert (server.name, server.gpus, server.model_config_path) == ("x", (1, "0000:41:00.0"), tmp_path)
    assert loaded("--gpus", '{"GPU-AB": {"expected_width": 8}}').gpus["GPU-ab"].expected_width == 8


def test_every_flag_is_a_variable_and_a_key_of_the_file(tmp_path: Path) -> None:
    values = {"PATH": str(tmp_path), "ADDRESS": ":1", "SECONDS": "0.5", "BYTES": "7", "NUMBER": "1"}
    special = {"servers": "[]", "gpus": "{}", "discovery": "false", "nvml_library": str(tmp_path / "library.so")}
    (tmp_path / "library.so").touch()
    for setting in config_load.settings():
        if setting.is_flag:
            value = special.get(setting.key) or values.get(setting.metavar) or setting.metavar.strip("{}").split(",")[-1]
            variable = "CEILINGD_" + setting.key.upper().replace(".", "__")
            by_variable = load_with_origin(flags(), {variable: value}, ABSENT)
            assert by_variable.variables == (variable,)
            words = ["--no-discovery"] if setting.key == "discovery" else [config_load.flag(setting.key), value]
            assert loaded(*words) == by_variable.config


def test_an_empty_variable_counts_as_unset() -> None:
    assert loaded(environment={"CEILINGD_LISTEN_ADDRESS": ""}) == Config()


@pytest.mark.parametrize(
    "name",
    [
        "CEILINGD_SERVICE_HOST",
        "CEILINGD_SERVICE_PORT_HTTP",
        "CEILINGD_PORT",
        "CEILINGD_PORT_9939_TCP_ADDR",
        "CEILINGD_X_SERVICE_HOST",
    ],
)
def test_the_addresses_that_kubernetes_injects_are_not_settings(name: str) -> None:
    assert loaded(environment={name: "tcp://10.0.0.1:9939"}) == Config()


def test_the_origin_of_the_settings_is_told(file: Path) -> None:
    origin = load_with_origin(flags("--config", str(file), "--server", "http://a:1"), {"CEILINGD_LOG_LEVEL": "debug"}, ABSENT)
    assert (origin.file, origin.variables, origin.flags) == (file, ("CEILINGD_LOG_LEVEL",), ("--server",))


def test_keys_can_be_passed_over_wherever_they_stand(file: Path) -> None:
    settings = load(
        flags("--config", str(file)), {"CEILINGD_GPUS": '{"nonsense": 1}'}, ABSENT, without=frozenset({"servers", "gpus"})
    )
    assert (settings.servers, settings.gpus, settings.listen_address) == ((), {}, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "HOME": "/c"}, Path("/a")),
        ({"HF_HOME": "/b", "HOME": "/c"}, Path("/b/hub")),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/c"}, Path("/x/huggingface/hub")),
        ({"HOME": "/c"}, Path("/c/.cache/huggingface/hub")),
        ({}, None),
    ],
)
def test_the_hugging_face_cache_is_where_its_own_library_keeps_it(environment: dict[str, str], cache: Path | None) -> None:
    assert loaded(environment=environment).hf_cache == cache


def test_the_shipped_example_is_valid_also_with_every_comment_taken_off(tmp_path: Path) -> None:
    example = ROOT / "deploy" / "ceilingd.example.toml"
    assert loaded("--config", str(example)).servers[0].name == "qwen"
    whole = tmp_path / "whole.toml"
    lines = [
        line[2:] if line.startswith(("# [", "# ")) and ("=" in line or "[" in line) else line
        for line in example.read_text().splitlines()
    ]
    keys = {
        "hf_cache": tmp_path,
        "model_config": tmp_path / "key",
        "draft_model_config": tmp_path / "key",
        "api_key_file": tmp_path / "key",
    }
    (tmp_path / "key").write_text("x")
    wanted = []
    for line in lines:
        name = line.partition(" =")[0]
        wanted.append(f'{name} = "{keys[name]}"' if name in keys else line)
    whole.write_text("\n".join(line for line in wanted if "--config FILE" not in line and "CEILINGD_LISTEN" not in line))
    settings = loaded("--config", str(whole))
    assert settings.gpus["0000:41:00.0"].memory_bandwidth_bytes_per_second == 768e9
    assert settings.ceiling.bandwidth_efficiency == 0.82
    assert settings.links == Config().links


# --------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("41:00.0", "0000:41:00.0"),
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("00000000:41:00.0", "0000:41:00.0"),
        ("00010000:E1:00.0", "10000:e1:00.0"),
        ("gpu-ABCDEF01-2345-6789-abcd-ef0123456789", "GPU-abcdef01-2345-6789-abcd-ef0123456789"),
    ],
)
def test_a_gpu_is_written_as_the_driver_and_sysfs_write_it(written: str, key: str) -> None:
    assert gpu_key(written) == key


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9939", ("127.0.0.1", 9939)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9939", ("::1", 9939)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        (":9939", (None, 9939)),
    ],
)
def test_a_listen_address_is_host_and_port(text: str, address: tuple[str | None, int]) -> None:
    assert parse_listen_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "9939", "a:", "a:b", "a:65536", "a:-1", "::1:9939", "[::1]", "[x]:1", "[:::]:1", "a b:1", "http://a:1", "a:١"]
)
def test_a_malformed_listen_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_listen_address(text)


def test_a_server_without_a_name_is_called_by_host_and_port() -> None:
    names = [server.name for server in loaded("--server", "http://[::1]:3", "--server", "http://host").servers]
    assert names == ["[::1]:3", "host:80"]


# --------------------------------------------------------------------------------------------------- mistakes

BAD_FILES = sorted(BAD.glob("*.bad.toml"))
"""Each says in its first line how it is refused."""


def test_there_are_bad_files() -> None:
    assert len(BAD_FILES) > 30


@pytest.mark.parametrize("path", BAD_FILES, ids=lambda path: path.name.removesuffix(".bad.toml"))
def test_a_bad_file_is_refused_with_one_sentence(path: Path) -> None:
    sentence = path.read_text(errors="replace").splitlines()[0].removeprefix("# refused: ")
    assert problems("--config", str(path)) == (f"{path}: {sentence}",)


@pytest.mark.parametrize("reason", ["server-url-password", "unknown-key-in-server"])
def test_no_secret_is_repeated(reason: str) -> None:
    [sentence] = problems("--config", str(BAD / f"{reason}.bad.toml"))
    assert "hunter2" not in sentence
    assert "sk-not-to-be-shown" not in sentence


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (("--sample-interval-seconds", "0"), {}, '--sample-interval-seconds is "0", but must be at least 0.05'),
        (("--links.grace-seconds", "x"), {}, '--links.grace-seconds is "x", but must be a number'),
        (("--server", "a"), {}, '--server is "a", but must start with http:// or https://, such as http://a'),
        (("--servers", "["), {}, "--servers must be JSON (Expecting value: line 1 column 2 (char 1))"),
        ((), {"CEILINGD_LINKS__GRACE_SECONDS": "-1"}, 'CEILINGD_LINKS__GRACE_SECONDS is "-1", but must be above 0'),
        ((), {"CEILINGD_CEILING": '{"fixed_seconds": 2}'}, "CEILINGD_CEILING.fixed_seconds is 2, but must be at most 1"),
        ((), {"CEILINGD_SERVERS": "nope"}, "CEILINGD_SERVERS must be JSON (Expecting value: line 1 column 1 (char 0))"),
        (
            (),
            {"CEILINGD_LISTEN_ADRESS": ":1"},
            "CEILINGD_LISTEN_ADRESS is no variable of ceilingd; did you mean CEILINGD_LISTEN_ADDRESS?",
        ),
        (
            (),
            {"CEILINGD_LINKS__GRACE": "1"},
            "CEILINGD_LINKS__GRACE is no variable of ceilingd; did you mean CEILINGD_LINKS__GRACE_SECONDS?",
        ),
        (
            (),
            {"CEILINGD_QQQQ": "1"},
            "CEILINGD_QQQQ is no variable of ceilingd; `ceilingd run --help` lists all",
        ),
        (("--sysfs-root", "/nowhere"), {}, "--sysfs-root is /nowhere, but must be a folder that can be read"),
        (("--nvml-library", "/nowhere"), {}, "--nvml-library is /nowhere, but must be a file that can be read"),
    ],
)  # fmt: skip
def test_a_bad_flag_or_variable_is_named_as_it_was_written(
    words: tuple[str, ...], environment: dict[str, str], sentence: str
) -> None:
    assert problems(*words, environment=environment) == (sentence,)


def test_the_origin_that_gave_the_bad_value_is_named_not_the_one_it_covers(file: Path) -> None:
    environment = {"CEILINGD_SAMPLE_INTERVAL_SECONDS": "0"}
    assert problems("--config", str(file), environment=environment)[0].startswith("CEILINGD_SAMPLE_INTERVAL_SECONDS is ")


def test_every_mistake_gets_its_sentence_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('sample_interval_seconds = 0\nlog_level = "loud"\n')
    assert len(problems("--config", str(path), "--links.agreeing-samples", "0")) == 3


def test_a_file_that_cannot_be_read_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (config_load.FILE_LIMIT_BYTES + 1))
    deep = tmp_path / "deep.toml"
    deep.write_text("a = " + "[" * 5000)
    missing = tmp_path / "missing.toml"
    assert problems("--config", str(missing)) == (f"{missing}: there is no such file; correct --config or CEILINGD_CONFIG",)
    assert problems("--config", str(tmp_path)) == (f"{tmp_path}: this is a folder; name the TOML file in it",)
    assert problems("--config", str(huge)) == (f"{huge}: larger than 1024 KiB; this is no configuration of ceilingd",)
    assert problems("--config", str(deep)) == (f"{deep}: its tables are nested too deeply",)
    [odd] = problems("--config", "a\0b")
    assert "cannot be read" in odd


def test_what_stands_under_an_unreadable_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")  # a mode would not stop the tests of a privileged user

    monkeypatch.setattr(Path, "stat", refuse)
    assert problems("--config", "c.toml") == (
        "c.toml: the user that runs ceilingd may not read this file; change its mode or owner",
    )
    assert problems(default_file=Path("c.toml")) == problems("--config", "c.toml")


def test_paths_under_an_unreadable_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied") if str(self) == "x" else FileNotFoundError(2, "No such file")

    monkeypatch.setattr(Path, "stat", refuse)
    servers = '[{"url": "http://a:1", "model_config": "x", "api_key_file": "x"}]'
    found = problems("--procfs-root", "x", "--hf-cache", "x", "--nvml-library", "x", "--servers", servers)
    assert [sentence.partition(" is x, but must be ")[0] for sentence in found] == [
        "--procfs-root",
        "--hf-cache",
        "--nvml-library",
        "--servers[0].model_config",
        "--servers[0].api_key_file",
    ]


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert problems("--config", str(fifo)) == (f"{fifo}: cannot be read (it is not a regular file)",)
    assert loaded("--config", os.devnull) == loaded()  # the usual way to say: no file
    servers = json.dumps([{"url": "http://a:1", "model_config": str(fifo), "api_key_file": str(fifo)}])
    assert len(problems("--servers", servers)) == 2


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "name", "gpus", "41:00.0"]) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([setting.key for setting in config_load.settings() if setting.is_flag] + ["nonsense"]), _values
    )
)
def test_anything_at_all_gives_a_configuration_or_sentences(values: dict[str, object]) -> None:
    environment = {"CEILINGD_" + key.upper().replace(".", "__"): json.dumps(value) for key, value in values.items()}
    found: tuple[str, ...] = ()
    try:
        load(None, environment, ABSENT)
    except ConfigError as error:
        found = error.problems
    assert all(sentence.startswith("CEILINGD_") and sentence.isprintable() for sentence in found)


@given(st.from_regex(r"https?://[^/]{0,9}[:.\\[\\]%a-f0-9]{0,9}(/[^/]{0,3})?", fullmatch=True))
def test_every_url_that_is_accepted_can_be_asked(url: str) -> None:
    try:
        server = ServerSettings(url=url)
    except ValidationError:
        return
    host = URL(server.url).host
    assert host
    assert server.name.isprintable()


# --------------------------------------------------------------------------------------------------- colours, documentation


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_not_against_no_color() -> None:
    assert config_load.color_wanted(_Terminal(), {"TERM": "xterm"})
    assert not config_load.color_wanted(_Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not config_load.color_wanted(_Terminal(), {"TERM": "dumb"})
    assert not config_load.color_wanted(io.StringIO(), {"TERM": "xterm"})


def test_every_setting_is_described_and_in_the_table() -> None:
    table = config_load.settings_markdown().splitlines()
    assert len(table) == 2 + len(config_load.settings())
    for setting, row in zip(config_load.settings(), table[2:], strict=True):
        assert setting.description.endswith(".")
        assert row.startswith(f"| `{setting.key}` | ")
    assert "| `listen_address` | `127.0.0.1:9939` | Where to serve HTTP: HOST:PORT, [IPV6]:PORT or :PORT. |" in table
    assert any(row.startswith("| `servers[].model_config` |") for row in table)
    assert any(row.startswith("| `gpus.<gpu>.expected_width` |") for row in table)


@pytest.mark.parametrize("host", ["a..b", "xn--a", "a" * 300])
def test_a_host_that_cannot_be_looked_up_is_refused(host: str) -> None:
    assert len(problems("--server", f"http://{host}:1")) == 1
    assert len(problems("--listen-address", f"{host}:1")) == 1


def test_a_secret_in_the_query_is_not_repeated() -> None:
    (sentence,) = problems("--server", "http://h/?token=SECRET")
    assert "SECRET" not in sentence
    assert "api_key_file" in sentence


def test_a_gpu_named_twice_and_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    servers = json.dumps([{"url": "http://a:1", "gpus": [0, 0]}])
    assert "each GPU once" in problems("--servers", servers)[0]
    path = tmp_path / "digits.toml"
    path.write_text("sample_interval_seconds = " + "9" * 5000)
    assert problems("--config", str(path)) == (f"{path}: holds a number that is too long",)
