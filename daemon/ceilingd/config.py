"""The settings: frozen, checked, from flags, environment, file and defaults. The only reader of the environment.

A value from a flag wins over one from the environment, that over the file, that over the default; tables are merged key by
key, lists are replaced whole. The descriptions of the fields are the documentation: `--help` and the table in README are
made of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from ceilingd.config_problems import Layer, describe, nearest
from ceilingd.links.rates import WIDTHS_LANES

DEFAULT_FILE = Path("/etc/ceilingd/ceilingd.toml")
ENVIRONMENT_PREFIX = "CEILINGD_"
FILE_VARIABLE = "CEILINGD_CONFIG"
FILE_LIMIT_BYTES = 1024 * 1024
NAME_LIMIT_CHARACTERS = 64


class ConfigError(Exception):
    """The configuration cannot be used. `problems` holds one sentence each: the key, what is wrong, what would be right."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


# --------------------------------------------------------------------------------------------------- values
# A ValueError says what the value must be and is shown with it; a "private" error is the whole sentence after the key.


def _private(sentence: str) -> PydanticCustomError:
    # The template of a custom error has braces of its own; the sentence goes in as a value.
    return PydanticCustomError("private", "{sentence}", {"sentence": sentence})


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_truth_value)]
Count = Annotated[int, BeforeValidator(_no_truth_value)]
Seconds = Annotated[Number, Field(gt=0, le=86400)]
Interval = Annotated[Number, Field(ge=0.05, le=86400)]
"""Seconds between two reads. Below 0.05 a daemon that should cost nothing would be a load of its own."""

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_UUID = re.compile(r"(GPU|MIG)-([0-9a-z/-]{1,80})", re.IGNORECASE)


def gpu_key(text: str) -> str:
    """A UUID or PCI bus id as the driver and sysfs spell it: `GPU-4f1c...`, `0000:41:00.0`.

    NVML's eight-digit domain and a bus id without its domain are understood. Raises `ValueError`."""
    if match := _BUS_ID.fullmatch(text):
        domain, bus, device, function = match.groups()
        return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()
    if match := _UUID.fullmatch(text):
        return f"{match[1].upper()}-{match[2].lower()}"
    raise ValueError("must be a UUID (GPU-...) or a PCI bus id (0000:41:00.0)")


def _server_gpu(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if value.isascii() and value.isdigit():
            return int(value[:9])
        try:
            return gpu_key(value)
        except ValueError:
            pass
    raise ValueError("must be an NVML index (0), a UUID (GPU-...) or a PCI bus id (0000:41:00.0)")


def parse_listen_address(text: str) -> tuple[str | None, int]:
    """(host, port) of HOST:PORT, [IPV6]:PORT or :PORT; no host means all interfaces. Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if ":" in host and not bracketed:
        raise ValueError("must have its IPv6 address in brackets: [::1]:9939")
    if not colon or not (_is_ipv6(host) if bracketed else re.fullmatch(r"[A-Za-z0-9._-]*", host)):
        raise ValueError("must be HOST:PORT, [IPV6]:PORT or :PORT, such as 127.0.0.1:9939")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("must end in a port from 0 to 65535, such as 127.0.0.1:9939")
    return host or None, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


# --------------------------------------------------------------------------------------------------- settings


class ServerSettings(BaseModel):
    """One SGLang server to watch."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    url: str = Field(description="Base URL of the server, such as `http://127.0.0.1:30000`.")
    name: str = Field(default="", validate_default=True, description="Its name in the label `server`; default host:port.")
    gpus: tuple[Annotated[int | str, BeforeValidator(_server_gpu)], ...] | None = Field(
        default=None, description="Its GPUs in rank order, each by NVML index, UUID or PCI bus id."
    )
    model_config_path: Path | None = Field(
        default=None,
        validation_alias="model_config",
        description="config.json of the model or the folder that holds it; default the model path that the server "
        "reports, then the Hugging Face cache.",
    )
    draft_model_config_path: Path | None = Field(
        default=None, validation_alias="draft_model_config", description="The same for a separate draft model."
    )
    api_key_file: Path | None = Field(
        default=None, description="File that holds the API key; only where the server was started with `--api-key`."
    )

    @field_validator("url")
    @classmethod
    def _base_url(cls, url: str) -> str:
        if "@" in url:
            raise _private("holds a user or a password; leave them out and put the key into the file named by api_key_file")
        if "://" not in url:
            raise ValueError(f"must start with http:// or https://, such as http://{url[:200].lstrip('/')}")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ValueError("must be a URL such as http://127.0.0.1:30000 with a port up to 65535") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError("must start with http:// or https://")
        if not host or not (_is_ipv6(host) or re.fullmatch(r"[a-z0-9._-]+", host)) or not (url.isascii() and url.isprintable()):
            raise ValueError("must name a host, such as http://127.0.0.1:30000")
        if parts.query or parts.fragment or re.search(r"/(metrics|v1|server_info|model_info|health)\b", parts.path):
            raise ValueError(f"must be the base URL alone: {parts.scheme}://{parts.netloc}")
        return url.rstrip("/")

    @field_validator("name")
    @classmethod
    def _label(cls, name: str, info: Any) -> str:
        if name == "" and "url" in info.data:
            parts = urlsplit(info.data["url"])
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        if name != name.strip() or not name.isprintable() or len(name) > NAME_LIMIT_CHARACTERS:
            raise ValueError(f"must be 1 to {NAME_LIMIT_CHARACTERS} printable characters with no space around them")
        return name


class GpuSettings(BaseModel):
    """What is declared about one GPU, keyed by UUID or PCI bus id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expected_generation: Count | None = Field(
        default=None, ge=1, le=6, description="PCIe generation under load; default the most that GPU and system can do."
    )
    expected_width: Count | None = Field(default=None, description="PCIe lanes under load; default likewise.")
    memory_bandwidth_bytes_per_second: Number | None = Field(
        default=None, gt=0, description="Peak memory bandwidth; default from the driver, then from the GPU table."
    )

    @field_validator("expected_width")
    @classmethod
    def _width(cls, width: int | None) -> int | None:
        if width is not None and width not in WIDTHS_LANES:
            raise ValueError(f"must be a width that a PCIe link has: {', '.join(map(str, WIDTHS_LANES))}")
        return width


class CeilingSettings(BaseModel):
    """Constants of the ceiling model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth_efficiency: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of peak memory bandwidth that decoding gets; default by GPU and weight format, marked as assumed.",
    )
    fixed_seconds: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Scheduling, sampling, launch gaps of a round; default 0.0005, marked as assumed.",
    )
    allreduce_latency_seconds: Number | None = Field(
        default=None, ge=0, le=1, description="Latency of one all-reduce; default by kind of link, marked as assumed."
    )


class LinkSettings(BaseModel):
    """When a link below its expected setting counts as degraded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace_seconds: Seconds = Field(default=5.0, description="Time below the expected link, with work, before it is degraded.")
    recovery_seconds: Seconds = Field(default=3.0, description="Time back at the expected link, with work, before it is full.")
    settle_seconds: Number = Field(default=300.0, ge=0, le=86400, description="Time after boot in which nothing is degraded.")
    agreeing_samples: Count = Field(default=3, ge=1, le=100, description="Samples that must agree before a state changes.")


class Config(BaseModel):
    """Everything the daemon can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen_address: str = Field(default="127.0.0.1:9939", description="Where to serve HTTP: HOST:PORT, [IPV6]:PORT or :PORT.")
    sample_interval_seconds: Interval = Field(default=1.0, description="Between two reads of a server, or of slow NVML values.")
    link_sample_interval_seconds: Interval = Field(default=0.2, description="Between two reads of the links.")
    nvml_call_timeout_seconds: Seconds = Field(default=2.0, description="Longest wait for one NVML call.")
    nvml_library: Path | None = Field(default=None, description="File to load as libnvidia-ml.so.1; default the system's.")
    server_timeout_seconds: Seconds = Field(default=5.0, description="Longest wait for one scrape of a server.")
    server_body_limit_bytes: Count = Field(
        default=8 * 1024 * 1024, gt=0, le=1024**3, description="Largest body accepted from a server."
    )
    state_directory: Path | None = Field(default=None, description="Where to keep what was learned about links. Not used yet.")
    sysfs_root: Path = Field(default=Path("/sys"), description="Where sysfs is mounted. Not used yet.")
    procfs_root: Path = Field(default=Path("/proc"), description="Where procfs is mounted.")
    hf_cache: Path | None = Field(
        default=None,
        description="Hugging Face cache to look for config.json in; default HF_HUB_CACHE, then HF_HOME/hub, then "
        "~/.cache/huggingface/hub.",
    )
    discovery: bool = Field(default=True, description="Find local SGLang servers when none are listed. Not used yet.")
    servers: tuple[ServerSettings, ...] = Field(default=(), description="The SGLang servers to watch.")
    gpus: dict[str, GpuSettings] = Field(
        default_factory=dict, description="What is declared about single GPUs, by UUID or PCI bus id."
    )
    ceiling: CeilingSettings = CeilingSettings()
    links: LinkSettings = LinkSettings()
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, JSON lines otherwise."
    )

    @field_validator("listen_address")
    @classmethod
    def _listen_address(cls, text: str) -> str:
        parse_listen_address(text)
        return text

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpu_keys(cls, gpus: object) -> object:
        if not isinstance(gpus, dict):
            return gpus
        normal: dict[str, Any] = {}
        for text, declared in gpus.items():
            try:
                key = gpu_key(str(text))
            except ValueError as error:
                raise _private(f"has the key {json.dumps(str(text)[:80])}, but a key {error}") from None
            if key in normal:
                raise _private(f"declares {key} twice: keep one of the two tables")
            normal[key] = declared
        return normal

    @field_validator("servers")
    @classmethod
    def _names_differ(cls, servers: tuple[ServerSettings, ...]) -> tuple[ServerSettings, ...]:
        seen: set[str] = set()
        for server in servers:
            if server.name in seen:
                raise _private(f"has two servers with the name {json.dumps(server.name)}: give each a name of its own")
            seen.add(server.name)
        return servers


# --------------------------------------------------------------------------------------------------- loading


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
    return default_file if default_file.exists() else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            body = file.read(FILE_LIMIT_BYTES + 1)
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
    except RecursionError:
        raise ConfigError(f"{path}: its tables are nested too deeply") from None


def _unusable_paths(config: Config, given: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Path, str]]:
    """(place, path, what it must be) of every path that was given and cannot be used."""
    for key in ("sysfs_root", "procfs_root", "hf_cache"):
        if key in given and not getattr(config, key).is_dir():
            yield (key,), getattr(config, key), "must be a folder that exists"
    if config.nvml_library is not None and not config.nvml_library.is_file():
        yield ("nvml_library",), config.nvml_library, "must be a file that exists"
    for index, server in enumerate(config.servers):
        for key, path in (("model_config", server.model_config_path), ("draft_model_config", server.draft_model_config_path)):
            if path is not None and not _readable(path / "config.json" if path.is_dir() else path):
                yield ("servers", index, key), path, "must be a config.json that can be read, or the folder that holds one"
        if server.api_key_file is not None and not _readable(server.api_key_file):
            yield ("servers", index, "api_key_file"), server.api_key_file, "must be a file that can be read and is not empty"


def _readable(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(file.read(1))
    except (OSError, ValueError):
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
