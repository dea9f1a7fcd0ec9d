"""config.json of what a server serves: every file and folder that cannot be read is a reason, never an exception."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ceilingd.models import ModelPlace, read_shapes
from ceilingd.records import NoCeiling


def why_not(place: ModelPlace, hf_cache: Path | None = None) -> NoCeiling:
    shapes = read_shapes(place, hf_cache)
    assert isinstance(shapes, NoCeiling)
    return shapes


@pytest.mark.parametrize(
    "place",
    [
        ModelPlace(None, None, "/root/models/qwen", None),
        ModelPlace(Path("/root/models/qwen"), None, None, None),
        ModelPlace(None, None, "models/qwen", None),
    ],
    ids=["reported", "configured", "in the cache"],
)
def test_a_folder_that_may_not_be_read_is_a_reason(place: ModelPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(self))  # a mode would not stop the tests of a privileged user

    monkeypatch.setattr(Path, "stat", refuse)
    found = why_not(place, Path("/root/cache"))
    assert found.reason == "model_config_unreadable"
    assert "models/qwen: Permission denied" in found.message


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "config.json"
    os.mkfifo(fifo)
    found = why_not(ModelPlace(fifo, None, None, None))
    assert (found.reason, found.message) == ("model_config_unreadable", f"{fifo}: it is not a regular file")
