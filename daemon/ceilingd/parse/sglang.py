"""What SGLang's endpoints say, in its versions 0.4.1 to 0.5.23, as records.

The names, labels and shapes here were read from SGLang's releases and checked against bodies recorded from them. Values that
are NaN, infinite or negative are dropped: where SGLang does not know, it says so in one of these ways.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ceilingd.parse.exposition import parse_exposition
from ceilingd.records import DecodeMoments, EngineIdentity, EngineRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ceilingd.parse.exposition import Sample

GIBIBYTE = 2**30
"""SGLang's `*_gb` are GiB."""
MAX_RANKS = 512
"""More data-parallel ranks than any deployment has; a body with more is refused rather than exported."""
_RANK = re.compile(r"0|[1-9][0-9]{0,5}")
STALE_SNAPSHOT_SECONDS = 60.0
"""A scheduler that has work writes its snapshot many times a second; one this old was left by a dead or stuck scheduler."""

# ------------------------------------------------------------------------------------------------------------- /metrics


@dataclass(frozen=True, slots=True)
class _Metric:
    """How one field of `EngineRank` is read from `/metrics`.

    `copies`: every TP, PP and EP rank may export the same number, and operators may add labels: the largest per `dp_rank`,
    after adding up the parts that the label `parts` splits it into. `requests`: counted where requests are received, once
    for the whole server: the sum over all series, whatever splits them.
    """

    field: str
    name: str
    fold: Literal["copies", "requests"] = "copies"
    parts: str | None = None
    prefix: str = ""
    """Only series whose label `parts` starts with this."""
    scale: float = 1.0


_METRICS = (
    _Metric("running_requests", "num_running_reqs"),
    _Metric("queue_requests", "num_queue_reqs"),
    _Metric("decode_sum_seq_lens", "decode_sum_seq_lens"),  # 0.5.7
    _Metric("num_used_tokens", "num_used_tokens"),
    _Metric("full_token_usage", "full_token_usage"),  # the KV pool alone; 0.5.13
    _Metric("token_usage", "token_usage"),  # the fullest pool: KV, sliding window or linear-attention state
    _Metric("decode_steps_total", "cuda_graph_passes_total", parts="mode", prefix="decode_"),  # 0.5.7
    _Metric("decode_tokens_total", "realtime_tokens_total", parts="mode", prefix="decode"),  # 0.5.7
    _Metric("prefill_tokens_total", "realtime_tokens_total", parts="mode", prefix="prefill_"),
    _Metric("finished_tokens_total", "generation_tokens_total", fold="requests"),  # split by is_streaming from 0.5.17
    _Metric("accept_length", "spec_accept_length"),
    _Metric("tokens_per_second", "gen_throughput"),
    _Metric("prefill_busy_seconds_total", "forward_execution_seconds_total", parts="category", prefix="extend"),  # 0.5.11
    _Metric("prefill_busy_seconds_total", "gpu_execution_seconds_total", parts="category", prefix="extend"),  # to 0.5.10
    _Metric("weight_memory_bytes", "weight_memory_usage_gb", scale=GIBIBYTE),  # 0.5.17
    _Metric("kv_cache_memory_bytes", "kv_cache_memory_usage_gb", scale=GIBIBYTE),  # 0.5.17
)
WANTED_NAMES = {f"sglang{separator}{metric.name}": metric.name for metric in _METRICS for separator in ":_"}
"""The colon turns into an underscore in OpenMetrics, in Prometheus 3 and behind some routers."""


class EngineMetrics(NamedTuple):
    """One `/metrics` body. `ranks` in the order of their number; empty before the engine's first request."""

    ranks: tuple[EngineRank, ...]
    missing: tuple[str, ...]
    """Names of the basic metrics, those that every version has, that this body lacks."""
    malformed_lines: int


def parse_metrics(body: bytes) -> EngineMetrics:
    """Raises `NotAnExpositionError` for something that is no metrics at all, `ValueError` for more ranks than can be."""
    exposition = parse_exposition(body, WANTED_NAMES)
    by_name: dict[str, list[Sample]] = {}
    for sample in exposition.samples:
        if math.isfinite(sample.value) and sample.value >= 0 and not sample.labels.get("priority"):
            # Per-priority series come beside their own total, which has priority="".
            by_name.setdefault(sample.name, []).append(sample)
    fields: dict[str, dict[str, float]] = {}
    for metric in _METRICS:
        if metric.fold == "copies":
            for dp_rank, value in _fold_copies(metric, by_name.get(metric.name, ())).items():
                fields.setdefault(dp_rank, {}).setdefault(metric.field, value * metric.scale)
    _require_bounded(fields)
    ranks = tuple(_rank(dp_rank, fields[dp_rank]) for dp_rank in sorted(fields, key=int))
    if len(ranks) == 1:  # counted for the whole server: with several ranks nobody can tell which one it was
        ranks = (replace(ranks[0], **_fold_requests(by_name)),)
    basic = ("num_running_reqs", "num_used_tokens", "gen_throughput")
    return EngineMetrics(ranks, tuple(name for name in basic if name not in by_name), exposition.malformed_lines)


def _fold_copies(metric: _Metric, samples: Iterable[Sample]) -> dict[str, float]:
    """The metric's value by `dp_rank`: parts added up within each copy, then the largest copy."""
    copies: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in samples:
        if metric.parts is not None and not sample.labels.get(metric.parts, "").startswith(metric.prefix):
            continue
        dp_rank = sample.labels.get("dp_rank", "0")
        if not _RANK.fullmatch(dp_rank):
            continue
        copy = dp_rank, frozenset(label for label in sample.labels.items() if label[0] != metric.parts)
        copies[copy] = copies.get(copy, 0.0) + sample.value
    largest: dict[str, float] = {}
    for (dp_rank, _), value in copies.items():
        largest[dp_rank] = max(value, largest.get(dp_rank, value))
    return largest


def _fold_requests(by_name: Mapping[str, list[Sample]]) -> dict[str, Any]:
    return {
        metric.field: sum(sample.value for sample in by_name[metric.name])
        for metric in _METRICS
        if metric.fold == "requests" and metric.name in by_name
    }


def _rank(dp_rank: str, fields: dict[str, float]) -> EngineRank:
    """The record of one rank; `fields` may hold the two readings that context and KV usage are each chosen from."""
    known: dict[str, Any] = dict(fields)
    # decode_sum_seq_lens counts exactly what decode reads, but is 0 until the first decode step and never falls back to 0.
    decoded, used = known.pop("decode_sum_seq_lens", None), known.pop("num_used_tokens", None)
    context = decoded if decoded and known.get("running_requests") else used
    usage, fullest = known.pop("full_token_usage", None), known.pop("token_usage", None)
    return EngineRank(
        dp_rank,
        context_tokens=context,
        kv_cache_usage_ratio=fullest if usage is None else usage,
        **known,
    )


def _require_bounded(ranks: Mapping[str, object]) -> None:
    if len(ranks) > MAX_RANKS:
        raise ValueError(f"it shows {len(ranks)} data-parallel ranks; more than {MAX_RANKS} are not believed")


# ------------------------------------------------------------------------------------------------------------- /v1/loads


class EngineLoads(NamedTuple):
    """One `/v1/loads` answer. `ranks` in the order of their number."""

    ranks: tuple[EngineRank, ...]
    offers_moments: bool
    """True where the engine keeps decode moments, even if no step has run yet."""


def parse_loads(body: bytes) -> EngineLoads:
    """Raises `ValueError` with a sentence where the body is not the answer of `/v1/loads`."""
    answer = _parse_object(body)
    loads = answer.get("loads")
    if not isinstance(loads, list):
        raise ValueError('it has no list "loads"')
    now = _timestamp(answer.get("timestamp"))
    ranks: dict[str, EngineRank] = {}
    offered = False
    for load in loads:
        if isinstance(load, dict) and (load.get("dp_rank") is None or _count(load["dp_rank"]) is not None):
            rank = _loads_rank(load, now)
            ranks[rank.dp_rank] = rank
            moments = load.get("decode_moments", False)
            offered = offered or moments is None or _moments(moments) is not None
    _require_bounded(ranks)
    return EngineLoads(tuple(ranks[dp_rank] for dp_rank in sorted(ranks, key=int)), offered)


def _loads_rank(load: dict[str, Any], now: float | None) -> EngineRank:
    """One element of `loads`. `now` is when the server answered, on the clock of the element's own `timestamp`."""
    rank = str(load.get("dp_rank") or 0)
    memory = load["memory"] if isinstance(load.get("memory"), dict) else {}
    speculative = load["speculative"] if isinstance(load.get("speculative"), dict) else {}
    written = _number(load.get("timestamp"))
    running = _number(load.get("num_running_reqs"))
    if running and now is not None and written is not None and now - written > STALE_SNAPSHOT_SECONDS:
        return EngineRank(rank, snapshot_timestamp=written)
    return EngineRank(
        rank,
        running_requests=running,
        queue_requests=_number(load.get("num_waiting_reqs")),
        context_tokens=_number(load.get("num_used_tokens")),
        kv_cache_usage_ratio=_number(load.get("token_usage")),
        moments=_moments(load.get("decode_moments")),
        accept_length=_number(speculative.get("accept_length")),
        tokens_per_second=_number(load.get("gen_throughput")),
        prefill_busy_seconds_total=_seconds(load.get("total_prefill_busy_us")),
        prefill_tokens_total=_number(load.get("total_prefill_uncached_tokens")),
        weight_memory_bytes=_bytes(memory.get("weight_gb")),
        kv_cache_memory_bytes=_bytes(memory.get("kv_cache_gb")),
        snapshot_timestamp=written,
        snapshot_age_seconds=now - written if now is not None and written is not None and now >= written else None,
    )


def _moments(value: object) -> DecodeMoments | None:
    """The six sums, times in seconds; `None` where they are absent or not six finite numbers (an internal field)."""
    if not isinstance(value, list) or len(value) != 6:
        return None
    sums = [_number(element) for element in value]
    steps, batch, microseconds, batch_squared, batch_microseconds, tokens = sums
    if (
        steps is None or batch is None or microseconds is None
        or batch_squared is None or batch_microseconds is None or tokens is None
    ):  # fmt: skip
        return None
    return DecodeMoments(steps, batch, microseconds / 1e6, batch_squared, batch_microseconds / 1e6, tokens)


def _timestamp(value: object) -> float | None:
    """Unix seconds of an ISO 8601 timestamp with its zone; `None` where it is none."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


# ------------------------------------------------------------------------------------- /model_info, /server_info


def parse_model_info(body: bytes) -> EngineIdentity:
    """What `/model_info` tells: model path, type and architectures. Raises `ValueError` with a sentence."""
    info = _parse_object(body)
    architectures = info.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return EngineIdentity(
        model_path=_text(info.get("model_path")),
        model_type=_text(info.get("model_type")),
        architectures=tuple(name for name in map(_text, names[:16]) if name is not None),
    )


def parse_server_info(body: bytes) -> EngineIdentity:
    """The allowed fields of `/server_info`, and nothing else of it: the answer holds keys and passwords in clear.

    Its shapes: flat up to 0.4.3; the scheduler's state merged into it 0.4.4 to 0.4.6; then a list `internal_states`, one per
    DP rank, with elements that may be null. A value that was resolved only in the scheduler is taken from there. Raises
    `ValueError` with a sentence, which quotes nothing of the body.
    """
    info = _parse_object(body)
    states = info.get("internal_states")
    state = next((element for element in states if isinstance(element, dict)), {}) if isinstance(states, list) else {}
    if not {"model_path", "tp_size"} & info.keys():
        raise ValueError("it is an object without model_path and tp_size")

    def read(key: str) -> object:
        value = info.get(key)
        return state.get(key) if value is None else value

    # From 0.5.22 DP attention shows as attn_dp_size N beside dp_size 1, before that as dp_size N.
    attention_ranks = _count(read("attn_dp_size")) or 1
    ranks = _count(read("dp_size"))
    algorithm = _text(read("speculative_algorithm"))
    mode = _text(read("disaggregation_mode"))
    return EngineIdentity(
        version=_text(read("version")),
        model_path=_text(read("model_path")),
        served_model_name=_text(read("served_model_name")),
        tensor_parallel=_count(read("tp_size")),
        pipeline_parallel=_count(read("pp_size")),
        data_parallel=None if ranks is None else max(ranks, attention_ranks),
        expert_parallel=_count(read("ep_size")),
        dp_attention=read("enable_dp_attention") is True or attention_ranks > 1,
        node_count=_count(read("nnodes")),
        base_gpu_id=_count(read("base_gpu_id")),
        gpu_id_step=_count(read("gpu_id_step")),
        dtype=_text(read("dtype")),
        quantization=_text(read("quantization")),
        kv_cache_dtype=_text(read("kv_cache_dtype")),
        speculative_algorithm=None if algorithm is None or algorithm.upper() == "NONE" else algorithm.upper(),
        speculative_num_steps=_count(read("speculative_num_steps")),
        speculative_eagle_topk=_count(read("speculative_eagle_topk")),
        speculative_num_draft_tokens=_count(read("speculative_num_draft_tokens")),
        speculative_draft_model_path=_text(read("speculative_draft_model_path")),
        attention_backend=_text(read("attention_backend")),
        disable_cuda_graph=_flag(read("disable_cuda_graph")),
        disaggregation_mode=mode if mode in ("prefill", "decode") else None,
        context_length=_count(read("context_length")),
        max_running_requests=_count(read("max_running_requests")),
        decode_log_interval=_count(read("decode_log_interval")),
        mamba_ssm_dtype=_text(read("mamba_ssm_dtype")),
        complete=True,
    )


# ------------------------------------------------------------------------------------------------------------- values


def _parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Raises `ValueError` without quoting the body, which may hold secrets."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _number(value: object) -> float | None:
    """A finite number that is not negative, else `None`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _seconds(microseconds: object) -> float | None:
    number = _number(microseconds)
    return None if number is None else number / 1e6


def _bytes(gibibytes: object) -> float | None:
    number = _number(gibibytes)
    return None if number is None else number * GIBIBYTE


def _count(value: object) -> int | None:
    """A whole number of at most nine digits that is not negative, else `None`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9 else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    """A text, cut to the length of the longest path; `None` for anything else and for an empty one."""
    return value[:4096] if isinstance(value, str) and value else None
