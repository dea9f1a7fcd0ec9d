"""The settings: frozen and checked. Where they come from is `ceilingd.config_load`.

The descriptions of the fields are the documentation: `--help` and the table in README are made of them.
"""

from __future__ import annotations

import json
import re
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from ceilingd.links.rates import WIDTHS_LANES

NAME_LIMIT_CHARACTERS = 64


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
    if host and not bracketed and not _is_host_name(host):
        raise ValueError("must name a host whose parts are of 1 to 63 characters, such as 127.0.0.1:9939")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("must end in a port from 0 to 65535, such as 127.0.0.1:9939")
    return host or None, int(port)


def _is_host_name(text: str) -> bool:
    """Could this be looked up at all? What IDNA refuses makes the resolver raise instead of not finding it."""
    try:
        return len(text.encode("idna").decode("idna")) <= 253
    except UnicodeError:
        return False


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
        if parts.query or parts.fragment:  # which may hold a secret, so the sentence does not repeat the URL
            raise _private("must be the base URL alone, without ? or # and what follows; a key goes into api_key_file")
        if re.search(r"/(metrics|v1|server_info|model_info|health)\b", parts.path):
            raise ValueError(f"must be the base URL alone: {parts.scheme}://{parts.netloc}")
        if not _is_ipv6(host) and not _is_host_name(host):
            raise ValueError("must name a host whose parts are of 1 to 63 characters, such as http://127.0.0.1:30000")
        return url.rstrip("/")

    @field_validator("gpus")
    @classmethod
    def _gpus_differ(cls, gpus: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
        if gpus is not None and len(set(gpus)) != len(gpus):
            raise ValueError("must name each GPU once, in rank order")
        return gpus

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
