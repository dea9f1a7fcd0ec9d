"""What the sampler asks of a source, and how a source says that it has nothing."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class SourceError(Exception):
    """A read that gave no reading.

    `reason` is one word from a short fixed list (it becomes the label of `ceilingd_source_errors_total`): never text
    from outside. The message is one sentence for a person: what is wrong and the cure. It never contains a secret.
    `consequence`: another source's failure is the cause and tells it; this one is counted but not worth a line of its own.
    """

    def __init__(self, reason: str, message: str, *, consequence: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.consequence = consequence


class Source(Protocol[T_co]):
    """One thing that is read again and again. The sampler calls `read` at most once at a time."""

    @property
    def name(self) -> str:
        """Unique, stable; becomes the label `source` and the log field: `nvml`, `nvml_links`, `sglang/qwen`."""
        ...

    @property
    def interval_seconds(self) -> float:
        """Wanted time between the starts of two reads."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """How long one read may take before the sampler gives it up. A source with finer limits of its own
        (NVML's per-call limit) enforces them inside `read`; this is the belt over those braces."""
        ...

    @property
    def backoff_max_seconds(self) -> float:
        """After k failures in a row the next read waits min(interval * 2^k, this), and never less than the interval."""
        ...

    async def read(self) -> T_co:
        """One reading. Raises `SourceError`; any other exception is a defect and is counted as reason `defect`."""
        ...

    async def close(self) -> None:
        """Release what the source holds; bounded, never raises."""
        ...
