"""Two fake SGLang servers at work, for a benchmark: prints their URLs on stderr as one line of JSON and serves until killed.

usage: servers.py /v1/loads|/metrics
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ceilingd.clock import SystemClock
from support.sglang_server import FakeSglang, SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = Path(__file__).parents[1] / "data" / "sglang" / "sglang_0.5.23_mtp.prom"


def full_size(metrics: Callable[[], bytes]) -> bytes:
    """The whole body of SGLang 0.5.23 (107 kB) with the simulated engine's lines in place of those that it moves."""
    simulated = metrics()
    moving = set(re.findall(rb"^(sglang:\w+)\{", simulated, re.MULTILINE))
    lines = BODY.read_bytes().splitlines(keepends=True)
    still = (line for line in lines if moving.isdisjoint(re.findall(rb"^(?:# (?:HELP|TYPE) )?(\S+?)[ {]", line)))
    return simulated + b"".join(still)


async def serve(source: str) -> None:
    """Run both until the process is stopped."""
    engines = [
        SimulatedEngine(
            SystemClock(), batch=batch, tensor_parallel=4, moments=source == "/v1/loads", context_tokens=2000 * batch
        )
        for batch in (4, 16)
    ]
    servers = []
    for engine in engines:
        replies = engine.replies()
        if source == "/metrics":
            replies["/metrics"] = partial(full_size, engine.metrics)
            del replies["/v1/loads"]
        servers.append(FakeSglang(replies))
    async with servers[0], servers[1]:
        print(json.dumps([server.url for server in servers]), file=sys.stderr, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
