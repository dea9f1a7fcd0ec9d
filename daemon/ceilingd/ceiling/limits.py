"""Limits of every input of the model: wide of any hardware and load there is, and near enough that all results stay finite."""

from __future__ import annotations

RANKS = (1, 4096)
MEMORY_BANDWIDTH_BYTES_PER_SECOND = (1e6, 1e16)
BANDWIDTH_EFFICIENCY = (1e-3, 1.0)
LINK_BANDWIDTH_BYTES_PER_SECOND = (1e6, 1e16)
MATRIX_FLOPS_PER_SECOND = (1e6, 1e21)
ALLREDUCE_LATENCY_SECONDS = (0.0, 1.0)
FIXED_SECONDS = (0.0, 60.0)
PARAMETERS = (1, 1e15)
BATCH = (1e-6, 1e6)
"""Not whole: a mean over a window may be less than one request."""
CONTEXT_TOKENS = (0.0, 1e9)
DRAFT_LENGTH_MAX = 4096
"""Steps of a draft, and tokens of one verify pass."""
OVERRIDES = {"bytes": (0.0, 1e18), "seconds": (0.0, 1e6), "count": (0.0, 1e9)}
ROUND_SECONDS_MIN = 1e-12


def within(value: float, limits: tuple[float, float]) -> bool:
    """Whether the value is one of these; NaN never is."""
    return limits[0] <= value <= limits[1]


def require_within(value: float, limits: tuple[float, float], field: str) -> None:
    """Raises `ValueError` with the field, its limits and the value.

    >>> require_within(1e308, BATCH, "batch")
    Traceback (most recent call last):
    ValueError: batch: must be from 1e-06 to 1e+06, not 1e+308
    """
    if not within(value, limits):
        raise ValueError(f"{field}: must be from {limits[0]:g} to {limits[1]:g}, not {value:g}")
