"""An SGLang engine that decodes step by step on simulated time, with the habits of its versions, and the truth beside it.

    engine = SteppingEngine("0.5.13", accept_length=2.5, round_seconds=lambda batch: 0.010 + 0.0005 * batch)
    engine.at(5.0, lambda: engine.join(8, prefill_seconds=0.2))      # eight requests; decode stands still for 0.2 s
    engine.at(40.0, lambda: engine.leave(4))
    engine.run_until(7.0); engine.metrics(); engine.loads()          # what it answers at that instant
    engine.truth                                                     # sums over the decode steps so far

Requests join by a prefill, which moves the prompt counter and the gauges of load when it starts, with the batch from before.
The gauges are refreshed every 40 steps; `/v1/loads` is written every 15, on a prefill and on idle. On idle the gauges stay as
they were for ever before 0.4.4, for 30 s before 0.5.16, and become 0 at once from then on.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

STEPS_PER_SNAPSHOT = 15
STEPS_PER_REPORT = 40
EPOCH = 1_796_000_000.0
"""Unix time at second 0."""


@dataclass(frozen=True)
class Truth:
    """Sums over all decode steps since the start."""

    steps: int = 0
    batches: int = 0
    seconds: float = 0.0
    tokens: int = 0
    contexts: int = 0


@dataclass
class _Request:
    context: int
    remaining: float
    generated: int = 0


class SteppingEngine:
    """One DP rank, at second 0 and idle. `accept_length` is the mean of a random number of tokens; 1.0 is without any."""

    def __init__(
        self, version: str, *, accept_length: float = 2.5, round_seconds: Callable[[int], float] = lambda batch: 0.02
    ) -> None:
        self.version = tuple(map(int, version.split(".")))
        self.truth = Truth()
        self.clock_offset_seconds = 0.0
        """How far the wall clock of its host was set."""
        self._accept_length = accept_length
        self._round_seconds = round_seconds
        self._random = random.Random(7)
        self._jitter = 1.0
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._requests: list[_Request] = []
        self._prefill_tokens = self._finished_tokens = 0
        self._sums = [0.0] * 6
        self._launched: tuple[float, int, int] | None = None
        self._gauges = {"running": 0, "used": 0, "lengths": 0, "throughput": 0.0, "accept_length": 0.0}
        self._reported_seconds = 0.0
        self._unreported = Truth()
        self._unwritten_steps = 0
        self._idle_since: float | None = None
        self._write()

    @property
    def batch(self) -> int:
        """Requests that run."""
        return len(self._requests)

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do this then, or when the step or prefill under way is through."""
        heapq.heappush(self._agenda, (seconds, next(self._count), action))

    def join(self, count: int, *, prefill_seconds: float, prompt: int = 1000, tokens: float = float("inf")) -> None:
        """So many requests, processed together; each ends after so many tokens."""
        self._gauges.update(running=len(self._requests), used=self._context() + count * prompt)
        self._prefill_tokens += count * prompt
        self._write()
        self._launched = None
        self._now += prefill_seconds
        self._requests += [_Request(prompt, tokens) for _ in range(count)]

    def leave(self, count: int) -> None:
        """So many requests are finished."""
        for _ in range(count):
            self._finished_tokens += self._requests.pop().generated
        if not self._requests:
            self._rest()

    def stall(self) -> None:
        """The step that begins now never ends."""
        self._round_seconds = lambda batch: float("inf")

    def run_until(self, seconds: float) -> None:
        while True:
            due = self._agenda[0][0] if self._agenda else float("inf")
            if due <= self._now or (not self._requests and due <= seconds):
                self._now = max(self._now, due)
                heapq.heappop(self._agenda)[2]()
            elif not self._requests:
                self._now = max(self._now, seconds)
                if self._idle_since is not None and self.version >= (0, 4, 4) and seconds - self._idle_since > 30:
                    self._gauges.update(running=0, used=0, throughput=0.0)
                return
            else:
                step_seconds = self._round_seconds(len(self._requests)) * self._jitter
                if self._now + step_seconds > seconds:
                    return
                self._step(step_seconds)

    def metrics(self) -> bytes:
        gauges = self._gauges
        lines = [
            f'sglang:{name}{{tp_rank="0"}} {float(value)!r}'
            for name, value in (
                ("num_running_reqs", gauges["running"]),
                ("num_queue_reqs", 0),
                ("num_used_tokens", gauges["used"]),
                ("token_usage", gauges["used"] / 1e6),
                ("gen_throughput", gauges["throughput"]),
                ("spec_accept_length", gauges["accept_length"]),
            )
        ]
        if self.version >= (0, 5, 7):
            lines.append(f'sglang:decode_sum_seq_lens{{tp_rank="0"}} {gauges["lengths"]}')
            lines.append(f'sglang:realtime_tokens_total{{mode="prefill_compute",tp_rank="0"}} {self._prefill_tokens}')
            if self.truth.steps:
                lines.append(f'sglang:cuda_graph_passes_total{{mode="decode_cuda_graph",tp_rank="0"}} {self.truth.steps}')
                lines.append(f'sglang:realtime_tokens_total{{mode="decode",tp_rank="0"}} {self.truth.tokens}')
        lines.append(f"sglang:generation_tokens_total {self._finished_tokens}")
        return "\n".join([*lines, ""]).encode()

    def loads(self, seconds: float) -> bytes:
        """Answered at this second, by the clock of its host."""
        now = datetime.fromtimestamp(EPOCH + seconds + self.clock_offset_seconds, UTC).isoformat()
        return json.dumps({"timestamp": now, "loads": [self._snapshot]}).encode()

    def _context(self) -> int:
        return sum(request.context for request in self._requests)

    def _step(self, seconds: float) -> None:
        batch, generated = len(self._requests), 0
        if self._launched is not None:
            launch, batch_before, generated_before = self._launched
            micros = (self._now - launch) * 1e6
            moments = (1, batch_before, micros, batch_before**2, batch_before * micros, generated_before)
            self._sums = [total + part for total, part in zip(self._sums, moments, strict=True)]
        self._jitter = 1 + 0.002 * self._random.random()  # no two measured rates are alike to the last digit
        truth, context, launch = self.truth, self._context(), self._now
        self._now += seconds
        whole = int(self._accept_length)
        for request in self._requests:
            tokens = whole + (self._random.random() < self._accept_length - whole)
            request.context += tokens
            request.remaining -= tokens
            request.generated += tokens
            generated += tokens
        self._launched = (launch, batch, generated)
        self._idle_since = None
        self.truth = Truth(
            truth.steps + 1, truth.batches + batch, truth.seconds + seconds, truth.tokens + generated, truth.contexts + context
        )
        if self.truth.steps - self._unreported.steps >= STEPS_PER_REPORT:
            self._report(batch)
        self._finished_tokens += sum(request.generated for request in self._requests if request.remaining <= 0)
        self._requests = [request for request in self._requests if request.remaining > 0]
        self._unwritten_steps += 1
        if self._unwritten_steps >= STEPS_PER_SNAPSHOT:
            self._write()
        if not self._requests:
            self._rest()

    def _report(self, batch: int) -> None:
        before = self._unreported
        tokens = self.truth.tokens - before.tokens
        self._gauges.update(
            running=batch,
            used=self._context(),
            lengths=self._context(),
            throughput=tokens / (self._now - self._reported_seconds),
            accept_length=tokens / (self.truth.batches - before.batches) if self._accept_length > 1 else 0.0,
        )
        self._unreported, self._reported_seconds = self.truth, self._now

    def _rest(self) -> None:
        self._idle_since, self._launched = self._now, None
        if self.version >= (0, 5, 16):
            self._gauges.update(running=0, used=0, throughput=0.0)
        self._write()

    def _write(self) -> None:
        self._unwritten_steps = 0
        self._snapshot = {
            "timestamp": EPOCH + self._now + self.clock_offset_seconds,
            "dp_rank": 0,
            "num_running_reqs": len(self._requests),
            "num_waiting_reqs": 0,
            "num_used_tokens": self._context(),
            "token_usage": self._context() / 1e6,
            "total_prefill_uncached_tokens": self._prefill_tokens,
            "total_prefill_busy_us": 0,
            "decode_moments": list(self._sums) if self._sums[0] else None,
        }
