"""`ceilingd check`: looks once at everything that the configuration names, and says what is there and what is missing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from ceilingd.clock import Clock, SystemClock
from ceilingd.config import Config, ServerSettings
from ceilingd.config_load import Loaded, color_wanted
from ceilingd.models import ModelPlace, read_shapes
from ceilingd.monitor import server_source_name
from ceilingd.records import EngineIdentity, GpuInfo, NoCeiling, NvmlReading
from ceilingd.sources.nvml import Nvml
from ceilingd.sources.sglang import IDENTITY_TIMEOUT_SECONDS, SglangServer
from ceilingd.sources.source import SourceError
from ceilingd.text import printable

Level = Literal["ok", "warning", "error"]
NVML_CALL_TIMEOUT_SECONDS = 10.0
"""A driver without persistence mode takes seconds to wake its GPUs; the daemon tries again, we look only once."""
SERVER_TIMEOUTS = 4
"""Besides its identity, a probe is up to three requests and a short wait, each within `server_timeout_seconds`."""
NO_DRIVER = ("nvml_library_not_found", "nvml_driver_not_loaded")
"""A host without a driver may be watched for its servers alone; a driver that is there and fails is an error."""
PATIENCE_SECONDS = 3.0
"""After this long without an answer the user is told what is being waited for."""
_COLORS = {"ok": "\033[32m", "warning": "\033[33m", "error": "\033[31m"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. An `error` is something asked for that does not work; a `warning` costs part of the picture."""

    level: Level
    subject: str
    """configuration, nvml, `gpu 0` or `server qwen`."""
    message: str
    """One sentence; what is wrong comes with the cure."""


def run(loaded: Loaded, *, as_json: bool = False) -> int:
    """Print the findings; 1 when one of them is an error, else 0."""
    findings = asyncio.run(findings_of(loaded, SystemClock()))
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_findings(findings, color=color_wanted(sys.stdout))
    return int(failed)


def print_findings(findings: Iterable[Finding], *, color: bool) -> None:
    """One line each: level, subject, message."""
    findings = tuple(findings)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        level = f"{finding.level:<7}"
        if color:
            level = f"{_COLORS[finding.level]}{level}\033[0m"
        # A server's own words must not colour the terminal or look like a line of ours.
        print(f"{level}  {finding.subject:<{width}}  {printable(finding.message)}")


async def findings_of(loaded: Loaded, clock: Clock) -> tuple[Finding, ...]:
    """All findings: configuration, driver and GPUs, then the servers in their order. Everything is looked at at once."""
    config = loaded.config
    nvml = asyncio.create_task(_read_nvml(config, clock))
    servers = [asyncio.create_task(_check_server(server, config, clock)) for server in config.servers]
    found = [*_configuration(loaded), *_gpus(config, await nvml)]
    if servers:
        _, waiting = await asyncio.wait(servers, timeout=PATIENCE_SECONDS)
        if waiting:
            names = ", ".join(settings.name for settings, task in zip(config.servers, servers, strict=True) if task in waiting)
            print(f"waiting for {names}: a server whose schedulers are busy takes up to a minute", file=sys.stderr)
    for server in servers:
        found += await server
    return tuple(found)


def _configuration(loaded: Loaded) -> Iterable[Finding]:
    origins = [str(loaded.file)] if loaded.file is not None else []
    origins += [*loaded.variables, *loaded.flags]
    yield Finding("ok", "configuration", f"valid, from {', '.join(origins)}" if origins else "defaults; nothing was configured")
    if not loaded.config.servers:
        yield Finding("warning", "configuration", "no servers are listed: decode ceilings need --server URL or [[servers]]")


# --------------------------------------------------------------------------------------------------- driver and GPUs


async def _read_nvml(config: Config, clock: Clock) -> NvmlReading | SourceError:
    nvml = Nvml(
        clock,
        library=config.nvml_library,
        call_timeout_seconds=max(config.nvml_call_timeout_seconds, NVML_CALL_TIMEOUT_SECONDS),
        procfs_root=config.procfs_root,
    )
    try:
        async with asyncio.timeout(nvml.gpus.timeout_seconds):
            return await nvml.gpus.read()
    except SourceError as error:
        return error
    except TimeoutError:
        return SourceError("timeout", f"the driver did not answer in {nvml.gpus.timeout_seconds:g} s: see nvidia-smi and dmesg")
    finally:
        await nvml.close()


def _gpus(config: Config, reading: NvmlReading | SourceError) -> Iterable[Finding]:
    if isinstance(reading, SourceError):
        asked_for = bool(config.gpus) or config.nvml_library is not None or any(server.gpus for server in config.servers)
        asked_for = asked_for or reading.reason not in NO_DRIVER
        yield Finding("error" if asked_for else "warning", "nvml", str(reading))
        return
    cuda = f", CUDA {reading.cuda_version}" if reading.cuda_version else ""
    yield Finding(
        "ok", "nvml", f"driver {reading.driver_version}{cuda}, {len(reading.gpus)} GPU{'s' * (len(reading.gpus) != 1)}"
    )
    infos = [gpu.info for gpu in reading.gpus]
    for info in infos:
        yield Finding("ok", f"gpu {info.index}", f"{info.name}, {info.pci_bus_id}, {info.uuid}")
    for index, reason in reading.unreadable:
        yield Finding("error", f"gpu {index}", f"cannot be read: {reason}")
    present = {key for info in infos for key in _keys(info)}
    for key in config.gpus:
        if key not in present:
            yield Finding("error", "configuration", f"gpus.{json.dumps(key)} is not a GPU of this host: see the list above")
    for server in config.servers:
        for gpu in server.gpus or ():
            if gpu not in present:
                yield Finding("error", f"server {server.name}", f"gpus names {gpu}, which is not a GPU of this host")


def _keys(info: GpuInfo) -> tuple[int | str, ...]:
    return info.index, info.uuid, info.pci_bus_id


# --------------------------------------------------------------------------------------------------- servers


async def _check_server(settings: ServerSettings, config: Config, clock: Clock) -> list[Finding]:
    subject = f"server {settings.name}"
    server = SglangServer(server_source_name(settings), settings, config, clock)
    limit_seconds = SERVER_TIMEOUTS * config.server_timeout_seconds + 2 * IDENTITY_TIMEOUT_SECONDS
    identity: EngineIdentity | None = None
    try:
        async with asyncio.timeout(limit_seconds):
            probe = await server.probe()
            identity = (await server.read()).identity
    except SourceError as error:
        found = [Finding("error", subject, str(error))]
    except TimeoutError:
        found = [Finding("error", subject, f"did not answer within {limit_seconds:g} s: is it overloaded or still starting?")]
    else:
        version = f"SGLang {probe.version}" if probe.version else "SGLang of unknown version"
        serves = f", serves {probe.served_model_name}" if probe.served_model_name else ""
        found = [Finding("ok", subject, f"{version} at {settings.url}{serves}; decode source {probe.decode_source}")]
        found += [Finding("warning", subject, problem) for problem in probe.problems]
    finally:
        await server.close()
    if model := await asyncio.to_thread(_model, settings, config, identity):
        found.append(Finding(model[0], subject, model[1]))
    return found


def _model(settings: ServerSettings, config: Config, identity: EngineIdentity | None) -> tuple[Level, str] | None:
    """What is to be said about the model's config.json; `None` where the server is down and none is configured."""
    if identity is None and settings.model_config_path is None:
        return None
    place = ModelPlace.of(settings.model_config_path, settings.draft_model_config_path, identity or EngineIdentity())
    shapes = read_shapes(place, config.hf_cache)
    if isinstance(shapes, NoCeiling):
        return ("warning" if settings.model_config_path is None else "error"), f"no ceiling: {shapes.message}"
    if shapes[1] is None and (place.draft_config_path or place.draft_model_path):
        return "warning", "the model's config is understood, that of its draft model is not: set draft_model_config"
    return "ok", "the model's config is found and understood"
