"""The SGLang servers: are they there, what are they, and what were they seen to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ceilingd.collectors.family import Family, Row, Rows, flag
from ceilingd.records import Ceiling, EngineIdentity, RankStatus, ServerStatus, Snapshot

SERVER = ("server",)
RANK = ("server", "dp_rank")
"""The labels of every series about one data-parallel rank; `dp_rank` is "0" without data parallelism."""


def _each_server(value: Callable[[ServerStatus], float | None]) -> Rows:
    """One row for each server that has this value."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for server in snapshot.servers:
            present = value(server)
            if present is not None:
                yield (server.name,), present

    return rows


def each_rank(value: Callable[[RankStatus], float | None]) -> Rows:
    """One row for each DP rank that has this value."""

    def rows(snapshot: Snapshot) -> Iterator[Row]:
        for server in snapshot.servers:
            for rank in server.ranks:
                present = value(rank)
                if present is not None:
                    yield (server.name, rank.dp_rank), present

    return rows


def assumed_inputs(server: ServerStatus) -> tuple[str, ...]:
    """The inputs of its ceilings that nobody measured or configured, in alphabetical order."""
    of_ranks = (name for rank in server.ranks if isinstance(rank.ceiling, Ceiling) for name in rank.ceiling.assumed)
    return tuple(sorted({*server.assumed, *of_ranks}))


_UNKNOWN = EngineIdentity()


def _info(snapshot: Snapshot) -> Iterator[Row]:
    for server in snapshot.servers:
        if server.reading is None:
            continue
        identity = server.reading.identity or _UNKNOWN
        labels = (
            server.name,
            server.url,
            identity.version,
            identity.model_path,
            identity.served_model_name,
            identity.model_type,
            ",".join(identity.architectures),
            identity.tensor_parallel,
            identity.pipeline_parallel,
            identity.data_parallel,
            identity.expert_parallel,
            identity.dtype,
            identity.quantization,
            identity.kv_cache_dtype,
            identity.speculative_algorithm,
            identity.speculative_num_steps,
            identity.speculative_num_draft_tokens,
            identity.attention_backend,
            identity.disaggregation_mode,
            server.reading.decode_source,
            ",".join(assumed_inputs(server)),
        )
        yield tuple("" if label is None else str(label) for label in labels), 1


def _gpus(snapshot: Snapshot) -> Iterator[Row]:
    for server in snapshot.servers:
        for gpu in server.gpus:
            yield (server.name, gpu.dp_rank, str(gpu.tensor_parallel_rank), str(gpu.index), gpu.uuid), 1


def running_requests(rank: RankStatus) -> float | None:
    """Mean over the observation window; 0 while the rank provably rests. What the engine's own gauge says is no proof: 0 while
    a lone request decodes, and what it was before while nothing runs (0.4.1 to 0.4.3 for ever, later ones 30 s)."""
    return rank.observation.running_requests if rank.observation is not None else None


def context_tokens(rank: RankStatus) -> float | None:
    """Mean over the observation window; absent while nothing decodes, since the engine's figure stays as it was."""
    return rank.observation.context_tokens if rank.observation is not None else None


def queue_requests(rank: RankStatus) -> float | None:
    """What the engine says, while that is of now."""
    return rank.reading.queue_requests if _told_now(rank) else None


def kv_cache_usage(rank: RankStatus) -> float | None:
    """What the engine says, while that is of now."""
    return rank.reading.kv_cache_usage_ratio if _told_now(rank) else None


def _told_now(rank: RankStatus) -> bool:
    """Are the engine's own figures of this rank of now? `/v1/loads` is written when an engine falls idle, while gauges stay as
    they were: those count only while the rank is seen to decode or to rest."""
    return rank.observation is not None or rank.reading.snapshot_timestamp is not None


def _rejected(snapshot: Snapshot) -> Iterator[Row]:
    for server in snapshot.servers:
        for reason, count in server.rejected_total:
            yield (server.name, reason), count


FAMILIES = (
    Family(
        "ceilingd_server_up",
        "gauge",
        "1 while the server answers; at 0 its decode series are absent.",
        SERVER,
        _each_server(lambda server: flag(server.health.up)),
    ),
    Family(
        "ceilingd_server_info",
        "info",
        "What the server is; decode_source: what its decode series are made from; assumed: inputs neither measured nor set.",
        (
            *SERVER,
            "url",
            "version",
            "model_path",
            "served_model_name",
            "model_type",
            "architecture",
            "tp_size",
            "pp_size",
            "dp_size",
            "ep_size",
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "speculative_algorithm",
            "speculative_num_steps",
            "speculative_num_draft_tokens",
            "attention_backend",
            "disaggregation_mode",
            "decode_source",
            "assumed",
        ),
        _info,
    ),
    Family(
        "ceilingd_server_gpu",
        "gauge",
        "1 for each GPU that serves a TP rank of the server.",
        (*RANK, "tp_rank", "gpu", "uuid"),
        _gpus,
    ),
    Family(
        "ceilingd_server_scrape_duration_seconds",
        "gauge",
        "How long the last scrape of the server took.",
        SERVER,
        _each_server(lambda server: server.reading.scrape_seconds if server.reading is not None else None),
    ),
    Family(
        "ceilingd_server_scrape_body_bytes",
        "gauge",
        "Size of what the server answered last.",
        SERVER,
        _each_server(lambda server: server.reading.body_bytes if server.reading is not None else None),
    ),
    Family(
        "ceilingd_server_last_success_timestamp_seconds",
        "gauge",
        "Unix time of the last scrape that worked; absent before the first.",
        SERVER,
        _each_server(lambda server: server.health.last_success_timestamp_seconds),
    ),
    Family(
        "ceilingd_decode_accept_length",
        "gauge",
        "Tokens per request and verify step, bonus token included; 1 without speculation.",
        RANK,
        each_rank(lambda rank: rank.observation.accept_length if rank.observation is not None else None),
    ),
    Family(
        "ceilingd_decode_tokens_per_second",
        "gauge",
        "Tokens decoded per second of wall-clock time, prefill included; absent while the rank does not provably decode.",
        RANK,
        each_rank(lambda rank: rank.observation.tokens_per_second if rank.observation is not None else None),
    ),
    Family(
        "ceilingd_decode_running_requests",
        "gauge",
        "Requests in the decode batch, mean over the observation window; 0 when idle; absent while that is not known.",
        RANK,
        each_rank(running_requests),
    ),
    Family(
        "ceilingd_decode_context_tokens",
        "gauge",
        "Tokens held by all running requests together, mean over the observation window; absent while nothing decodes.",
        RANK,
        each_rank(context_tokens),
    ),
    Family(
        "ceilingd_decode_queue_requests",
        "gauge",
        "Requests that wait; absent while the engine's figure may be an old one.",
        RANK,
        each_rank(queue_requests),
    ),
    Family(
        "ceilingd_decode_kv_cache_usage_ratio",
        "gauge",
        "Share of the KV cache in use; absent while the engine's figure may be an old one.",
        RANK,
        each_rank(kv_cache_usage),
    ),
    Family(
        "ceilingd_prefill_share_ratio",
        "gauge",
        "Share of the observation window spent in prefill, where the engine says so.",
        RANK,
        each_rank(lambda rank: rank.observation.prefill_share_ratio if rank.observation is not None else None),
    ),
    Family(
        "ceilingd_observation_rejected_total",
        "counter",
        "Observations that were not believed or not used.",
        (*SERVER, "reason"),
        _rejected,
    ),
)
