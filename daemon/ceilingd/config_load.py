"""Where the settings come from: flags, environment, file, defaults. The only reader of the environment.

A value from a flag wins over one from the environment, that over the file, that over the default; tables are merged key by
key, lists are replaced whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from ceilingd.config import CeilingSettings, Config, GpuSettings, LinkSettings, ServerSettings
from ceilingd.config_problems import Layer, describe, nearest
from ceilingd.files import read_file

DEFAULT_FILE = Path("/etc/ceilingd/ceilingd.toml")
ENVIRONMENT_PREFIX = "CEILINGD_"
FILE_VARIABLE = "CEILINGD_CONFIG"
FILE_LIMIT_BYTES = 1024 * 1024


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one sentence each: the key, what is wrong, what would be right."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where it came from."""

    config: Config
    file: Path | None
    """The file that was read; `None` when none was given and the default one does not exist."""
    variables: tuple[str, ...]
    """Environment variables that set something."""
    flags: tuple[str, ...]
    """Flags that set something."""


def load(
    arguments: argparse.Namespace | None = None,
    environment: Mapping[str, str] = os.environ,
    default_file: Path | None = None,
    without: frozenset[str] = frozenset(),
) -> Config:
    """The configuration; see `load_with_origin`."""
    return load_with_origin(arguments, environment, default_file, without).config


def load_with_origin(
    arguments: argparse.Namespace | None = None,
    environment: Mapping[str, str] = os.environ,
    default_file: Path | None = None,
    without: frozenset[str] = frozenset(),
) -> Loaded:
    """The configuration from `arguments` (parsed by a parser with `add_arguments`), `environment`, file and defaults.

    `default_file`: instead of `DEFAULT_FILE`. `without`: top-level keys to pass over wherever they stand.
    Raises `ConfigError`."""
    flags = _flags_layer(arguments)
    variables = _environment_layer(environment)
    file = _file(arguments, environment, default_file or DEFAULT_FILE)
    layers = [flags, variables, *([Layer("file", _read_toml(file), str(file))] if file is not None else [])]
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = _merge(merged, {key: value for key, value in layer.values.items() if key not in without})
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(*(describe(problem, layers, Config) for problem in error.errors(include_url=False))) from None
    if problems := [f"{_name(layers, loc)} is {path}, but {must}" for loc, path, must in _unusable_paths(config, merged)]:
        raise ConfigError(*problems)
    if config.hf_cache is None:
        config = config.model_copy(update={"hf_cache": _hf_cache(environment)})
    return Loaded(config, file, tuple(variables.spelled.values()), tuple(dict.fromkeys(flags.spelled.values())))


def _name(layers: list[Layer], loc: tuple[str | int, ...]) -> str:
    return max(layers, key=lambda layer: layer.depth(loc)).name(loc)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _file(arguments: argparse.Namespace | None, environment: Mapping[str, str], default_file: Path) -> Path | None:
    named = getattr(arguments, "config", None) or environment.get(FILE_VARIABLE)
    if named:
        return Path(named)
    try:
        return default_file if default_file.exists() else None
    except OSError:  # its folder may not be read: what is in there was meant for us
        return default_file


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        body = read_file(path, FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; correct --config or {FILE_VARIABLE}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; name the TOML file in it") from None
    except PermissionError:
        raise ConfigError(f"{path}: the user that runs ceilingd may not read this file; change its mode or owner") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(body) > FILE_LIMIT_BYTES:
        raise ConfigError(f"{path}: larger than {FILE_LIMIT_BYTES // 1024} KiB; this is no configuration of ceilingd")
    try:
        return tomllib.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line} is not UTF-8; save the file in that encoding") from None
    except tomllib.TOMLDecodeError as error:
        text, _, place = str(error).partition(" (at ")
        raise ConfigError(f"{path}: {place.rstrip(')') or 'somewhere'} is not TOML: {text[:1].lower()}{text[1:]}") from None
    except ValueError:  # an integer of thousands of digits, which Python refuses to read
        raise ConfigError(f"{path}: holds a number that is too long") from None
    except RecursionError:
        raise ConfigError(f"{path}: its tables are nested too deeply") from None


def _unusable_paths(config: Config, given: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Path, str]]:
    """(place, path, what it must be) of every path that was given and cannot be used."""
    for key in ("sysfs_root", "procfs_root", "hf_cache"):
        if key in given and not _is_folder(getattr(config, key)):
            yield (key,), getattr(config, key), "must be a folder that can be read"
    if config.nvml_library is not None and not _is_file(config.nvml_library):
        yield ("nvml_library",), config.nvml_library, "must be a file that can be read"
    for index, server in enumerate(config.servers):
        for key, path in (("model_config", server.model_config_path), ("draft_model_config", server.draft_model_config_path)):
            if path is not None and not _readable(path / "config.json" if _is_folder(path) else path):
                yield ("servers", index, key), path, "must be a config.json that can be read, or the folder that holds one"
        if server.api_key_file is not None and not _readable(server.api_key_file):
            yield ("servers", index, "api_key_file"), server.api_key_file, "must be a file that can be read and is not empty"


def _readable(path: Path) -> bool:
    try:
        return bool(read_file(path, 1))
    except (OSError, ValueError):
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a folder above it may not be read
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _hf_cache(environment: Mapping[str, str]) -> Path | None:
    """Where huggingface_hub keeps its cache, by its own rules; `None` without a home directory."""
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environment.get("HF_HOME"):
        return Path(home) / "hub"
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / "huggingface" / "hub"
    user = environment.get("HOME")
    return Path(user) / ".cache" / "huggingface" / "hub" if user else None


def color_wanted(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Colours on `stream`: only on a terminal that has them, and not against NO_COLOR (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


# --------------------------------------------------------------------------------------------------- environment


class _Keys(BaseSettings, Config):
    """The keys of `Config` as pydantic-settings reads them from the environment; never instantiated."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)


class _Environment(EnvSettingsSource):
    """pydantic-settings' reader on a given environment instead of the process's."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        super().__init__(_Keys)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._variables.items()}


# Kubernetes puts the address of every Service of the namespace into the environment; one named ceilingd gives these.
_SERVICE_LINK = re.compile(r"CEILINGD_([A-Z0-9_]*_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)\w*)?)")


def _environment_layer(environment: Mapping[str, str]) -> Layer:
    variables = {
        name: value
        for name, value in environment.items()
        # A variable that is set to nothing counts as not set: compose files pass those on for what nobody filled in.
        if name.startswith(ENVIRONMENT_PREFIX) and value and name != FILE_VARIABLE and not _SERVICE_LINK.fullmatch(name)
    }
    problems = []
    spelled = {}
    for name, value in variables.items():
        path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        model = _table_at(path[:-1])
        field = None if model is None else model.model_fields.get(path[-1])
        if field is None:
            valid = [setting.key.upper().replace(".", "__") for setting in settings() if setting.is_flag]
            hint = nearest(name.removeprefix(ENVIRONMENT_PREFIX), valid, prefix=ENVIRONMENT_PREFIX)
            problems.append(f"{name} is no variable of ceilingd{hint}")
        elif _takes_json(field):
            try:
                json.loads(value)
            except (ValueError, RecursionError) as error:
                problems.append(f"{name} must be JSON ({error})")
        spelled[path] = name
    if problems:
        raise ConfigError(*problems)
    return Layer("environment", _Environment(variables)(), spelled=spelled)


def _table_at(path: tuple[str, ...]) -> type[BaseModel] | None:
    """The settings that stand at `path`, as far as variables can name them."""
    if not path:
        return Config
    if len(path) == 1:
        tables: dict[str, type[BaseModel]] = {"ceiling": CeilingSettings, "links": LinkSettings}
        return tables.get(path[0])
    return GpuSettings if len(path) == 2 and path[0] == "gpus" else None


def _takes_json(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (tuple, dict) or _table(field) is not None


def _table(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return cast("type[BaseModel]", annotation) if is_table else None


# --------------------------------------------------------------------------------------------------- flags and documentation


@dataclass(frozen=True, slots=True)
class Setting:
    """One key as people write it."""

    key: str
    """`links.grace_seconds`, `servers[].url`, `gpus.<gpu>.expected_width`."""
    metavar: str
    default: str
    """Empty where the description says it."""
    description: str
    is_flag: bool = True
    """False for what is inside a list or a table with free keys: not a flag of its own."""


def settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the fields."""
    return tuple(_settings(Config, "", True))


def _settings(model: type[BaseModel], prefix: str, is_flag: bool) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key = prefix + (_key(name, field))
        if (table := _table(field)) is not None:
            yield from _settings(table, f"{key}.", is_flag)
            continue
        yield Setting(key, _metavar(name, field), _default(field), field.description or "", is_flag)
        if key == "servers":
            yield from _settings(ServerSettings, "servers[].", False)
        elif key == "gpus":
            yield from _settings(GpuSettings, "gpus.<gpu>.", False)


def _key(name: str, field: FieldInfo) -> str:
    return str(field.validation_alias or name)


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(get_args(field.annotation)) + "}"
    if get_origin(field.annotation) in (tuple, dict):
        return "JSON"
    if Path in (field.annotation, *get_args(field.annotation)):
        return "PATH"
    for suffix in ("seconds", "bytes", "address"):
        if name.endswith(suffix):
            return suffix.upper()
    return "NUMBER"


def _default(field: FieldInfo) -> str:
    default = field.get_default()
    if field.is_required() or field.default_factory is not None or default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def flag(key: str) -> str:
    """`--links.grace-seconds` of `links.grace_seconds`."""
    return "--" + key.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> None:
    """Every setting but those of the top-level keys in `without`, as a flag of `parser`; what is not given stays unset."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=None,
        help=f"TOML file (default: {FILE_VARIABLE}, then {DEFAULT_FILE} if it exists)",
    )
    groups = {
        "": parser.add_argument_group("settings", "each also as a key of the file and as CEILINGD_KEY in the environment"),
        "ceiling": parser.add_argument_group("constants of the ceiling model"),
        "links": parser.add_argument_group("when a link below its expected setting counts as degraded"),
    }
    for setting in settings():
        if not setting.is_flag or setting.key in without:
            continue
        group = groups[setting.key.rpartition(".")[0]]
        text = (setting.description + (f" (default: {setting.default})" if setting.default else "")).replace("%", "%%")
        dest, name = f"setting {setting.key}", flag(setting.key)
        if setting.key == "servers":
            either = group.add_mutually_exclusive_group()
            either.add_argument(
                "--server",
                action="append",
                dest="setting server",
                metavar="URL",
                default=argparse.SUPPRESS,
                help="An SGLang server to watch; once for each. Replaces the servers of file and environment.",
            )
            either.add_argument(name, dest=dest, metavar="JSON", default=argparse.SUPPRESS, help=f"In full: {_SERVERS}")
        elif Config.model_fields.get(setting.key, FieldInfo()).annotation is bool:
            group.add_argument(name, action=argparse.BooleanOptionalAction, dest=dest, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(name, dest=dest, metavar=setting.metavar, default=argparse.SUPPRESS, help=text)


_SERVERS = '[{"name": ..., "url": ..., "gpus": [0, 1]}]'


def _flags_layer(arguments: argparse.Namespace | None) -> Layer:
    values: dict[str, Any] = {}
    spelled: dict[tuple[str, ...], str] = {}
    for dest, value in vars(arguments).items() if arguments is not None else ():
        if not dest.startswith("setting "):
            continue
        key = dest.removeprefix("setting ")
        path = tuple(key.split("."))
        if key == "server":
            path, value = ("servers",), [{"url": url} for url in value]
            spelled.update({("servers", str(index), "url"): "--server" for index in range(len(value))})
        elif key in ("servers", "gpus"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{flag(key)} must be JSON ({error})") from None
        spelled[path] = flag(key)
        table = values
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = value
    return Layer("flags", values, spelled=spelled)


def settings_markdown() -> str:
    """The table of all settings for README."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for setting in settings():
        default = f"`{setting.default}`" if setting.default else ""
        rows.append(f"| `{setting.key}` | {default} | {setting.description.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"
