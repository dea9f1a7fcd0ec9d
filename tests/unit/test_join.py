"""Which GPUs serve what, and what the ceiling is computed from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ceilingd.ceiling.inputs import CeilingInputs
from ceilingd.ceiling.shape import ModelShape
from ceilingd.gpus import load_gpus
from ceilingd.join import Declared, ceiling_inputs, quantization_of, server_gpus, speculation_of
from ceilingd.links.rates import link_bandwidth
from ceilingd.parse.hf_config import parse_hf_config
from ceilingd.records import DecodeObservation, EngineIdentity, GpuInfo, LinkStatus, NoCeiling

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
A6000 = GpuInfo(
    index=0,
    uuid="GPU-a",
    name="NVIDIA RTX A6000",
    pci_bus_id="0000:41:00.0",
    memory_bus_width_bits=384,
    memory_clock_max_hertz=8001e6,
)
PAIR = (A6000, replace(A6000, index=1, uuid="GPU-b", pci_bus_id="0000:81:00.0"))
IDENTITY = EngineIdentity(
    model_path="Qwen/Qwen3.6-27B",
    tensor_parallel=2,
    data_parallel=1,
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_num_draft_tokens=4,
    complete=True,
)
OBSERVED = DecodeObservation("0", "decode_moments", 10.0, 180.0, 1.0, 500.0, 3.08, 55.6, 0.0554)


def shape(name: str) -> ModelShape:
    return parse_hf_config(json.loads((CONFIGS / f"{name}.json").read_text()))


def link(generation: int, width: int = 16, index: int = 0) -> LinkStatus:
    return LinkStatus(index, PAIR[index].uuid, "full", generation, width, 4, 16, True, 0, 0.0, ())


def inputs_of(**changes: object) -> CeilingInputs | NoCeiling:
    table = load_gpus()
    arguments: dict[str, object] = {
        "identity": IDENTITY,
        "shapes": (shape("qwen3.6-27b"), None),
        "observation": OBSERVED,
        "gpus": [(info, link(4, index=info.index), table.find(info.name)) for info in PAIR],
        "declared": Declared(),
        **changes,
    }
    return ceiling_inputs(**arguments)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- GPUs of a server


@pytest.mark.parametrize("declared", [(1, 0), ("GPU-b", "GPU-a"), ("gpu-B", "0000:41:00.0"), ("0000:81:00.0", 0)])
def test_declared_gpus_in_rank_order_by_any_name(declared: tuple[int | str, ...]) -> None:
    gpus, assumed = server_gpus(declared, IDENTITY, PAIR, local=False)
    assert [(gpu.tensor_parallel_rank, gpu.index, gpu.uuid) for gpu in gpus] == [(0, 1, "GPU-b"), (1, 0, "GPU-a")]
    assert assumed == ()


def test_undeclared_gpus_of_a_local_server_follow_its_arguments_and_are_assumed() -> None:
    four = tuple(replace(A6000, index=index, uuid=f"GPU-{index}") for index in range(4))
    gpus, assumed = server_gpus(None, replace(IDENTITY, base_gpu_id=1, gpu_id_step=2), four, local=True)
    assert [gpu.index for gpu in gpus] == [1, 3]
    assert assumed == ("gpu_mapping",)


def test_plain_data_parallelism_has_a_replica_per_rank() -> None:
    four = tuple(replace(A6000, index=index, uuid=f"GPU-{index}") for index in range(4))
    gpus, _ = server_gpus(None, replace(IDENTITY, data_parallel=2), four, local=True)
    assert [(gpu.dp_rank, gpu.tensor_parallel_rank) for gpu in gpus] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]


@pytest.mark.parametrize(
    ("declared", "identity", "local"),
    [
        pytest.param((0, 7), IDENTITY, True, id="one is not there"),
        pytest.param(None, IDENTITY, False, id="not declared, server elsewhere"),
        pytest.param(None, replace(IDENTITY, complete=False), True, id="identity not known yet"),
        pytest.param(None, replace(IDENTITY, node_count=2), True, id="spread over two nodes"),
    ],
)
def test_gpus_that_cannot_be_told_are_none(declared: tuple[int, ...] | None, identity: EngineIdentity, local: bool) -> None:
    assert server_gpus(declared, identity, PAIR, local) == ((), ())


# ------------------------------------------------------------------------------------------------------- inputs


def test_founding_case() -> None:
    inputs = inputs_of()
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.memory_bandwidth_bytes_per_second == pytest.approx(768.096e9)
    assert inputs.hardware.link_bandwidth_bytes_per_second == link_bandwidth(4, 16)
    assert inputs.hardware.matrix_flops_per_second == {"bf16": 154.8e12}
    assert (inputs.speculation.algorithm, inputs.speculation.draft_steps, inputs.speculation.draft_tokens) == ("mtp", 3, 4)
    assert (inputs.load.batch, inputs.load.context_tokens_per_request, inputs.load.accept_length) == (1.0, 500.0, 3.08)
    assert set(inputs.assumed) == {"allreduce_latency", "bandwidth_efficiency", "fixed_seconds"}


def test_the_slowest_live_link_counts() -> None:
    table = load_gpus()
    inputs = inputs_of(gpus=[(info, link(1 if info.index else 4, index=info.index), table.find(info.name)) for info in PAIR])
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.link_bandwidth_bytes_per_second == link_bandwidth(1, 16)


def test_nvlink_counts_only_where_every_gpu_has_it() -> None:
    spec = load_gpus().find("H200")
    both = [(replace(info, nvlink_active_links=18), link(5, index=info.index), spec) for info in PAIR]
    inputs = inputs_of(gpus=both)
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.link_bandwidth_bytes_per_second == 450e9
    assert "nvlink_bandwidth" in inputs.assumed
    one = [both[0], (replace(PAIR[1], nvlink_active_links=0), link(5, index=1), spec)]
    inputs = inputs_of(gpus=one)
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.link_bandwidth_bytes_per_second == link_bandwidth(5, 16)


def test_what_is_declared_is_not_assumed() -> None:
    declared = Declared(0.75, 0.001, 1e-5, {"gpu-a": 700e9, "0000:81:00.0": 600e9})
    inputs = inputs_of(declared=declared)
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.memory_bandwidth_bytes_per_second == 600e9
    assert (inputs.hardware.bandwidth_efficiency, inputs.fixed_seconds) == (0.75, 0.001)
    assert inputs.hardware.allreduce_latency_seconds == 1e-5
    assert inputs.assumed == ()


def test_a_gpu_that_does_not_tell_its_clocks_is_looked_up_and_marked() -> None:
    table = load_gpus()
    silent = [(replace(info, memory_bus_width_bits=None), link(4, index=info.index), table.find(info.name)) for info in PAIR]
    inputs = inputs_of(gpus=silent)
    assert isinstance(inputs, CeilingInputs)
    assert inputs.hardware.memory_bandwidth_bytes_per_second == 768e9
    assert "memory_bandwidth" in inputs.assumed


UNKNOWN = replace(A6000, name="NVIDIA Mystery 9000", memory_bus_width_bits=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"identity": None}, "identity_unknown", id="no identity"),
        pytest.param({"identity": replace(IDENTITY, complete=False)}, "identity_unknown", id="half an identity"),
        pytest.param({"shapes": None}, "model_config_missing", id="config being read"),
        pytest.param({"shapes": NoCeiling("unknown_architecture", "x")}, "unknown_architecture", id="no shape"),
        pytest.param({"gpus": []}, "gpus_unknown", id="no GPUs"),
        pytest.param({"gpus": [], "listed": (7,)}, "gpus_unknown", id="a GPU that is not there"),
        pytest.param({"gpus": [(A6000, link(4), None)]}, "gpus_unknown", id="fewer GPUs than ranks"),
        pytest.param({"observation": None}, "not_decoding", id="idle"),
        pytest.param({"gpus": [(UNKNOWN, link(4), None)] * 2}, "memory_bandwidth_unknown", id="unknown GPU"),
        pytest.param({"gpus": [(info, None, None) for info in PAIR]}, "gpus_unknown", id="links unreadable"),
        pytest.param(
            {"identity": replace(IDENTITY, speculative_algorithm="DFLASH")}, "unsupported_deployment", id="unknown speculation"
        ),
        pytest.param({"identity": replace(IDENTITY, quantization="bitsandbytes")}, "unknown_quantization", id="unknown format"),
    ],
)
def test_what_is_missing_has_a_reason(changes: dict[str, object], reason: str) -> None:
    missing = inputs_of(**changes)
    assert isinstance(missing, NoCeiling)
    assert missing.reason == reason
    assert missing.message


# ------------------------------------------------------------------------------------------------------- engine to model


def test_eagle_is_mtp_only_with_the_checkpoints_own_layers() -> None:
    hybrid, dense = shape("qwen3.6-27b"), shape("llama-3.1-8b")
    own = speculation_of(replace(IDENTITY, speculative_draft_model_path=IDENTITY.model_path), hybrid, None)
    assert not isinstance(own, NoCeiling)
    assert own.algorithm == "mtp"
    without_draft = speculation_of(replace(IDENTITY, speculative_draft_model_path="some/draft"), dense, None)
    assert isinstance(without_draft, NoCeiling)
    assert "draft_model_config" in without_draft.message


def test_no_speculation_and_ngram() -> None:
    dense = shape("llama-3.1-8b")
    none = speculation_of(replace(IDENTITY, speculative_algorithm=None), dense, None)
    assert not isinstance(none, NoCeiling)
    assert none.algorithm == "none"
    ngram = speculation_of(replace(IDENTITY, speculative_algorithm="NGRAM", speculative_num_steps=None), dense, None)
    assert not isinstance(ngram, NoCeiling)
    assert (ngram.algorithm, ngram.draft_tokens) == ("ngram", 4)


def test_the_checkpoints_own_quantization_wins() -> None:
    bf16 = shape("llama-3.1-8b")
    assert quantization_of(replace(IDENTITY, quantization=None), bf16) is None
    assert quantization_of(replace(IDENTITY, quantization="fp8"), bf16) == "fp8_channel"
