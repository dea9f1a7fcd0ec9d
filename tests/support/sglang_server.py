"""A stand-in for an SGLang server: real HTTP on a free port, with answers that a test sets and may change at any time.

    async with FakeSglang({"/metrics": body}) as server:      # bytes, a Reply, or a function returning either
        ...                                                   # server.url is its base URL
        server.replies["/metrics"] = Reply(status=401)
        server.replies["/metrics"] = HANG                     # answers when the server stops
        await server.stop(); await server.start()             # a restart on the same port
    assert server.count("/health") == 0                       # every request is in server.requests

Paths without a reply answer 404, as SGLang does. `SimulatedEngine` makes the bodies of an engine at work:

    engine = SimulatedEngine(clock, batch=8, accept_length=2.5, round_seconds=0.017)
    async with FakeSglang(engine.replies()) as server:
        clock.advance(1.0)                                    # the engine decodes for one second
        engine.load(batch=0)                                  # idle from now on
        engine.prefill(tokens=8192, seconds=0.4)              # decode stands still for 0.4 s
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from aiohttp import web

from ceilingd.clock import Clock


@dataclass(frozen=True)
class Reply:
    """One answer. The flags are the ways in which answers go wrong."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/plain; version=0.0.4; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    gzip: bool = False
    hang: bool = False
    """No answer until the server stops."""
    cut: bool = False
    """Half of the body, then the connection is closed."""
    repeat: int = 1
    """Send the body so many times, chunk by chunk: large answers without large memory."""


Answer = Reply | bytes | Callable[[], Reply | bytes]
HANG = Reply(hang=True)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class FakeSglang:
    """Serves `replies` (path -> answer) on 127.0.0.1 and records every request."""

    def __init__(self, replies: Mapping[str, Answer] | None = None) -> None:
        self.replies: dict[str, Answer] = dict(replies or {})
        self.requests: list[Request] = []
        self.arrived = asyncio.Condition()
        """Notified at each request."""
        self.bytes_sent = 0
        """Of answers with `repeat`, until the client has closed."""
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._stopping = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def count(self, path: str) -> int:
        return sum(request.path == path for request in self.requests)

    async def wait_for(self, path: str, count: int = 1) -> None:
        """Until so many requests for the path have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.count(path) >= count)

    async def start(self) -> None:
        self._stopping = asyncio.Event()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(Request(request.method, request.path, request.query_string, dict(request.headers)))
        async with self.arrived:
            self.arrived.notify_all()
        answer = self.replies.get(request.path, Reply(b'{"detail":"Not Found"}', 404))
        reply = answer() if callable(answer) else answer
        if isinstance(reply, bytes):
            content_type = "application/json" if reply.lstrip()[:1] == b"{" else Reply.content_type
            reply = Reply(reply, content_type=content_type)
        if reply.hang:
            await self._stopping.wait()
        headers = {"Content-Type": reply.content_type, **reply.headers}
        if reply.cut or reply.repeat > 1:
            return await self._stream(request, reply, headers)
        body = reply.body
        if reply.gzip:
            body = gzip.compress(body)
            headers["Content-Encoding"] = "gzip"
        return web.Response(status=reply.status, body=body, headers=headers)

    async def _stream(self, request: web.Request, reply: Reply, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=headers)
        if reply.cut:
            response.content_length = len(reply.body)
        await response.prepare(request)
        if reply.cut:
            await response.write(reply.body[: len(reply.body) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        try:
            for _ in range(reply.repeat):
                await response.write(reply.body)
                self.bytes_sent += len(reply.body)
            await response.write_eof()
        except ConnectionError:
            pass  # the client had enough
        return response


class SimulatedEngine:
    """The sums and gauges of one engine (one DP rank) that decodes at a constant rate while `clock` moves.

    As in SGLang 0.5.23: `/v1/loads` is refreshed every 15 steps and on a change of load, the gauges of `/metrics` every 40
    steps, its counters at once. `moments=False` leaves the moments out, as before 0.5.17. `draft_tokens=1` is an engine
    without speculation.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        batch: int = 1,
        accept_length: float = 3.0785,
        round_seconds: float = 0.055,
        context_tokens: int = 1000,
        draft_tokens: int = 4,
        tensor_parallel: int = 1,
        moments: bool = True,
        model_path: str = "Qwen/Qwen3.6-27B",
    ) -> None:
        self._clock = clock
        self._advanced = clock.monotonic()
        self._draft_tokens = draft_tokens
        self._tensor_parallel = tensor_parallel
        self._moments = moments
        self._model_path = model_path
        self._steps = self._batches = self._seconds = 0.0
        self._squares = self._batch_seconds = self._tokens = 0.0
        self._prefill_tokens = self._prefill_seconds = 0.0
        self._finished_tokens = 0.0
        self._stalled_seconds = 0.0
        self._snapshot = (0.0,) * 6
        self._gauges = (0, 0.0, 0.0, 0)
        self._reported_steps = 0.0
        self._batch = batch
        self._accept_length = accept_length
        self._round_seconds = round_seconds
        self._context_tokens = context_tokens
        self._write()

    def load(
        self,
        *,
        batch: int | None = None,
        accept_length: float | None = None,
        round_seconds: float | None = None,
        context_tokens: int | None = None,
    ) -> None:
        """From now on this; what is left out stays. Batch 0 is idle, and ends the requests that ran."""
        self._advance()
        if batch is not None and batch < self._batch:
            self._finished_tokens = self._tokens
        self._batch = batch if batch is not None else self._batch
        self._accept_length = accept_length if accept_length is not None else self._accept_length
        self._round_seconds = round_seconds if round_seconds is not None else self._round_seconds
        self._context_tokens = context_tokens if context_tokens is not None else self._context_tokens
        self._write()
        if self._batch == 0:
            self._gauges = (0, 0.0, self._gauges[2], self._gauges[3])

    def prefill(self, *, tokens: int, seconds: float) -> None:
        """Process a prompt: decode stands still for so long."""
        self._advance()
        self._prefill_tokens += tokens
        self._prefill_seconds += seconds
        self._stalled_seconds += seconds

    def replies(self) -> dict[str, Answer]:
        """What a server around this engine answers."""
        return {
            "/metrics": self.metrics,
            "/v1/loads": self.loads,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
        }

    def metrics(self) -> bytes:
        self._advance()
        running, throughput, accept_length, context = self._gauges
        lines = []
        for name, value in (
            ("num_running_reqs", running),
            ("num_queue_reqs", 0),
            ("num_used_tokens", context if running else 0),
            ("decode_sum_seq_lens", context),
            ("token_usage", 0.1 if running else 0.0),
            ("gen_throughput", throughput),
            ("spec_accept_length", accept_length),
        ):
            lines += [f"# HELP sglang:{name} .", f"# TYPE sglang:{name} gauge", _line(name, value, tp_rank="0")]
        steps = int(self._steps)
        decoded = round(self._tokens - self._steps % 1 * self._batch * self._accept_length)
        for tp_rank in map(str, range(self._tensor_parallel)):
            if steps:
                lines.append(_line("cuda_graph_passes_total", steps, mode="decode_cuda_graph", tp_rank=tp_rank))
                lines.append(_line("realtime_tokens_total", decoded, mode="decode", tp_rank=tp_rank))
            tokens = int(self._prefill_tokens) if tp_rank == "0" else 0
            lines.append(_line("realtime_tokens_total", tokens, mode="prefill_compute", tp_rank=tp_rank))
        lines.append(_line("generation_tokens_total", int(self._finished_tokens), is_streaming="true"))
        return "\n".join([*lines, ""]).encode()

    def loads(self) -> bytes:
        self._advance()
        load: dict[str, object] = {
            "timestamp": self._written,
            "dp_rank": 0,
            "num_running_reqs": self._batch,
            "num_waiting_reqs": 0,
            "num_used_tokens": self._context_tokens if self._batch else 0,
            "token_usage": 0.1 if self._batch else 0.0,
            "gen_throughput": self._gauges[1],
            "total_prefill_uncached_tokens": int(self._prefill_tokens),
            "total_prefill_busy_us": int(self._prefill_seconds * 1e6),
        }
        if self._moments:
            load["decode_moments"] = list(self._snapshot) if self._steps else None
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat()
        return json.dumps({"timestamp": now, "version": "0.5.23", "loads": [load]}).encode()

    def model_info(self) -> bytes:
        return json.dumps({"model_path": self._model_path, "model_type": "qwen3_5", "architectures": ["Qwen3_5"]}).encode()

    def server_info(self) -> bytes:
        speculative = self._draft_tokens > 1
        return json.dumps(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path.rpartition("/")[2],
                "version": "0.5.23" if self._moments else "0.5.13",
                "tp_size": self._tensor_parallel,
                "dp_size": 1,
                "pp_size": 1,
                "ep_size": 1,
                "dtype": "bfloat16",
                "speculative_algorithm": "EAGLE" if speculative else None,
                "speculative_num_steps": self._draft_tokens - 1 if speculative else None,
                "speculative_eagle_topk": 1 if speculative else None,
                "speculative_num_draft_tokens": self._draft_tokens if speculative else None,
                "decode_log_interval": 40,
                "api_key": "PLACEHOLDER-api-key",
                "internal_states": [{"memory_usage": {"weight": 25.9}}],
            }
        ).encode()

    def _advance(self) -> None:
        now = self._clock.monotonic()
        seconds = now - self._advanced
        self._advanced = now
        stalled = min(seconds, self._stalled_seconds)
        self._stalled_seconds -= stalled
        if self._batch == 0 or seconds <= stalled:
            return
        steps = (seconds - stalled) / self._round_seconds
        self._steps += steps
        self._batches += steps * self._batch
        self._seconds += steps * self._round_seconds
        self._squares += steps * self._batch**2
        self._batch_seconds += steps * self._batch * self._round_seconds
        self._tokens += steps * self._batch * self._accept_length
        unwritten = (self._steps - self._snapshot[0]) % 15
        if self._steps - self._snapshot[0] >= 15:
            self._write(unwritten)
        if self._steps - self._reported_steps >= 40:
            self._reported_steps += (self._steps - self._reported_steps) // 40 * 40
            throughput = self._batch * self._accept_length / self._round_seconds
            jitter = 1 + 1e-9 * (self._reported_steps % 1000)  # a measured rate never repeats to the last digit
            self._gauges = (
                self._batch,
                throughput * jitter,
                self._accept_length if self._draft_tokens > 1 else 0.0,
                self._context_tokens,
            )

    def _write(self, steps_ago: float = 0.0) -> None:
        """Refresh the snapshot behind `/v1/loads`, as of so many steps ago."""
        batch, seconds = self._batch, steps_ago * self._round_seconds
        self._written = self._clock.wall() - seconds
        self._snapshot = (
            self._steps - steps_ago,
            self._batches - steps_ago * batch,
            (self._seconds - seconds) * 1e6,
            self._squares - steps_ago * batch**2,
            (self._batch_seconds - seconds * batch) * 1e6,
            self._tokens - steps_ago * batch * self._accept_length,
        )


def _line(name: str, value: float, **labels: str) -> str:
    written = ",".join(f'{label}="{text}"' for label, text in {"model_name": "simulated", **labels}.items())
    return f"sglang:{name}{{{written}}} {float(value)}"
