"""`ceilingd check` on the fake NVML library and on servers that answer, half answer, or do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ceilingd import check
from ceilingd.check import Finding, findings_of, print_findings
from ceilingd.clock import SystemClock
from ceilingd.config import Config, GpuSettings, ServerSettings
from ceilingd.config_load import Loaded
from support.fake_nvml import TWO_A6000
from support.sglang_server import HANG, FakeSglang, Reply, SimulatedEngine

if TYPE_CHECKING:
    from support.fake_nvml import FakeNvml

QWEN = Path(__file__).parents[1] / "data/model_configs/qwen3.6-27b.json"


async def findings(nvml: FakeNvml | None, *servers: ServerSettings, **settings: Any) -> tuple[Finding, ...]:
    # No driver: this name is not a library that the loader could find.
    library = Path("libceilingd-absent.so.1") if nvml is None else nvml.library
    config = Config(servers=servers, nvml_library=library, server_timeout_seconds=0.5, **settings)
    return await findings_of(Loaded(config, Path("/etc/c.toml"), ("CEILINGD_LOG_LEVEL",), ("--server",)), SystemClock())


def about(found: tuple[Finding, ...], subject: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.message) for finding in found if finding.subject == subject]


def settings_for(url: str, **more: Any) -> ServerSettings:
    return ServerSettings.model_validate({"url": url, "name": "qwen", "model_config": QWEN, **more})


async def test_where_everything_is_fine_every_finding_is_ok(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    async with FakeSglang(SimulatedEngine(SystemClock(), tensor_parallel=2).replies()) as server:
        found = await findings(fake_nvml, settings_for(server.url, gpus=[0, "GPU-a6000000-0000-4000-8000-000000000001"]))
        assert server.count("/health") == 0
    assert {finding.level for finding in found} == {"ok"}, found
    assert about(found, "configuration") == [("ok", "valid, from /etc/c.toml, CEILINGD_LOG_LEVEL, --server")]
    assert about(found, "nvml") == [("ok", "driver 575.57.08, CUDA 12.9, 2 GPUs")]
    [(_, gpu)] = about(found, "gpu 1")
    assert gpu == "NVIDIA RTX A6000, 0000:c1:00.0, GPU-a6000000-0000-4000-8000-000000000001"
    [(_, answer), (_, model)] = about(found, "server qwen")
    assert answer.startswith("SGLang 0.5.23 at http://127.0.0.1:")
    assert answer.endswith("decode source decode_moments")
    assert model == "the model's config is found and understood"


async def test_without_servers_the_ceilings_are_missing_which_is_a_warning(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    found = await findings(fake_nvml)
    assert [level for level, _ in about(found, "configuration")] == ["ok", "warning"]
    assert all(finding.level != "error" for finding in found)


@pytest.mark.parametrize(
    ("asked_for", "level"),
    [({}, "warning"), ({"nvml_library": Path("/lib/other.so")}, "error"), ({"gpus": {"0000:41:00.0": GpuSettings()}}, "error")],
)
async def test_no_driver_is_an_error_only_where_gpus_are_asked_for(
    asked_for: dict[str, Any], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoNvml(check.Nvml):
        """As on a host without the driver, whatever this host has."""

        def __init__(self, clock: SystemClock, **settings: Any) -> None:
            super().__init__(clock, **{**settings, "library": Path("libceilingd-absent.so.1")})

    monkeypatch.setattr(check, "Nvml", NoNvml)
    found = await findings_of(Loaded(Config(**asked_for), None, (), ()), SystemClock())
    [(found_level, message)] = about(found, "nvml")
    assert found_level == level
    assert "cannot be loaded" in message


async def test_gpus_that_are_not_there_are_errors(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    declared = {"0000:99:00.0": GpuSettings(), "0000:41:00.0": GpuSettings()}
    found = await findings(fake_nvml, settings_for("http://127.0.0.1:1", gpus=[0, 7]), gpus=declared)
    assert ("error", 'gpus."0000:99:00.0" is not a GPU of this host: see the list above') in about(found, "configuration")
    assert ("error", "gpus names 7, which is not a GPU of this host") in about(found, "server qwen")
    assert not any("41:00.0" in finding.message for finding in found if finding.level == "error")


async def test_a_server_that_is_down_is_an_error_and_its_model_is_looked_at_all_the_same(
    fake_nvml: FakeNvml,
) -> None:
    fake_nvml.set(TWO_A6000)
    found = about(await findings(fake_nvml, settings_for("http://127.0.0.1:1")), "server qwen")
    assert [level for level, _ in found] == ["error", "ok"]
    assert "nothing listens on 127.0.0.1:1" in found[0][1]


async def test_servers_do_not_wait_for_each_other_and_a_silent_one_is_given_up(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    replies = SimulatedEngine(SystemClock()).replies()
    async with FakeSglang(dict.fromkeys(replies, HANG)) as silent, FakeSglang(replies) as well:
        servers = [settings_for(silent.url, name="silent"), settings_for(well.url, name="well")]
        found = await findings(fake_nvml, *servers)
    assert about(found, "server silent")[0][0] == "error"
    assert about(found, "server well")[0][0] == "ok"


async def test_metrics_that_are_off_are_an_error_that_names_the_cure(fake_nvml: FakeNvml) -> None:
    fake_nvml.set(TWO_A6000)
    replies = {**SimulatedEngine(SystemClock(), moments=False).replies(), "/metrics": Reply(b"", 404)}
    async with FakeSglang(replies) as server:
        found = about(await findings(fake_nvml, settings_for(server.url)), "server qwen")
    assert found[0][0] == "error"
    assert "--enable-metrics" in found[0][1]


@pytest.mark.parametrize(("configured", "level"), [(True, "error"), (False, "warning")])
async def test_a_model_that_is_not_understood_costs_the_ceiling(
    configured: bool, level: str, fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.set(TWO_A6000)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "nobody_knows"}')
    async with FakeSglang(SimulatedEngine(SystemClock()).replies()) as server:
        found = about(
            await findings(fake_nvml, settings_for(server.url, model_config=path if configured else None)), "server qwen"
        )
    assert [level for level, _ in found] == ["ok", level]
    assert found[1][1].startswith("no ceiling: ")


FINDINGS = (Finding("ok", "nvml", "driver 575"), Finding("error", "server qwen", "nothing listens"))


def test_levels_are_words_that_need_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(FINDINGS, color=False)
    assert capsys.readouterr().out == "ok       nvml         driver 575\nerror    server qwen  nothing listens\n"


def test_colour_changes_nothing_but_colour(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(FINDINGS, color=True)
    colored = capsys.readouterr().out
    assert "\033[31merror  \033[0m  server qwen  nothing listens" in colored


@pytest.mark.parametrize(("found", "code"), [(FINDINGS, 1), (FINDINGS[:1], 0), ((Finding("warning", "nvml", "none"),), 0)])
def test_the_exit_code_is_1_for_errors_alone(
    found: tuple[Finding, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def given(*_: object) -> tuple[Finding, ...]:
        return found

    monkeypatch.setattr(check, "findings_of", given)
    assert check.run(Loaded(Config(), None, (), ()), as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert [finding["level"] for finding in report["findings"]] == [finding.level for finding in found]


def test_what_a_server_says_cannot_pose_as_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings((Finding("ok", "server s", "serves \x1b[31mx\nok       server t  fine \ud800"),), color=False)
    assert capsys.readouterr().out == "ok       server s  serves \\x1b[31mx\\nok       server t  fine \\ud800\n"
