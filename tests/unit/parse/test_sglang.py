import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from ceilingd.parse.exposition import NotAnExpositionError
from ceilingd.parse.sglang import (
    MAX_RANKS,
    parse_loads,
    parse_metrics,
    parse_model_info,
    parse_server_info,
)
from ceilingd.records import DecodeMoments, EngineIdentity, EngineRank

DATA = Path(__file__).parents[2] / "data"
SGLANG = DATA / "sglang"
GIB = 2**30

# What each version shows of one and the same engine: Qwen3.6-27B, TP 2, MTP with 3 steps, one request.
GAUGES = EngineRank(
    "0",
    running_requests=1.0,
    queue_requests=0.0,
    context_tokens=31850.0,
    kv_cache_usage_ratio=0.12,
    finished_tokens_total=127098.0,
    accept_length=3.0785,
    tokens_per_second=55.023,
)
COUNTERS = replace(
    GAUGES,
    context_tokens=31824.0,  # decode_sum_seq_lens
    decode_steps_total=46531.0,
    decode_tokens_total=143250.0,
    prefill_tokens_total=388412.0 + 301184.0,
)
MEMORY = replace(COUNTERS, weight_memory_bytes=14.62 * GIB, kv_cache_memory_bytes=31.84 * GIB)
WARMED_UP = EngineRank(
    "0",
    running_requests=0.0,
    queue_requests=0.0,
    context_tokens=0.0,
    kv_cache_usage_ratio=0.0,
    finished_tokens_total=8.0,
    accept_length=0.0,
    tokens_per_second=0.0,
)
IDLE = {"running_requests": 0.0, "context_tokens": 0.0, "kv_cache_usage_ratio": 0.0, "tokens_per_second": 0.0}
PREFILL_ONLY = replace(WARMED_UP, context_tokens=30894.0, kv_cache_usage_ratio=0.12, finished_tokens_total=248.0)

ONE_RANK = {
    "0.4.3_mtp": GAUGES,
    "0.4.3_idle": GAUGES,  # this version shows its last busy values for ever
    "0.4.3_fresh": WARMED_UP,
    "0.4.3_prefillonly": PREFILL_ONLY,
    "0.4.6_mtp": GAUGES,
    "0.4.6_idle": replace(GAUGES, **IDLE),
    "0.4.6_fresh": WARMED_UP,
    "0.5.1_mtp": GAUGES,
    "0.5.1_idle": replace(GAUGES, **IDLE),
    "0.5.1_fresh": WARMED_UP,
    "0.5.7_mtp": COUNTERS,
    "0.5.7_idle": replace(COUNTERS, **IDLE),
    "0.5.7_fresh": WARMED_UP,
    "0.5.13_mtp": COUNTERS,
    "0.5.13_idle": replace(COUNTERS, **IDLE),
    "0.5.13_fresh": WARMED_UP,
    "0.5.17_mtp": MEMORY,
    "0.5.17_idle": replace(MEMORY, **IDLE),
    "0.5.17_fresh": replace(WARMED_UP, weight_memory_bytes=14.62 * GIB, kv_cache_memory_bytes=31.84 * GIB),
    "0.5.23_mtp": MEMORY,
    "0.5.23_idle": replace(MEMORY, **IDLE),
    "0.5.23_fresh": replace(WARMED_UP, weight_memory_bytes=14.62 * GIB, kv_cache_memory_bytes=31.84 * GIB),
    "0.5.23_mtp_alltp": MEMORY,  # both TP ranks export the same batch
    "0.5.23_mtp_devicetimer_mfu": replace(MEMORY, prefill_busy_seconds_total=72.78512024686084),
    "0.5.23_pd_decode": MEMORY,
    "0.5.23_pd_prefill": replace(
        PREFILL_ONLY,
        finished_tokens_total=241.0,
        prefill_tokens_total=689596.0,
        weight_memory_bytes=14.62 * GIB,
        kv_cache_memory_bytes=31.84 * GIB,
    ),
    "0.5.23_prefillonly": replace(
        PREFILL_ONLY,
        prefill_tokens_total=689596.0,
        weight_memory_bytes=14.62 * GIB,
        kv_cache_memory_bytes=31.84 * GIB,
    ),
}


@pytest.mark.parametrize(("case", "expected"), ONE_RANK.items(), ids=ONE_RANK)
def test_one_rank(case: str, expected: EngineRank) -> None:
    metrics = parse_metrics((SGLANG / f"sglang_{case}.prom").read_bytes())
    assert metrics.ranks == (expected,)
    assert metrics.missing == ()
    assert metrics.malformed_lines == 0


def test_every_body_is_expected_somewhere() -> None:
    four_ranks = {"0.4.3_dp4", "0.4.6_dp4", "0.5.1_dp4", "0.5.7_dp4", "0.5.13_dp4", "0.5.17_dp4", "0.5.23_dp4"}
    assert {path.stem.removeprefix("sglang_") for path in SGLANG.glob("sglang_*.prom")} == set(ONE_RANK) | four_ranks


@pytest.mark.parametrize("version", ["0.5.1", "0.5.7", "0.5.13", "0.5.17", "0.5.23"])
def test_four_dp_ranks(version: str) -> None:
    ranks = parse_metrics((SGLANG / f"sglang_{version}_dp4.prom").read_bytes()).ranks
    assert [rank.dp_rank for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank.running_requests for rank in ranks] == [9.0, 8.0, 8.0, 7.0]
    assert [rank.queue_requests for rank in ranks] == [0.0, 1.0, 0.0, 0.0]
    assert [rank.tokens_per_second for rank in ranks] == [229.61, 207.02, 205.44, 181.9]
    assert sum(rank.tokens_per_second or 0.0 for rank in ranks) == pytest.approx(823.97)
    used = [68832.0, 61184.0, 61184.0, 53536.0]
    assert [rank.context_tokens for rank in ranks] == (used if version == "0.5.1" else [tokens - 300 for tokens in used])
    # Counted by the HTTP process for all ranks together: nobody can tell which rank it was.
    assert [rank.finished_tokens_total for rank in ranks] == [None] * 4
    if version != "0.5.1":
        assert [(rank.decode_steps_total, rank.decode_tokens_total) for rank in ranks] == [(7630.0, 61050.0)] * 4


def test_dp_without_rank_labels_shows_what_the_server_shows() -> None:
    (summed,) = parse_metrics((SGLANG / "sglang_0.4.3_dp4.prom").read_bytes()).ranks
    assert (summed.running_requests, summed.tokens_per_second) == (32.0, 823.97)
    (last_writer,) = parse_metrics((SGLANG / "sglang_0.4.6_dp4.prom").read_bytes()).ranks
    assert (last_writer.running_requests, last_writer.tokens_per_second) == (7.0, 181.9)


def test_openmetrics_says_the_same() -> None:
    text = (SGLANG / "sglang_0.5.23_mtp.prom").read_bytes()
    assert parse_metrics((SGLANG / "sglang_0.5.23_mtp.openmetrics").read_bytes()) == parse_metrics(text)
    assert parse_metrics(text.replace(b"\nsglang:", b"\nsglang_")) == parse_metrics(text)


def rank(*lines: str) -> EngineRank:
    (only,) = parse_metrics("\n".join(["# HELP sglang:x .", *lines, ""]).encode()).ranks
    return only


def test_the_largest_copy_counts() -> None:
    lines = [
        f'sglang:cuda_graph_passes_total{{mode="decode_{kind}",tp_rank="{tp_rank}",pp_rank="{pp_rank}"}} {steps}'
        for tp_rank, pp_rank, kind, steps in [
            (0, 0, "cuda_graph", 100),
            (0, 0, "none", 7),
            (1, 0, "cuda_graph", 101),
            (1, 0, "none", 7),
            (0, 1, "cuda_graph", 99),
        ]
    ]
    assert rank(*lines, 'sglang:cuda_graph_passes_total{mode="prefill_none",tp_rank="0"} 5000').decode_steps_total == 108.0


def test_labels_of_operators_and_dead_processes_split_nothing() -> None:
    parts = 'sglang:generation_tokens_total{is_streaming="%s",tenant="%s"} %d'
    one = rank(
        'sglang:num_running_reqs{cluster="a",pid="1",tp_rank="0"} 3',
        'sglang:num_running_reqs{cluster="a",pid="2",tp_rank="0"} 2',
        *(
            parts % (streaming, tenant, count)
            for streaming, tenant, count in [("true", "a", 5), ("true", "b", 7), ("false", "a", 1)]
        ),
    )
    assert one.running_requests == 3.0
    assert one.finished_tokens_total == 13.0


def test_the_total_of_the_priorities_is_the_series_without_one() -> None:
    line = 'sglang:num_queue_reqs{priority="%s"} %d'
    assert rank(line % ("1", 4), line % ("2", 5), line % ("", 9)).queue_requests == 9.0


def test_values_that_say_nothing_are_dropped() -> None:
    one = rank(
        'sglang:num_running_reqs{tp_rank="0"} 1',
        'sglang:gen_throughput{tp_rank="0"} NaN',
        'sglang:spec_accept_length{tp_rank="0"} +Inf',
        'sglang:token_usage{tp_rank="0"} -1',
        'sglang:num_used_tokens{tp_rank="0"} NaN',
    )
    assert one == EngineRank("0", running_requests=1.0)


def test_a_nearly_empty_body_before_the_first_request() -> None:
    metrics = parse_metrics(b'# HELP sglang:process_cpu .\nsglang:process_cpu_seconds_total{component="tokenizer"} 1.4\n')
    assert metrics.ranks == ()
    assert metrics.missing == ("num_running_reqs", "num_used_tokens", "gen_throughput")


def test_ranks_that_are_no_numbers_are_ignored_and_their_number_is_bounded() -> None:
    line = 'sglang:num_running_reqs{dp_rank="%s"} 1'
    assert rank(line % "0", line % "x", line % "-1", line % "00", line % "1234567").dp_rank == "0"
    many = "\n".join(line % number for number in range(MAX_RANKS + 1))
    with pytest.raises(ValueError, match=r"^it shows 513 data-parallel ranks; more than 512 are not believed$"):
        parse_metrics(many.encode())


def test_ranks_are_ordered_by_number() -> None:
    body = "\n".join(f'sglang:num_running_reqs{{dp_rank="{number}"}} 1' for number in (10, 9, 0))
    assert [one.dp_rank for one in parse_metrics(body.encode()).ranks] == ["0", "9", "10"]


def test_html_is_no_metrics() -> None:
    with pytest.raises(NotAnExpositionError):
        parse_metrics(b"<html>")


# ------------------------------------------------------------------------------------------------------------- /v1/loads


def loads(**changes: Any) -> bytes:
    answer = json.loads((SGLANG / "v1_loads_0.5.23_mtp.json").read_bytes())
    answer["loads"][0].update(changes)
    return json.dumps(answer).encode()


def test_loads() -> None:
    answer = parse_loads((SGLANG / "v1_loads_0.5.23_mtp.json").read_bytes())
    assert answer.offers_moments
    (one,) = answer.ranks
    assert one == EngineRank(
        "0",
        running_requests=1.0,
        queue_requests=0.0,
        context_tokens=31850.0,
        kv_cache_usage_ratio=0.12,
        moments=DecodeMoments(46531.0, 46531.0, 2601.0829, 46531.0, 2601.0829, 143250.0),
        accept_length=3.0612,
        tokens_per_second=55.02,
        prefill_busy_seconds_total=74.123456,
        prefill_tokens_total=388412.0,
        weight_memory_bytes=14.62 * GIB,
        kv_cache_memory_bytes=31.84 * GIB,
        snapshot_timestamp=1796000000.25,
    )


def test_loads_before_the_first_step_offer_moments_without_having_any() -> None:
    answer = parse_loads(loads(decode_moments=None))
    assert answer.offers_moments
    assert answer.ranks[0].moments is None


def test_loads_of_a_version_without_moments_offer_none() -> None:
    status, body = json.loads((DATA / "h200/sglang_0.5.15_plain.endpoints.json").read_bytes())["GET /v1/loads"]
    answer = parse_loads(body.encode())
    assert status == 200
    assert not answer.offers_moments
    assert answer.ranks[0].weight_memory_bytes == 15.277 * GIB
    assert not parse_loads(b'{"loads": []}').offers_moments  # what SGLang answers when its shared memory is gone


@pytest.mark.parametrize(
    "moments", [[], [1.0] * 5, [1.0] * 7, [1, 2, 3, 4, 5, None], [1, 2, 3, 4, 5, "6"], [1, 2, 3, 4, 5, float("nan")],
                [1, 2, 3, 4, 5, -1], [1, 2, 3, 4, 5, True], {"n": 1}, 0, "six"]
)  # fmt: skip
def test_moments_that_are_not_six_numbers_are_not_offered(moments: object) -> None:
    answer = parse_loads(loads(decode_moments=moments))
    assert not answer.offers_moments
    assert answer.ranks[0].moments is None


def test_what_a_dead_scheduler_left_is_not_shown() -> None:
    answered = 1795953600.25  # the file's own timestamp, 2026-11-29T12:00:00.25Z
    (stale,) = parse_loads(loads(timestamp=answered - 61)).ranks
    assert stale == EngineRank("0", snapshot_timestamp=answered - 61)
    (idle,) = parse_loads(loads(timestamp=answered - 3600, num_running_reqs=0)).ranks
    assert idle.running_requests == 0.0
    (busy,) = parse_loads(loads(timestamp=answered - 30)).ranks
    assert busy.running_requests == 1.0


def test_several_ranks_in_loads() -> None:
    element = json.loads((SGLANG / "v1_loads_0.5.23_mtp.json").read_bytes())["loads"][0]
    body = json.dumps({"loads": [{**element, "dp_rank": 10}, None, {**element, "dp_rank": 2, "num_running_reqs": 5}]})
    ranks = parse_loads(body.encode()).ranks
    assert [(one.dp_rank, one.running_requests) for one in ranks] == [("2", 5.0), ("10", 1.0)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it is not JSON"),
        (b"<html>", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[]", "it is not a JSON object"),
        (b"{}", 'it has no list "loads"'),
        (b'{"loads": {}}', 'it has no list "loads"'),
    ],
)
def test_what_are_no_loads(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_loads(body)


def test_wrong_types_in_loads_are_absent() -> None:
    (one,) = parse_loads(
        loads(
            dp_rank=None,
            num_running_reqs="1",
            token_usage=None,
            memory=[],
            speculative=7,
            timestamp=True,
            num_used_tokens=10**400,
        )
    ).ranks
    assert one.dp_rank == "0"
    assert {one.running_requests, one.kv_cache_usage_ratio, one.weight_memory_bytes, one.context_tokens} == {None}


# ------------------------------------------------------------------------------------- /model_info, /server_info

SERVER_INFOS = sorted([*SGLANG.glob("server_info_*.json"), *DATA.glob("h200/*.server_info.json")])
QWEN = EngineIdentity(
    version="0.5.23",
    model_path="Qwen/Qwen3.6-27B-FP8",
    served_model_name="Qwen3.6-27B",
    tensor_parallel=2,
    pipeline_parallel=1,
    data_parallel=1,
    expert_parallel=1,
    node_count=1,
    base_gpu_id=0,
    gpu_id_step=1,
    dtype="auto",
    quantization="fp8",
    kv_cache_dtype="auto",
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
    attention_backend="fa3",
    disable_cuda_graph=False,
    context_length=262144,
    max_running_requests=48,
    decode_log_interval=40,
    complete=True,
)


def info(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((SGLANG / f"server_info_{name}.json").read_bytes())
    return answer


def identity(answer: dict[str, Any]) -> EngineIdentity:
    return parse_server_info(json.dumps(answer).encode())


def test_server_info() -> None:
    assert identity(info("0.5.23_qwen3.6-27b_tp2_mtp")) == QWEN
    assert identity(info("0.5.13_qwen3.6-27b_tp2_mtp")) == replace(QWEN, version="0.5.13")


def test_server_info_with_dp_attention() -> None:
    deepseek = info("0.5.13_deepseek-v3_tp8_ep8_dpattn")
    one = identity(deepseek)
    assert (one.tensor_parallel, one.data_parallel, one.expert_parallel, one.dp_attention) == (8, 8, 8, True)
    assert one.speculative_algorithm is None
    # The same deployment as 0.5.22 and later tell it.
    assert identity({**deepseek, "dp_size": 1, "attn_dp_size": 8, "enable_dp_attention": False}) == one


def test_server_info_shapes_of_older_versions() -> None:
    answer = info("0.5.13_qwen3.6-27b_tp2_mtp")
    (state,) = answer.pop("internal_states")
    expected = replace(QWEN, version="0.5.13")
    assert identity(answer) == expected  # flat, up to 0.4.3
    assert identity({**state, **answer}) == expected  # merged, 0.4.4 to 0.4.6
    assert identity({**answer, "internal_states": [None, state]}) == expected
    assert identity({**answer, "internal_states": [None]}) == expected
    resolved_later = {**answer, "attention_backend": None, "internal_states": [{"attention_backend": "fa3"}]}
    assert identity(resolved_later) == expected


def test_server_info_values() -> None:
    answer = info("0.5.23_qwen3.6-27b_tp2_mtp")
    assert identity({**answer, "disaggregation_mode": "decode"}).disaggregation_mode == "decode"
    assert identity({**answer, "disaggregation_mode": "null"}).disaggregation_mode is None
    assert identity({**answer, "speculative_algorithm": "ngram"}).speculative_algorithm == "NGRAM"
    assert identity({**answer, "speculative_algorithm": "NONE"}).speculative_algorithm is None
    odd = identity(
        {**answer, "tp_size": "2", "pp_size": True, "nnodes": -1, "context_length": 10**30, "dtype": 7, "version": ""}
    )
    assert {odd.tensor_parallel, odd.pipeline_parallel, odd.node_count, odd.context_length, odd.dtype, odd.version} == {None}


@pytest.mark.parametrize("path", SERVER_INFOS, ids=lambda path: path.name)
def test_no_secret_survives(path: Path) -> None:
    body = path.read_bytes()
    answer = json.loads(body)
    secrets = {"api_key", "admin_api_key", "ssl_keyfile_password", "launch_command", "ssl_keyfile"}
    assert secrets & answer.keys()
    # Wherever a secret can stand, also where a later version might put one.
    for holder in [answer, *filter(None, answer["internal_states"])]:
        holder.update(dict.fromkeys(secrets, "PLACEHOLDER-secret"))
        holder["memory_usage"] = {"note": "PLACEHOLDER-secret"}
        holder["env"] = ["PLACEHOLDER-secret"]
    one = identity(answer)
    assert one.complete
    assert one.tensor_parallel
    assert "PLACEHOLDER" not in repr(one)
    assert not any("PLACEHOLDER" in str(value) for value in astuple(one))


def test_an_error_quotes_nothing_of_the_answer() -> None:
    with pytest.raises(ValueError, match=r"^it is not JSON$") as caught:
        parse_server_info(b'{"api_key": "PLACEHOLDER-secret", ')
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("path", SERVER_INFOS, ids=lambda path: path.name)
def test_model_path_is_the_one_served(path: Path) -> None:
    assert parse_server_info(path.read_bytes()).model_path == json.loads(path.read_bytes())["model_path"]


def test_server_info_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"^it is an object without model_path and tp_size$"):
        parse_server_info(b'{"detail": "hello"}')


def test_model_info() -> None:
    answer = json.loads((DATA / "h200/sglang_0.5.15_hybrid.endpoints.json").read_bytes())["model_info"]
    assert parse_model_info(json.dumps(answer).encode()) == EngineIdentity(
        model_path="/models/qwen35-27b", model_type=answer["model_type"], architectures=tuple(answer["architectures"])
    )
    assert parse_model_info(b'{"model_path": 3, "architectures": "x"}') == EngineIdentity()
    with pytest.raises(ValueError, match=r"^it is not a JSON object$"):
        parse_model_info(b"3")


def test_a_rank_that_is_no_number_is_left_out_and_not_taken_for_rank_0() -> None:
    assert [rank.dp_rank for rank in parse_loads(loads(dp_rank="one")).ranks] == []
    assert [rank.dp_rank for rank in parse_loads(loads(dp_rank=3)).ranks] == ["3"]
