"""What the ceiling model is computed from. All frozen, all in base units; the model itself is `ceilingd.ceiling.decode`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ceilingd.ceiling.quantization import Quantization
    from ceilingd.ceiling.shape import ModelShape

SpeculativeAlgorithm = Literal["none", "mtp", "eagle", "eagle3", "standalone", "ngram"]
AllreduceAlgorithm = Literal["ring", "one_shot"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the model is spread over GPUs and in which formats it is held."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    dp_attention: bool = False
    quantization: Quantization | None = None
    """`None`: what the model's own config says."""
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"

    @property
    def attention_parallel(self) -> int:
        """Ranks that share one request's attention: all of them, or with DP attention those of one DP rank."""
        return self.tensor_parallel // self.data_parallel if self.dp_attention else self.tensor_parallel

    @property
    def kv_element_bytes(self) -> int:
        return 1 if self.kv_cache_dtype == "fp8" else 2


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft and verify. `draft_tokens` is what one verify pass checks (a chain of n steps: n + 1)."""

    algorithm: SpeculativeAlgorithm = "none"
    draft_steps: int = 0
    draft_tokens: int = 1
    draft_shape: ModelShape | None = None
    """Only for a separate draft model (eagle, eagle3, standalone)."""

    @property
    def active(self) -> bool:
        return self.algorithm != "none"

    @property
    def tokens_per_request(self) -> int:
        """Tokens of one request in one pass of the target model: D of the specification, 1 without speculation."""
        return self.draft_tokens if self.active else 1

    @property
    def most_accepted_tokens(self) -> int:
        """Most tokens a request can gain in one round, the bonus token included: `min(D, steps + 1)`. An n-gram draft
        whose depth is not stated (0 steps) can have all D accepted."""
        if not self.active:
            return 1
        if self.algorithm == "ngram" and self.draft_steps == 0:
            return self.draft_tokens
        return min(self.draft_tokens, self.draft_steps + 1)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of the group (the slowest) and the links between them."""

    memory_bandwidth_bytes_per_second: float
    bandwidth_efficiency: float
    """Share of the memory bandwidth that `achievable` counts with; the caller says whether it was learned or assumed."""
    matrix_flops_per_second: Mapping[str, float] = field(default_factory=dict)
    """Dense peak by format (`bf16`, `fp8`, `fp4`); a missing format is never the bound."""
    link_bandwidth_bytes_per_second: float | None = None
    """One way, the slowest link of the group as it runs now; `None` only where tensor_parallel is 1."""
    allreduce_latency_seconds: float = 8e-6
    allreduce_algorithm: AllreduceAlgorithm = "ring"


@dataclass(frozen=True, slots=True)
class Load:
    """What one DP rank is working on."""

    batch: float
    context_tokens_per_request: float
    accept_length: float | None = None
    """Tokens per request and round, 1 to the most that speculation can accept; `None` when unknown."""


@dataclass(frozen=True, slots=True)
class Override:
    """An explicit value for one term; `None` leaves that quantity to the model. Bytes are per GPU and round."""

    bytes_per_gpu: float | None = None
    seconds: float | None = None
    count: float | None = None


DEFAULT_FIXED_SECONDS = 0.0005
"""Scheduling, sampling and launch gaps of one round until they are learned (founding case: about 0.5 ms)."""


@dataclass(frozen=True, slots=True)
class CeilingInputs:
    """The whole input of one prediction."""

    shape: ModelShape
    hardware: Hardware
    load: Load
    deployment: Deployment = Deployment()
    speculation: Speculation = Speculation()
    fixed_seconds: float = DEFAULT_FIXED_SECONDS
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """By component name."""
    assumed: tuple[str, ...] = ()
    """Names of inputs that nobody measured or configured; passed through to the result."""
