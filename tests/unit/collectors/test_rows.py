"""What each subject says of a snapshot, and above all what it does not say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ceilingd.collectors import FAMILIES
from ceilingd.records import DecodeObservation, GpuInfo, GpuReading, NoCeiling, NvmlStatus
from support import snapshots

if TYPE_CHECKING:
    from ceilingd.collectors.family import Value
    from ceilingd.records import Snapshot

BY_NAME = {family.name: family for family in FAMILIES}


def rows(snapshot: Snapshot, name: str, **labels: str) -> dict[tuple[str, ...], Value]:
    """The rows of a metric that carry these labels, by the values of the others."""
    family = BY_NAME[name]
    wanted = {}
    for values, value in family.rows(snapshot):
        named = dict(zip(family.labels, values, strict=True))
        if labels.items() <= named.items():
            wanted[tuple(text for label, text in named.items() if label not in labels)] = value
    return wanted


def value(snapshot: Snapshot, name: str, **labels: str) -> float:
    """The value of the only row with these labels."""
    [only] = rows(snapshot, name, **labels).values()
    assert isinstance(only, int | float)
    return only


def present(snapshot: Snapshot) -> set[str]:
    """The metrics that have rows."""
    return {family.name for family in FAMILIES if list(family.rows(snapshot))}


FOUNDING = snapshots.founding()


# ------------------------------------------------------------------------------------------------------------ nothing


def test_a_bare_host_has_health_alone() -> None:
    bare = snapshots.bare()
    assert value(bare, "ceilingd_nvml_up") == 0
    assert value(bare, "ceilingd_source_up", source="nvml") == 0
    assert value(bare, "ceilingd_source_errors_total", source="nvml", reason="library_not_found") == 7
    assert not [name for name in present(bare) if name.startswith(("ceilingd_gpu", "ceilingd_pcie", "ceilingd_decode"))]
    assert rows(bare, "ceilingd_source_sample_age_seconds") == {}
    assert rows(bare, "ceilingd_config_last_reload_successful") == {}
    assert rows(bare, "process_open_fds") == {}


def test_a_gpu_that_gives_nothing_has_identity_and_up_alone() -> None:
    silent = GpuReading(GpuInfo(0, "GPU-0", "GPU", "0000:01:00.0"))
    snapshot = replace(snapshots.host((silent,), (), ()), process=())
    assert {name for name in present(snapshot) if name.startswith(("ceilingd_gpu", "ceilingd_pcie"))} == {
        "ceilingd_gpu_info",
        "ceilingd_gpu_up",
    }


def test_a_server_that_is_down_keeps_health_alone() -> None:
    down = snapshots.down(snapshots.server(), "refused", "it refuses")
    snapshot = replace(FOUNDING, servers=(down,), sources=(*FOUNDING.sources[:3], down.health))
    assert value(snapshot, "ceilingd_server_up", server="qwen") == 0
    assert {name for name in present(snapshot) if name.startswith(("ceilingd_server", "ceilingd_decode"))} == {
        "ceilingd_server_up"
    }


# --------------------------------------------------------------------------------------------------------------- GPUs


def test_memory_bandwidth_follows_the_memory_clock() -> None:
    slow = replace(snapshots.gpu(0), memory_clock_hertz=405e6)
    snapshot = snapshots.host((slow,), (), ())
    assert value(snapshot, "ceilingd_gpu_memory_bandwidth_bytes_per_second", gpu="0") == 405e6 * 2 * 384 / 8
    assert value(snapshot, "ceilingd_gpu_memory_bandwidth_max_bytes_per_second", gpu="0") == pytest.approx(768.1e9, rel=1e-3)


def test_a_lost_gpu_is_down_under_the_uuid_that_is_known_of_it() -> None:
    reading = FOUNDING.nvml.reading
    assert reading is not None
    lost = replace(reading, gpus=reading.gpus[:1], unreadable=((1, "GPU is lost"), (7, "GPU is lost")))
    snapshot = replace(FOUNDING, nvml=NvmlStatus(True, lost, 0.0), links=FOUNDING.links[:1])
    assert rows(snapshot, "ceilingd_gpu_up") == {
        ("0", snapshots.gpu(0).info.uuid): 1,
        ("1", snapshots.gpu(1).info.uuid): 0,
        ("7", ""): 0,
    }


def test_only_reasons_that_apply_have_a_series() -> None:
    quiet = replace(snapshots.gpu(1), clocks_event_reasons=())
    snapshot = snapshots.host((snapshots.gpu(0), quiet), (), ())
    assert rows(snapshot, "ceilingd_gpu_clocks_event_reason") == {("0", snapshots.gpu(0).info.uuid, "sw_power_cap"): 1}


def test_the_power_limit_in_force_wins_over_the_one_at_start() -> None:
    capped = replace(snapshots.gpu(0), power_limit_watts=250.0)
    unsaid = replace(snapshots.gpu(1), power_limit_watts=None)
    snapshot = snapshots.host((capped, unsaid), (), ())
    assert value(snapshot, "ceilingd_gpu_power_limit_watts", gpu="0") == 250
    assert value(snapshot, "ceilingd_gpu_power_limit_watts", gpu="1") == 300


# -------------------------------------------------------------------------------------------------------------- links


def test_a_degraded_link_beside_a_full_one() -> None:
    snapshot = replace(FOUNDING, links=(snapshots.link(0), snapshots.link(1, "degraded")))
    states = rows(snapshot, "ceilingd_pcie_link_state", gpu="1", uuid=snapshots.gpu(1).info.uuid)
    assert states == {("full",): 0, ("idle_downshift",): 0, ("degraded",): 1, ("unverified",): 0, ("unsupported",): 0}
    assert value(snapshot, "ceilingd_pcie_link_generation", gpu="1") == 1
    assert value(snapshot, "ceilingd_pcie_link_bandwidth_bytes_per_second", gpu="1") == pytest.approx(4.0e9)
    assert value(snapshot, "ceilingd_pcie_link_bandwidth_max_bytes_per_second", gpu="1", limit="expected") == pytest.approx(
        31.5e9, rel=1e-3
    )


def test_limits_tell_gpu_system_and_expectation_apart() -> None:
    card = replace(snapshots.gpu(0), info=replace(snapshots.gpu(0).info, link_generation_max_gpu=5))
    link = replace(snapshots.link(0), width_expected_lanes=8)
    snapshot = snapshots.host((card,), (link,), ())
    uuid = card.info.uuid
    assert rows(snapshot, "ceilingd_pcie_link_generation_max", gpu="0", uuid=uuid) == {
        ("gpu",): 5,
        ("system",): 4,
        ("expected",): 4,
    }
    assert rows(snapshot, "ceilingd_pcie_link_width_max_lanes", gpu="0", uuid=uuid) == {("system",): 16, ("expected",): 8}


def test_an_unsupported_link_has_its_state_and_what_the_device_measures() -> None:
    unsupported = replace(snapshots.link(0, "unsupported"), transmit_bytes_total=None)
    snapshot = snapshots.host((snapshots.gpu(0),), (unsupported,), ())
    assert {name for name in present(snapshot) if name.startswith("ceilingd_pcie") or "busy" in name} == {
        "ceilingd_pcie_link_state",
        "ceilingd_pcie_transmit_bytes_per_second",
        "ceilingd_pcie_receive_bytes_per_second",
        "ceilingd_pcie_receive_bytes_total",
        "ceilingd_pcie_replays_total",
    }


def test_a_setting_that_no_link_has_gives_no_bandwidth() -> None:
    odd = replace(snapshots.link(0), width_lanes=3)
    snapshot = snapshots.host((snapshots.gpu(0),), (odd,), ())
    assert rows(snapshot, "ceilingd_pcie_link_bandwidth_bytes_per_second") == {}
    assert value(snapshot, "ceilingd_pcie_link_width_lanes") == 3


def test_busy_seconds_are_kept_for_each_setting() -> None:
    assert rows(FOUNDING, "ceilingd_gpu_busy_seconds_total", gpu="0", uuid=snapshots.gpu(0).info.uuid) == {
        ("4", "16"): 600.0,
        ("1", "16"): 12.5,
    }


# ------------------------------------------------------------------------------------------------------------ servers


def test_the_info_says_what_the_numbers_rest_on() -> None:
    [labels] = rows(FOUNDING, "ceilingd_server_info")
    info = dict(zip(BY_NAME["ceilingd_server_info"].labels, labels, strict=True))
    assert info["decode_source"] == "decode_moments"
    assert info["assumed"] == "bandwidth_efficiency,fixed_seconds,gpu_mapping"
    assert info["tp_size"] == "2"
    assert info["speculative_algorithm"] == "EAGLE"
    assert info["quantization"] == ""


def test_a_server_without_identity_still_says_its_source() -> None:
    status = FOUNDING.servers[0]
    assert status.reading is not None
    unidentified = replace(status, reading=replace(status.reading, identity=None), ranks=(), assumed=())
    [labels] = rows(replace(FOUNDING, servers=(unidentified,)), "ceilingd_server_info")
    assert [text for text in labels if text] == ["qwen", "http://127.0.0.1:30000", "decode_moments"]


def test_ranks_of_a_server_are_mapped_to_gpus() -> None:
    assert rows(FOUNDING, "ceilingd_server_gpu", server="qwen", dp_rank="0") == {
        ("0", "0", snapshots.gpu(0).info.uuid): 1,
        ("1", "1", snapshots.gpu(1).info.uuid): 1,
    }


def test_load_is_the_mean_of_the_window_and_no_stale_figure_of_the_engine() -> None:
    assert value(FOUNDING, "ceilingd_decode_context_tokens") == 512
    status = FOUNDING.servers[0]

    def seen(observation: DecodeObservation | None, written: float | None = None) -> Snapshot:
        ranks = tuple(
            replace(rank, observation=observation, reading=replace(rank.reading, snapshot_timestamp=written))
            for rank in status.ranks
        )
        return replace(FOUNDING, servers=(replace(status, ranks=ranks),))

    resting = seen(DecodeObservation("0", "counters", 0.0, None, 0.0, None, None, None, None))
    assert value(resting, "ceilingd_decode_running_requests") == 0
    for name in ("context_tokens", "tokens_per_second", "accept_length"):
        assert rows(resting, f"ceilingd_decode_{name}") == {}
    # The engine's gauges say that one request runs, nothing waits, and so much of the KV cache is full. They may be old.
    for name in ("running_requests", "context_tokens", "tokens_per_second", "accept_length"):
        assert rows(seen(None), f"ceilingd_decode_{name}") == {}
    for name in ("queue_requests", "kv_cache_usage_ratio"):
        assert rows(seen(None), f"ceilingd_decode_{name}") == {}
        assert rows(resting, f"ceilingd_decode_{name}") != {}
        assert rows(seen(None, written=1.8e9), f"ceilingd_decode_{name}") != {}


# ------------------------------------------------------------------------------------------------------------ ceiling


def test_the_founding_case() -> None:
    name = "ceilingd_decode_ceiling_tokens_per_second"
    assert value(FOUNDING, name, acceptance="perfect", bandwidth="peak") == pytest.approx(93.9, abs=0.05)
    assert value(FOUNDING, name, acceptance="observed", bandwidth="peak") == pytest.approx(78.2, abs=0.05)
    assert value(FOUNDING, "ceilingd_decode_efficiency_ratio", bandwidth="peak") == pytest.approx(42.59 / 55.4)
    assert value(FOUNDING, "ceilingd_decode_tokens_per_second") / value(
        FOUNDING, name, acceptance="observed", bandwidth="peak"
    ) == pytest.approx(value(FOUNDING, "ceilingd_decode_efficiency_ratio", bandwidth="peak"))


@pytest.mark.parametrize("bandwidth", ["peak", "achievable"])
def test_components_sum_to_the_round(bandwidth: str) -> None:
    components = rows(FOUNDING, "ceilingd_decode_component_seconds", bandwidth=bandwidth)
    seconds = math.fsum(part for part in components.values() if isinstance(part, float))
    assert len(components) == 7
    assert seconds == pytest.approx(
        value(FOUNDING, "ceilingd_decode_round_seconds", source=f"predicted_{bandwidth}"), rel=1e-12
    )


def test_unexplained_is_what_the_achievable_round_leaves() -> None:
    assert value(FOUNDING, "ceilingd_decode_unexplained_seconds") == pytest.approx(
        value(FOUNDING, "ceilingd_decode_round_seconds", source="observed")
        - value(FOUNDING, "ceilingd_decode_round_seconds", source="predicted_achievable")
    )


def test_exactly_one_component_binds() -> None:
    flags = rows(FOUNDING, "ceilingd_decode_bottleneck", server="qwen", dp_rank="0")
    assert [component for component, binds in flags.items() if binds] == [("weights",)]
    assert len(flags) == 7


def test_without_accept_length_only_the_perfect_ceiling_remains() -> None:
    status = FOUNDING.servers[0]
    unknown = replace(status.ranks[0], ceiling=snapshots.ceiling(None), observation=snapshots.observation("0", None, None))
    snapshot = replace(FOUNDING, servers=(replace(status, ranks=(unknown,)),))
    assert set(rows(snapshot, "ceilingd_decode_ceiling_tokens_per_second", server="qwen", dp_rank="0")) == {
        ("perfect", "peak"),
        ("perfect", "achievable"),
    }
    assert rows(snapshot, "ceilingd_decode_efficiency_ratio") == {}
    assert rows(snapshot, "ceilingd_decode_unexplained_seconds") == {}
    assert set(rows(snapshot, "ceilingd_decode_round_seconds", server="qwen", dp_rank="0")) == {
        ("predicted_peak",),
        ("predicted_achievable",),
    }


def test_no_ceiling_gives_its_reason_and_nothing_predicted() -> None:
    reason = NoCeiling("model_config_missing", "no config.json")
    snapshot = replace(FOUNDING, servers=(snapshots.without_ceiling(FOUNDING.servers[0], reason),))
    assert rows(snapshot, "ceilingd_decode_ceiling_unavailable") == {("qwen", "0", "model_config_missing"): 1}
    predicted = ("ceiling_tokens", "component", "round", "bottleneck", "efficiency", "unexplained")
    assert not [name for name in present(snapshot) if name.startswith(tuple(f"ceilingd_decode_{part}" for part in predicted))]


# ------------------------------------------------------------------------------------------------------------- health


def test_the_age_of_a_sample_is_as_of_the_snapshot() -> None:
    assert value(FOUNDING, "ceilingd_source_sample_age_seconds", source="nvml") == 0.25


def test_a_server_that_the_sampler_lists_too_is_one_source() -> None:
    assert list(rows(FOUNDING, "ceilingd_source_up")) == [("nvml",), ("nvml_links",), ("nvml_traffic",), ("sglang/qwen",)]


def test_a_server_that_the_sampler_does_not_list_is_a_source_all_the_same() -> None:
    assert ("sglang/qwen",) in rows(replace(FOUNDING, sources=()), "ceilingd_source_up")


@pytest.mark.parametrize(("demo", "text"), [(True, "true"), (False, "false")])
def test_the_build_says_whether_this_is_the_demo(demo: bool, text: str) -> None:
    assert len(rows(replace(FOUNDING, demo=demo), "ceilingd_build_info", demo=text)) == 1


def test_a_process_figure_is_found_by_its_name() -> None:
    assert value(FOUNDING, "process_open_fds") == 19
