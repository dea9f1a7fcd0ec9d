"""Captures replayed through the running daemon; what it serves is compared with committed scrapes.

`pytest tests/golden --update-golden` rewrites them; the diff is the review.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from support.captures import DATA, Capture, advanced, repeatable, replay
from support.fake_nvml import TWO_A6000, FakeNvml

SCRAPES = Path(__file__).parent / "scrapes"
SGLANG = DATA / "sglang"
H200 = DATA / "h200"

PAIR_SECONDS = 5.016
"""Between the two bodies of a recorded pair: 5.011 to 5.023 s."""

ONE_H200: Mapping[str, object] = {
    # As recorded (tests/data/h200/nvml_survey.json): one H200 in a guest, at work.
    "count": 1,
    "sys.driver": "580.159.04",
    "sys.nvml": "13.580.159.04",
    "sys.cuda": 13000,
    "*.name": "NVIDIA H200",
    "0.uuid": "GPU-00000000-1111-2222-3333-444444444444",
    "0.bus_id": "00000000:00:06.0",
    "*.vbios": "96.00.A5.00.1A",
    "*.mem.bus_width": 6016,
    "*.mem.total": 150754820096,
    "*.mem.used": 128379977728,
    "*.mem.reserved": 644939776,
    "*.clock.mem": 3201,
    "*.clock.mem.max": 3201,
    "*.clock.sm": 1980,
    "*.clock.sm.max": 1980,
    "*.pcie.gen": 5,
    "*.pcie.gen.max": 5,
    "*.pcie.gen.device_max": 5,
    "*.pcie.width": 16,
    "*.pcie.width.max": 16,
    "*.pcie.tx_kbps": 14500,
    "*.pcie.rx_kbps": 45900,
    "*.pcie.replays": 1,
    "*.power.mw": 505417,
    "*.power.limit_mw": 700000,
    "*.power.limit_default_mw": 700000,
    "*.energy.mj": 17994460,
    "*.temp": 45,
    "*.pstate": 0,
    "*.util.gpu": 100,
    "*.util.memory": 81,
    "*.throttle": 0,
    "*.nvlink.count": 0,
}
TWO_H200 = {
    **ONE_H200,
    "count": 2,
    "1.uuid": "GPU-00000000-1111-2222-3333-555555555555",
    "1.bus_id": "00000000:00:07.0",
    "*.nvlink.count": 18,
    "*.nvlink.active": 18,
}


def _sglang_captures() -> list[Capture]:
    """Every body made by SGLang's own classes, two A6000 beneath; those that decode go on decoding."""
    captures = []
    for path in sorted(SGLANG.glob("sglang_*.*")):
        version, state = path.stem.removeprefix("sglang_").split("_", 1)
        body = path.read_bytes()
        decoding = state not in ("idle", "fresh", "prefillonly", "pd_prefill")
        model, info = "qwen3.6-27b", "server_info_0.5.13_qwen3.6-27b_tp2_mtp.json"
        if state == "dp4":
            model, info = "deepseek-v3", "server_info_0.5.13_deepseek-v3_tp8_ep8_dpattn.json"
        elif version >= "0.5.17":
            info = info.replace("0.5.13", "0.5.23")
        identity = json.loads((SGLANG / info).read_text()) | {"version": version}
        captures.append(
            Capture(
                name=f"a6000x2__575.57.08__sglang-{version}__{state}{'_openmetrics' if path.suffix != '.prom' else ''}",
                hardware=TWO_A6000,
                steps=[{"/metrics": advanced(body, second) if decoding else body} for second in range(6)],
                fixed=_identity(identity),
                gpus=(0, 1),
                model_config=DATA / "model_configs" / f"{model}.json",
            )
        )
    return captures


def _h200_captures() -> list[Capture]:
    """Pairs of bodies that a real server gave 5 s apart, at a steady load."""
    captures = []
    for first in sorted(H200.glob("sglang_*_m1.prom")):
        case, point = first.name.removeprefix("sglang_0.5.15_").removesuffix("_m1.prom").split(".", 1)
        second = first.with_name(first.name.replace("_m1", "_m2"))
        info = json.loads((H200 / f"sglang_0.5.15_{case}.server_info.json").read_text())
        two = case.startswith("tp2")
        config = "qwen35-27b" if case == "hybrid" else "qwen3-8b"
        captures.append(
            Capture(
                name=f"h200{'x2' if two else ''}__580.159.04__sglang-0.5.15__{case}_{point}",
                hardware={**TWO_H200, "*.nvlink.active": 0 if case == "tp2nop2p" else 18} if two else ONE_H200,
                steps=[{"/metrics": first.read_bytes()}, {"/metrics": second.read_bytes()}],
                step_seconds=PAIR_SECONDS,
                fixed=_identity(info),
                gpus=(0, 1) if two else (0,),
                model_config=H200 / f"config.{config}.json",
                draft_model_config=H200 / "config.qwen3-8b-eagle3.json" if case == "eagle3" else None,
            )
        )
    return captures


def _identity(info: dict[str, object]) -> dict[str, bytes]:
    model = {"model_path": info["model_path"], "is_generation": True}
    return {"/model_info": json.dumps(model).encode(), "/server_info": json.dumps(info).encode()}


CAPTURES = [*_sglang_captures(), *_h200_captures()]


@pytest.mark.parametrize("capture", [pytest.param(capture, id=capture.name) for capture in CAPTURES])
async def test_scrape_of_a_capture(
    capture: Capture, fake_nvml: FakeNvml, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replayed = await replay(capture, fake_nvml, tmp_path)
    scrape = repeatable(replayed.text)
    golden = SCRAPES / f"{capture.name}.prom"
    if request.config.getoption("--update-golden"):
        golden.write_text(scrape)
    assert golden.exists(), f"no {golden.name}: run pytest tests/golden --update-golden and review the new file"
    assert scrape == golden.read_text()
    assert not [path for path in replayed.server_requests if path.startswith("/health")]
    assert replayed.server_requests.count("/server_info") <= 1
    await asyncio.to_thread(check_metrics, replayed.text)
    text = {family.name for family in parse_text(replayed.text)}
    openmetrics = {family.name for family in parse_openmetrics(replayed.openmetrics)}
    assert {name.removesuffix("_info") for name in text} == {name.removesuffix("_info") for name in openmetrics}


def test_every_committed_scrape_has_its_capture() -> None:
    assert {path.stem for path in SCRAPES.glob("*.prom")} == {capture.name for capture in CAPTURES}


def check_metrics(text: str) -> None:
    """`promtool check metrics` finds nothing."""
    promtool = shutil.which("promtool")
    assert promtool is not None, "no promtool: `make test` installs it (Debian package prometheus)"
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
