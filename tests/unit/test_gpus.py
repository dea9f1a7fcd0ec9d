"""The packaged GPU table and its checks."""

from __future__ import annotations

import pytest

from ceilingd.gpus import load_gpus, parse_gpus
from ceilingd.records import memory_bandwidth

TABLE = load_gpus()
ENTRY = """
[[gpu]]
name = "{name}"
aliases = [{aliases}]
memory = "HBM9"
memory_bytes = 1e9
memory_bandwidth_bytes_per_second = {bandwidth}
matrix_flops_per_second = {{ bf16 = 1e12 }}
source = "made up"
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX A6000", "RTX A6000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("rtx a6000", "RTX A6000"),
        ("A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA H200", "H200-SXM"),
        ("H200", "H200-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
    ],
)
def test_names_as_nvml_and_as_people_spell_them(name: str, found: str) -> None:
    spec = TABLE.find(name)
    assert spec is not None
    assert spec.name == found


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "H100", "A100", "", "MI300X"]
)
def test_what_is_not_in_the_table_or_could_be_several_is_not_guessed(name: str) -> None:
    assert TABLE.find(name) is None


def test_near_names() -> None:
    assert set(TABLE.similar("H100")) >= {"H100-PCIe", "H100-SXM", "H100-NVL"}
    assert TABLE.similar("RTX A600")[0] == "RTX A6000"
    assert TABLE.similar("") == ()


def test_every_entry_tells_its_source() -> None:
    assert len(list(TABLE)) > 40
    assert all(spec.source.strip() for spec in TABLE)


def test_bandwidth_agrees_with_clock_and_bus_width() -> None:
    """Within 1 %, except for Blackwell boards, whose sources disagree with each other."""
    doubtful = {"B200-SXM", "B300-SXM", "GB200", "GB300"}
    for spec in TABLE:
        derived = memory_bandwidth(spec.memory_clock_hertz, spec.memory_bus_width_bits)
        if derived is not None:
            tolerance = 0.07 if spec.name in doubtful else 0.01
            assert derived == pytest.approx(spec.memory_bandwidth_bytes_per_second, rel=tolerance), spec.name


def test_figures_of_the_gpus_that_were_measured() -> None:
    a6000, h200 = TABLE.find("RTX A6000"), TABLE.find("H200")
    assert a6000 is not None
    assert h200 is not None
    assert (a6000.memory_bandwidth_bytes_per_second, a6000.pcie_generation, a6000.nvlink) == (768e9, 4, "bridge")
    assert (h200.memory_bus_width_bits, h200.memory_clock_hertz, h200.nvlink) == (6016, 3201e6, "built_in")
    assert h200.nvlink_bytes_per_second == 450e9
    assert "fp8" not in a6000.matrix_flops_per_second
    assert h200.matrix_flops_per_second["fp8"] == 1978e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[gpu]", "^GPU table: "),
        (ENTRY.format(name="A", aliases="", bandwidth="0"), r"^GPU table: 0\.memory_bandwidth_bytes_per_second: "),
        (ENTRY.format(name="A", aliases="", bandwidth="inf"), r"^GPU table: 0\.memory_bandwidth_bytes_per_second: "),
        (ENTRY.format(name="A", aliases="", bandwidth="1e9") + "price = 3", r"^GPU table: 0\.price: "),
        (ENTRY.format(name="A", aliases="", bandwidth="1e9") + 'nvlink = "bridge"', "belong together"),
        (ENTRY.format(name="A", aliases="", bandwidth="1e9") + "pcie_generation = 4", "belong together"),
        (ENTRY.format(name="A", aliases="", bandwidth="1e9").replace("bf16", "tf32"), "needs bf16"),
        (
            ENTRY.format(name="A 1", aliases="", bandwidth="1e9")
            + ENTRY.format(name="B", aliases='"NVIDIA a-1"', bandwidth="1e9"),
            "^GPU table: NVIDIA a-1 names two GPUs",
        ),
    ],
)
def test_a_wrong_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_gpus(text)
