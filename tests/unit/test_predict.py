"""`ceilingd predict` as people and programs call it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from ceilingd.predict import add_arguments, run
from support.shapes import CONFIGS

FOUNDING = [
    *("--model-config", str(CONFIGS / "qwen3.6-27b.json"), "--gpu", "RTX A6000", "--tensor-parallel", "2"),
    *("--pcie-generation", "4", "--pcie-width", "16", "--speculative", "mtp", "--draft-steps", "3"),
    *("--batch", "1", "--context", "500"),
]
PUBLISHED = [
    *("--parameters", "27e9", "--memory-bandwidth", "768e9", "--tensor-parallel", "2", "--speculative", "mtp"),
    *("--draft-steps", "3", "--set", "kv_cache.seconds=20us", "--set", "linear_state.seconds=90us"),
    *("--set", "allreduce.count=128", "--set", "draft.seconds=5.6ms"),
]
DENSE = ["--model-config", str(CONFIGS / "qwen3-8b.json"), "--gpu", "H200"]


def predicted(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser(prog="ceilingd predict")
    add_arguments(parser)
    code = run(parser.parse_args(flags))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def words(out: str) -> str:
    """What was printed without its line breaks."""
    return " ".join(out.split())


def as_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    code, out, err = predicted(capsys, *flags, "--json")
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def seconds(document: dict[str, Any]) -> dict[str, float]:
    return {component["name"]: component["seconds"] for component in document["components"]}


def test_the_founding_case_from_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, *FOUNDING, "--accept-length", "3.33")
    assert seconds(document)["weights"] == pytest.approx(33.37e-3, abs=5e-6)
    assert document["round_seconds"] == pytest.approx(42.786e-3, abs=1e-6)
    assert document["ceiling_tokens_per_second"] == pytest.approx({"perfect": 93.49, "observed": 77.83}, abs=0.01)
    assert document["bottleneck"] == "weights"
    assert document["parameters"] == {
        "main": 26_895_998_464,
        "draft": 424_699_392,
        "vision": 460_730_096,
        "streamed": 25_624_600_064,
        "active": 25_624_600_064,
    }
    assert document["inputs"]["link"] == "PCIe Gen4 x16"
    assert document["assumed"] == ["bandwidth_efficiency", "allreduce_latency", "fixed_seconds"]


def test_the_founding_case_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, *PUBLISHED)
    assert {name: round(value * 1e3, 2) for name, value in seconds(document).items()} == {
        "weights": 35.16,
        "kv_cache": 0.02,
        "linear_state": 0.09,
        "allreduce": 1.02,
        "draft": 5.6,
        "fixed": 0.5,
    }
    assert document["round_seconds"] == pytest.approx(42.4e-3, abs=5e-5)
    assert document["ceiling_tokens_per_second"]["perfect"] == pytest.approx(94.3, abs=0.1)
    assert document["ceiling_tokens_per_second"]["observed"] is None


def test_the_json_holds_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    document = as_json(capsys, *FOUNDING)
    documented = {
        "inputs",
        "assumed",
        "parameters",
        "components",
        "round_seconds",
        "bottleneck",
        "ceiling_tokens_per_second",
        "levers",
    }
    assert documented <= set(document)
    for component in document["components"]:
        assert list(component) == ["name", "bytes_per_gpu", "flops_per_gpu", "count", "seconds", "bound"]
    assert math.fsum(seconds(document).values()) == document["round_seconds"]


def test_figures_are_at_peak_unless_an_efficiency_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    at_peak = as_json(capsys, *FOUNDING)
    at_nine_tenths = as_json(capsys, *FOUNDING, "--bandwidth-efficiency", "0.9")
    assert at_peak["inputs"]["bandwidth_efficiency"] == 1.0
    assert at_peak["round_seconds"] == at_peak["peak"]["round_seconds"] == at_nine_tenths["peak"]["round_seconds"]
    assert at_nine_tenths["inputs"]["bandwidth_efficiency"] == 0.9
    assert at_nine_tenths["round_seconds"] == at_nine_tenths["achievable"]["round_seconds"]
    assert seconds(at_nine_tenths)["weights"] == pytest.approx(seconds(at_peak)["weights"] / 0.9)
    assert "bandwidth_efficiency" not in at_nine_tenths["assumed"]


def test_the_table_shows_terms_ceilings_levers_assumptions_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = predicted(capsys, *FOUNDING, "--accept-length", "3.33")
    assert (code, err) == (0, "")
    for text in (
        "25.625 GB",
        "33.366 ms",
        "linear_state",
        "logits_gather",
        "42.786 ms",
        "78.0 %",
        "93.5",
        "77.8",
        "given (3.33)",
        "FP8 weights",
        "give --allreduce-latency",
        "A ceiling is not a forecast",
    ):
        assert text in out
    assert "Decode is bound by reading weights: 78 % of the round; the strongest lever at this load is FP8 weights" in words(
        out
    )


@pytest.mark.parametrize(
    "flags",
    [
        [*FOUNDING, "--accept-length", "3.33"],
        [*FOUNDING, "--batch", "512"],
        [*FOUNDING, "--memory-bandwidth", "10e9"],
    ],
    ids=["usual", "large batch", "slow"],
)
def test_the_table_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    outputs = []
    for columns in ("40", "80", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        outputs.append(predicted(capsys, *flags)[1])
    assert outputs[0] == outputs[1] == outputs[2]
    # A path is one word and may be longer.
    lines = outputs[0].replace(str(CONFIGS), "").splitlines()
    assert [line for line in lines if len(line) > 78] == []
    [weights] = [line.split() for line in lines if line.startswith(" weights ")]
    assert len(weights) == 11, "name, count, and three figures and a share with their units, bound"


@pytest.mark.parametrize(
    "flags",
    [["--batch", "1e6"], ["--speculative", "ngram", "--draft-tokens", "4096"], ["--context", "1e9"]],
    ids=lambda flags: flags[0],
)
def test_at_the_limits_there_is_still_a_prediction(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert as_json(capsys, *DENSE, *flags)["round_seconds"] > 0


def test_the_longest_draft_has_no_longer_one_as_a_lever(capsys: pytest.CaptureFixture[str]) -> None:
    levers = as_json(capsys, *FOUNDING, "--draft-steps", "4095")["levers"]
    assert "draft_steps_plus_one" not in levers
    assert "draft_steps_minus_one" in levers


def test_no_escape_sequence_reaches_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, _, unknown_gpu = predicted(capsys, "--parameters", "1b", "--gpu", "\x1b[31mred\u202e")
    assert "--gpu: \\x1b[31mred\\u202e is not in the table" in unknown_gpu
    path = tmp_path / "\x1b[31m.json"
    path.write_text('{"architectures": ["Evil\\u001b[2J"]}', encoding="utf-8")
    _, _, unknown_model = predicted(capsys, "--model-config", str(path), "--gpu", "H200")
    assert "\\x1b[31m.json: architectures: Evil\\x1b[2J is not known" in unknown_model
    path.write_text((CONFIGS / "qwen3-8b.json").read_text(encoding="utf-8"), encoding="utf-8")
    _, out, _ = predicted(capsys, "--model-config", str(path), "--gpu", "H200")
    assert "\\x1b[31m.json" in out
    assert "\x1b" not in unknown_gpu + unknown_model + out


def test_speculation_that_hurts_is_called_that(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = predicted(capsys, *FOUNDING, "--accept-length", "1.05")
    assert "speculation hurts here: without it the ceiling is" in words(out)


def test_levers_are_at_the_accept_length_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    perfect, given = as_json(capsys, *FOUNDING), as_json(capsys, *FOUNDING, "--accept-length", "2")
    assert given["levers"]["fp8_weights"] == pytest.approx(perfect["levers"]["fp8_weights"] / 2)
    assert "perfect_acceptance" not in perfect["levers"]
    assert given["levers"]["perfect_acceptance"] == perfect["ceiling_tokens_per_second"]["perfect"]


def test_without_speculation_observed_is_perfect(capsys: pytest.CaptureFixture[str]) -> None:
    ceiling = as_json(capsys, *DENSE)["ceiling_tokens_per_second"]
    assert ceiling["observed"] == ceiling["perfect"]


@pytest.mark.parametrize(
    ("flags", "link", "bandwidth", "assumed"),
    [
        (["--gpu", "RTX A6000"], "PCIe Gen4 x16", 31.5e9, True),
        (["--gpu", "RTX A6000", "--pcie-generation", "1"], "PCIe Gen1 x16", 4e9, True),
        (["--gpu", "RTX A6000", "--pcie-generation", "4", "--pcie-width", "8"], "PCIe Gen4 x8", 15.75e9, False),
        (["--gpu", "RTX A6000", "--nvlink"], "NVLink", 56.25e9, False),
        (["--gpu", "RTX A6000", "--nvlink", "50G"], "NVLink", 50e9, False),
        (["--gpu", "H100 SXM"], "NVLink", 450e9, True),
        (["--gpu", "H100 SXM", "--pcie-generation", "5", "--pcie-width", "16"], "PCIe Gen5 x16", 63e9, False),
    ],
)
def test_the_link_between_the_gpus(
    capsys: pytest.CaptureFixture[str], flags: list[str], link: str, bandwidth: float, assumed: bool
) -> None:
    document = as_json(capsys, "--model-config", str(CONFIGS / "qwen3-8b.json"), "--tensor-parallel", "2", *flags)
    assert document["inputs"]["link"] == link
    assert document["inputs"]["link_bandwidth_bytes_per_second"] == pytest.approx(bandwidth, rel=1e-3)
    assert ("link" in document["assumed"]) is assumed
    assert ("nvlink" in document["levers"]) is (link != "NVLink")


def test_draft_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = FOUNDING[: FOUNDING.index("--speculative")]
    unstated = as_json(capsys, *hardware, "--speculative", "mtp")
    assert (unstated["inputs"]["draft_steps"], unstated["inputs"]["draft_tokens"]) == (3, 4)
    assert "draft_steps" in unstated["assumed"]
    by_tokens = as_json(capsys, *hardware, "--speculative", "mtp", "--draft-tokens", "6")
    assert (by_tokens["inputs"]["draft_steps"], by_tokens["inputs"]["draft_tokens"]) == (5, 6)


def test_a_separate_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculative", "eagle3", "--draft-steps", "3", "--draft-model-config", str(CONFIGS / "eagle3-qwen3-8b.json")]
    document = as_json(capsys, *DENSE, *flags)
    assert document["parameters"]["draft"] == 349_175_808 + 50_331_648 + 4 * 4096
    assert seconds(document)["draft"] > 0


def test_a_folder_with_modelopts_quantization_beside_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3.1-70b-fp8.json").read_text(encoding="utf-8"))
    beside = config.pop("hf_quant_config")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    document = as_json(capsys, "--model-config", str(tmp_path), "--gpu", "H200")
    assert document["inputs"]["quantization"] == "fp8_tensor"
    assert document["achievable"]["bandwidth_efficiency"] == 0.72
    assert "fp8_weights" not in document["levers"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("27e9", 27e9), ("27b", 27e9), ("27B", 27e9), ("27G", 27e9), ("0.5t", 5e11), ("768GB/s", 768e9), ("768 GB/s", 768e9)],
)
def test_numbers_as_people_write_them(capsys: pytest.CaptureFixture[str], text: str, value: float) -> None:
    document = as_json(capsys, "--parameters", "1b", "--memory-bandwidth", text)
    assert document["inputs"]["memory_bandwidth_bytes_per_second"] == value


@pytest.mark.parametrize(("text", "value"), [("8e-6", 8e-6), ("8us", 8e-6), ("8 µs", 8e-6), ("0.5ms", 5e-4), ("1s", 1.0)])
def test_times_as_people_write_them(capsys: pytest.CaptureFixture[str], text: str, value: float) -> None:
    document = as_json(capsys, "--parameters", "1b", "--memory-bandwidth", "1e12", "--fixed-seconds", text)
    assert document["inputs"]["fixed_seconds"] == value


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--parameters", "27b"], "--memory-bandwidth: give it in bytes per second, or name a GPU with --gpu"),
        (["--parameters", "27b", "--gpu", "RTX A600"], "--gpu: RTX A600 is not in the table; did you mean RTX A6000"),
        (["--parameters", "27b", "--gpu", "Gaudi"], "--gpu: Gaudi is not in the table; it has V100-SXM2, "),
        (["--parameters", "0", "--gpu", "H200"], "--parameters: must be from 1 to 1e+15, not 0"),
        (["--model-config", "missing", "--gpu", "H200"], "missing: no such file; give the config.json of the model"),
        ([*DENSE, "--tensor-parallel", "3"], "--tensor-parallel: 32 heads or channels cannot be divided over 3 ranks (q_proj)"),
        ([*DENSE, "--pipeline-parallel", "2"], "--pipeline-parallel: pipeline parallelism is not supported yet"),
        ([*DENSE, "--batch", "0"], "--batch: must be from 1e-06 to 1e+06, not 0"),
        ([*DENSE, "--context", "-1"], "--context: must be from 0 to 1e+09, not -1"),
        ([*DENSE, "--accept-length", "2"], "--accept-length: without speculation a round gives exactly 1 token"),
        ([*DENSE, "--draft-steps", "3"], "--speculative: draft flags need one of"),
        ([*DENSE, "--draft-tokens", "0"], "--speculative: draft flags need one of"),
        (
            [*DENSE, "--speculative", "mtp", "--draft-tokens", "1"],
            "--draft-tokens: must be at least 2, the drafted token and the one before it, not 1",
        ),
        (["--parameters", "27b", "--gpu", ""], "--gpu: the name is empty; give one such as RTX A6000"),
        (["--model-config", str(CONFIGS.parent.parent), "--gpu", "H200"], "this folder holds no config.json; give the config"),
        ([*DENSE, "--pcie-generation", "7"], "--pcie-generation: PCIe has generations 1 to 6, not 7"),
        ([*DENSE, "--pcie-generation", "0"], "--pcie-generation: PCIe has generations 1 to 6, not 0"),
        ([*DENSE, "--pcie-width", "3"], "--pcie-width: a PCIe link has 1, 2, 4, 8, 12, 16 or 32 lanes, not 3"),
        ([*DENSE, "--pcie-width", "1000"], "--pcie-width: a PCIe link has"),
        ([*DENSE, "--tensor-parallel", "2", "--pcie-width", "0"], "--pcie-width: a PCIe link has"),
        ([*DENSE, "--nvlink", "0"], "--nvlink: must be from 1e+06 to 1e+16, not 0"),
        ([*DENSE, "--batch", "1e308"], "--batch: must be from 1e-06 to 1e+06, not 1e+308"),
        ([*DENSE, "--context", "1e308"], "--context: must be from 0 to 1e+09, not 1e+308"),
        ([*DENSE, "--batch", "1e308", "--context", "1e308"], "--batch: must be from"),
        ([*DENSE, "--memory-bandwidth", "1e-300"], "--memory-bandwidth: must be from 1e+06 to 1e+16, not 1e-300"),
        ([*DENSE, "--tensor-parallel", "2", "--allreduce-latency", "1e308"], "--allreduce-latency: must be from 0 to 1, not"),
        ([*DENSE, "--tensor-parallel", "8192"], "--tensor-parallel: must be from 1 to 4096, not 8192"),
        ([*DENSE, "--bandwidth-efficiency", "1e-300"], "--bandwidth-efficiency: must be from 0.001 to 1"),
        ([*DENSE, "--set", "weights.bytes=1e300"], "--set weights.bytes: must be from 0 to 1e+18"),
        ([*DENSE, "--speculative", "mtp"], "--speculative: mtp needs MTP layers, and this model's config has none"),
        ([*DENSE, "--speculative", "eagle3"], "--draft-model-config: eagle3 needs the config of its draft model"),
        ([*DENSE, "--set", "wheights.bytes=1"], "--set: there is no component 'wheights'"),
        ([*DENSE, "--set", "weights.count=1"], "--set weights.count: only allreduce and logits_gather have a count"),
        (
            ["--model-config", str(CONFIGS / "mixtral-8x7b.json"), "--gpu", "H200"],
            "architectures: MixtralForCausalLM is not known to this version",
        ),
        (
            ["--model-config", str(CONFIGS / "qwen3-8b.json"), "--memory-bandwidth", "1e12", "--tensor-parallel", "2"],
            "--pcie-generation and --pcie-width, --nvlink or --gpu: needed when tensor_parallel is above 1",
        ),
        ([*DENSE, "--tensor-parallel", "2", "--pcie-generation", "7"], "--pcie-generation: PCIe has generations 1 to 6, not 7"),
        ([*DENSE, "--tensor-parallel", "2", "--pcie-width", "3", "--pcie-generation", "4"], "--pcie-width: a PCIe link has"),
        (
            [*DENSE, "--tensor-parallel", "2", "--pcie-width", "4", "--nvlink"],
            "--nvlink: the GPUs talk over NVLink or over PCIe",
        ),
        (
            ["--parameters", "1b", "--gpu", "L4", "--tensor-parallel", "2", "--nvlink"],
            "--nvlink: the table has no NVLink bandwidth for this GPU",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_inputs_are_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    code, out, err = predicted(capsys, *flags)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.startswith("ceilingd predict: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --model-config --parameters is required"),
        (["--parameters", "1b", "--model-config", "x"], "not allowed with argument"),
        (["--parameters", "lots"], "'lots' is not a number such as 27e9"),
        (["--parameters", "1e999"], "'1e999' is not a number"),
        (["--parameters", "1b", "--fixed-seconds", "5min"], "'5min' is not a time such as"),
        (["--parameters", "1b", "--tensor-parallel", "1.5"], "'1.5' is not a whole number"),
        (["--parameters", "1b", "--set", "weights=3"], "'weights=3' is not COMPONENT.bytes="),
        (["--parameters", "1b", "--set", "weights.bytes=x"], "'x' is not a number"),
    ],
)
def test_unreadable_flags_are_refused_by_the_parser(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        predicted(capsys, *flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unreadable_config_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("{", "[]", '{"architectures": ["LlamaForCausalLM"]}'):
        path.write_text(content, encoding="utf-8")
        code, _, err = predicted(capsys, "--model-config", str(path), "--gpu", "H200")
        assert code == 2
        assert err.startswith(f"ceilingd predict: {path}: ")


def test_help_teaches_with_the_founding_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        predicted(capsys, "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "the founding case" in out
    assert "--set draft.seconds=5.6ms" in out
