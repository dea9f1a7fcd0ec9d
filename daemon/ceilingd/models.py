"""Finds and reads the config.json of what a server serves. File access happens in threads, never on the event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilingd.ceiling.shape import ModelShape
from ceilingd.clock import Clock
from ceilingd.files import read_file
from ceilingd.parse.hf_config import UnknownArchitecture, UnknownQuantization, parse_hf_config
from ceilingd.records import EngineIdentity, NoCeiling

RETRY_SECONDS = 60.0
"""A file that was missing or wrong is looked at again after this long."""
FILE_LIMIT_BYTES = 4 * 1024 * 1024
"""The largest published config.json (long quantization ignore lists) is under 100 KB."""

Shapes = tuple[ModelShape, ModelShape | None]


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where the shape of one server's models comes from: configured paths first, then what the server reports."""

    config_path: Path | None
    draft_config_path: Path | None
    model_path: str | None
    draft_model_path: str | None

    @classmethod
    def of(cls, config_path: Path | None, draft_config_path: Path | None, identity: EngineIdentity) -> ModelPlace:
        """The place for a server whose identity is known; a draft path equal to the model's is the model's own draft."""
        draft = identity.speculative_draft_model_path
        return cls(config_path, draft_config_path, identity.model_path, None if draft == identity.model_path else draft)


class Models:
    """Shapes by place. `lookup` answers at once from what was read; reading goes on behind it, one read per place."""

    def __init__(self, hf_cache: Path | None, clock: Clock) -> None:
        self._hf_cache = hf_cache
        self._clock = clock
        self._known: dict[ModelPlace, tuple[Shapes | NoCeiling, float]] = {}
        self._reading: dict[ModelPlace, asyncio.Task[None]] = {}

    def lookup(self, place: ModelPlace) -> Shapes | NoCeiling | None:
        """The shapes, why there are none, or `None` while the first read goes on. Call on the event loop."""
        found = self._known.get(place)
        stale = found is None or (isinstance(found[0], NoCeiling) and self._clock.monotonic() - found[1] >= RETRY_SECONDS)
        if stale and place not in self._reading:
            task = asyncio.get_running_loop().create_task(self._read(place), name="read model config")
            self._reading[place] = task
            task.add_done_callback(lambda _: self._reading.pop(place, None))
        return None if found is None else found[0]

    async def _read(self, place: ModelPlace) -> None:
        shapes = await asyncio.to_thread(read_shapes, place, self._hf_cache)
        if len(self._known) >= 64:  # servers that change their model all day must not grow us
            self._known.clear()
        self._known[place] = (shapes, self._clock.monotonic())


def read_shapes(place: ModelPlace, hf_cache: Path | None) -> Shapes | NoCeiling:
    """Both shapes, or the one sentence that says what is missing. Never raises."""
    target = _read_one(place.config_path, place.model_path, hf_cache, "model_config")
    if isinstance(target, NoCeiling):
        return target
    draft: ModelShape | NoCeiling | None = None
    if place.draft_config_path is not None or place.draft_model_path is not None:
        draft = _read_one(place.draft_config_path, place.draft_model_path, hf_cache, "draft_model_config")
    return (target, None if isinstance(draft, NoCeiling) else draft)


def _read_one(configured: Path | None, reported: str | None, hf_cache: Path | None, key: str) -> ModelShape | NoCeiling:
    try:
        path = configured or find_config(reported, hf_cache)
    except (OSError, ValueError) as error:
        return NoCeiling("model_config_unreadable", f"{reported}: {_reason(error)}; set {key} of this server")
    if path is None:
        return NoCeiling(
            "model_config_missing",
            f"no config.json was found for {reported or 'this server'}: set {key} of this server to the file or its folder",
        )
    try:
        return parse_hf_config(read_config(path))
    except UnknownArchitecture as error:
        return NoCeiling("unknown_architecture", str(error))
    except UnknownQuantization as error:
        return NoCeiling("unknown_quantization", str(error))
    except (OSError, ValueError) as error:
        return NoCeiling("model_config_unreadable", f"{path}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """What is wrong, without the path that `OSError` repeats."""
    return getattr(error, "strerror", None) or str(error)


def find_config(model_path: str | None, hf_cache: Path | None) -> Path | None:
    """config.json of a local folder, or of the newest snapshot in the Hugging Face cache; `None` when there is neither.

    Raises `OSError` where a folder on the way may not be read."""
    if not model_path:
        return None
    local = Path(model_path) / "config.json"
    if local.is_absolute():
        return local if local.is_file() else None
    if hf_cache is None:
        return None
    # The cache's documented layout: models--<organization>--<name>/snapshots/<revision>/config.json
    snapshots = hf_cache / ("models--" + model_path.strip("/").replace("/", "--")) / "snapshots"
    found = [path for path in snapshots.glob("*/config.json") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a config.json, or in the folder that holds one.

    A `hf_quant_config.json` beside it (ModelOpt) is merged under `quantization_config` when the config has none.
    Raises `OSError`, or `ValueError` with a sentence."""
    if path.is_dir():
        path = path / "config.json"
    config = _read_json(path)
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config = {**config, "quantization_config": {"quant_method": "modelopt", **_read_json(beside)}}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    body = read_file(path, FILE_LIMIT_BYTES + 1)
    if len(body) > FILE_LIMIT_BYTES:
        raise ValueError(f"larger than {FILE_LIMIT_BYTES // 1024 // 1024} MiB: not a config.json")
    try:
        config = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("not a JSON object")
    return config
