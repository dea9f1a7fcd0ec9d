"""The ceiling: the predicted round, its components, and how far what was observed is from it."""

from __future__ import annotations

from collections.abc import Iterator

from ceilingd.collectors.family import Family, Row, flag
from ceilingd.collectors.server import RANK, each_rank
from ceilingd.records import Ceiling, NoCeiling, RankStatus, Snapshot


def _ceilings(snapshot: Snapshot) -> Iterator[tuple[tuple[str, str], RankStatus, Ceiling]]:
    """Labels, rank and ceiling of each DP rank that has one."""
    for server in snapshot.servers:
        for rank in server.ranks:
            if isinstance(rank.ceiling, Ceiling):
                yield (server.name, rank.dp_rank), rank, rank.ceiling


def _tokens_per_second(snapshot: Snapshot) -> Iterator[Row]:
    for labels, _, ceiling in _ceilings(snapshot):
        yield (*labels, "perfect", "peak"), ceiling.perfect_peak
        yield (*labels, "perfect", "achievable"), ceiling.perfect_achievable
        if ceiling.observed_peak is not None:
            yield (*labels, "observed", "peak"), ceiling.observed_peak
        if ceiling.observed_achievable is not None:
            yield (*labels, "observed", "achievable"), ceiling.observed_achievable


def _unavailable(snapshot: Snapshot) -> Iterator[Row]:
    for server in snapshot.servers:
        for rank in server.ranks:
            if isinstance(rank.ceiling, NoCeiling):
                yield (server.name, rank.dp_rank, rank.ceiling.reason), 1


def _round_seconds(snapshot: Snapshot) -> Iterator[Row]:
    for server in snapshot.servers:
        for rank in server.ranks:
            labels = (server.name, rank.dp_rank)
            if rank.observation is not None and rank.observation.round_seconds is not None:
                yield (*labels, "observed"), rank.observation.round_seconds
            if isinstance(rank.ceiling, Ceiling):
                yield (*labels, "predicted_peak"), rank.ceiling.peak.seconds
                yield (*labels, "predicted_achievable"), rank.ceiling.achievable.seconds


def _component_seconds(snapshot: Snapshot) -> Iterator[Row]:
    for labels, _, ceiling in _ceilings(snapshot):
        for bandwidth, predicted in (("peak", ceiling.peak), ("achievable", ceiling.achievable)):
            for component in predicted.components:
                yield (*labels, component.name, bandwidth), component.seconds


def _bottleneck(snapshot: Snapshot) -> Iterator[Row]:
    for labels, _, ceiling in _ceilings(snapshot):
        bottleneck = ceiling.peak.bottleneck
        for component in ceiling.peak.components:
            yield (*labels, component.name), flag(component.name == bottleneck)


def efficiency_ratio(predicted_seconds: float, rank: RankStatus) -> float | None:
    """Predicted over observed round: at the same batch and accept length this is observed tokens/s over the ceiling."""
    observed = rank.observation.round_seconds if rank.observation is not None else None
    return predicted_seconds / observed if observed else None


def _efficiency(snapshot: Snapshot) -> Iterator[Row]:
    for labels, rank, ceiling in _ceilings(snapshot):
        for bandwidth, predicted in (("peak", ceiling.peak), ("achievable", ceiling.achievable)):
            ratio = efficiency_ratio(predicted.seconds, rank)
            if ratio is not None:
                yield (*labels, bandwidth), ratio


def unexplained_seconds(rank: RankStatus) -> float | None:
    """Observed round minus the predicted one at the achievable bandwidth; negative where the assumption is too low."""
    if not isinstance(rank.ceiling, Ceiling) or rank.observation is None or rank.observation.round_seconds is None:
        return None
    return rank.observation.round_seconds - rank.ceiling.achievable.seconds


FAMILIES = (
    Family(
        "ceilingd_decode_ceiling_tokens_per_second",
        "gauge",
        "Most tokens per second for this batch and context: at the observed accept length or with every draft token accepted, "
        "at peak memory bandwidth (a hard bound) or at the achievable share of it.",
        (*RANK, "acceptance", "bandwidth"),
        _tokens_per_second,
    ),
    Family(
        "ceilingd_decode_ceiling_unavailable",
        "gauge",
        "1 with the reason why a rank has no ceiling; no series while it has one.",
        (*RANK, "reason"),
        _unavailable,
    ),
    Family(
        "ceilingd_decode_round_seconds",
        "gauge",
        "One decode round (with speculation: a verify pass and its draft passes), observed and predicted.",
        (*RANK, "source"),
        _round_seconds,
    ),
    Family(
        "ceilingd_decode_component_seconds",
        "gauge",
        "Terms of the predicted round on the slowest rank; they sum to the round.",
        (*RANK, "component", "bandwidth"),
        _component_seconds,
    ),
    Family(
        "ceilingd_decode_bottleneck",
        "gauge",
        "1 for the longest component of the round at peak bandwidth, 0 for the others.",
        (*RANK, "component"),
        _bottleneck,
    ),
    Family(
        "ceilingd_decode_efficiency_ratio",
        "gauge",
        "Observed tokens per second over the ceiling at the observed accept length. Above 1 at peak: an input is wrong.",
        (*RANK, "bandwidth"),
        _efficiency,
    ),
    Family(
        "ceilingd_decode_unexplained_seconds",
        "gauge",
        "Observed round minus the predicted one at the achievable bandwidth.",
        RANK,
        each_rank(unexplained_seconds),
    ),
)
