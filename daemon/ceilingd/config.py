"""The settings: frozen, checked, from flags, environment, file and defaults. The only reader of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Seconds = Annotated[float, Field(gt=0, le=86400)]


class ServerSettings(BaseModel):
    """One SGLang server to watch."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    url: str = Field(description="Base URL of the server, http or https.")
    name: str = Field(default="", description="Name in the label `server`; host:port of the URL when left out.")
    gpus: tuple[int | str, ...] | None = Field(
        default=None, description="Its GPUs in rank order: NVML index, UUID or PCI bus id."
    )
    model_config_path: Path | None = Field(
        default=None, alias="model_config", description="config.json of the model, or the folder that holds it."
    )
    draft_model_config_path: Path | None = Field(
        default=None, alias="draft_model_config", description="The same for a separate draft model."
    )
    api_key_file: Path | None = Field(default=None, description="File holding the API key, only where the server asks for it.")


class GpuSettings(BaseModel):
    """What is declared about one GPU, keyed by UUID or PCI bus id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expected_generation: int | None = Field(default=None, ge=1, le=6)
    expected_width: int | None = Field(default=None)
    memory_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)


class CeilingSettings(BaseModel):
    """Constants of the ceiling model that are declared rather than learned or assumed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth_efficiency: float | None = Field(default=None, gt=0, le=1)
    fixed_seconds: float | None = Field(default=None, ge=0, le=1)
    allreduce_latency_seconds: float | None = Field(default=None, ge=0, le=1)


class LinkSettings(BaseModel):
    """When a link below its expected setting counts as degraded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grace_seconds: Seconds = 5.0
    recovery_seconds: Seconds = 3.0
    settle_seconds: float = Field(default=300.0, ge=0, le=86400)
    agreeing_samples: int = Field(default=3, ge=1, le=100)


class Config(BaseModel):
    """Everything the daemon can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen_address: str = Field(default="127.0.0.1:9939", description="Where to serve HTTP: HOST:PORT, [IPV6]:PORT or :PORT.")
    sample_interval_seconds: Seconds = Field(default=1.0, description="Servers and slow NVML calls.")
    link_sample_interval_seconds: Seconds = Field(default=0.2, description="Cheap NVML link calls.")
    nvml_call_timeout_seconds: Seconds = Field(default=2.0, description="Longest wait for one NVML call.")
    nvml_library: Path | None = Field(default=None, description="libnvidia-ml.so.1 to load instead of the system's.")
    server_timeout_seconds: Seconds = Field(default=5.0, description="Longest wait for one scrape of a server.")
    server_body_limit_bytes: int = Field(default=8 * 1024 * 1024, gt=0, description="Largest body accepted from a server.")
    state_directory: Path | None = Field(default=None, description="For learned links and calibration; optional.")
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    hf_cache: Path | None = Field(default=None, description="Hugging Face cache to look for config.json in.")
    discovery: bool = Field(default=True, description="Find local SGLang servers when none are listed.")
    servers: tuple[ServerSettings, ...] = ()
    gpus: dict[str, GpuSettings] = Field(default_factory=dict)
    ceiling: CeilingSettings = CeilingSettings()
    links: LinkSettings = LinkSettings()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"


__all__ = ["CeilingSettings", "Config", "GpuSettings", "LinkSettings", "SecretStr", "ServerSettings"]
