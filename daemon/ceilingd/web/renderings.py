"""Bodies of responses, rendered once for each snapshot and never on the event loop."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog

from ceilingd.clock import Clock
from ceilingd.records import Snapshot

ASKED_SECONDS = 300.0
"""A variant asked for within this time is rendered ahead, as soon as a snapshot is published."""
GZIP_LEVEL = 1
"""Brings the exposition of a large host to a tenth of its size in half a millisecond; level 6 gains little."""

Renderer = Callable[[Snapshot], bytes]


class Variant(NamedTuple):
    """One of the bodies a snapshot can be served as."""

    kind: str
    compressed: bool


class Renderings:
    """The bodies of the latest snapshot, made on a thread of their own. All methods belong to the event loop."""

    def __init__(self, renderers: Mapping[str, Renderer], clock: Clock) -> None:
        self._renderers = renderers
        self._clock = clock
        self._log = structlog.get_logger("ceilingd.web")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="render")
        self._bodies: dict[Variant, asyncio.Future[bytes | None]] = {}
        self._under_way: set[asyncio.Future[bytes | None]] = set()
        self._asked: dict[Variant, float] = {}
        self._defective: set[str] = set()
        self.snapshot: Snapshot | None = None

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this snapshot from now on, and render what has been asked for lately."""
        self.snapshot, self._bodies = snapshot, {}
        if self._under_way:
            return  # rendering takes longer than the snapshots last: work ahead would only pile up
        now = self._clock.monotonic()
        for variant, asked in self._asked.items():
            if now - asked <= ASKED_SECONDS:
                self._start(variant, snapshot)

    async def body(self, variant: Variant) -> bytes | None:
        """The latest snapshot as this variant; `None` where rendering it fails, which is a defect and logged.

        Whoever asks while it is being rendered waits for that. Raises `LookupError` before the first snapshot."""
        if self.snapshot is None:
            raise LookupError("no snapshot yet")
        self._asked[variant] = self._clock.monotonic()
        body = self._bodies.get(variant) or self._start(variant, self.snapshot)
        return await asyncio.shield(body)  # one waiter that goes away must not cancel it for the others

    def close(self) -> None:
        """Give up the thread without waiting for it."""
        self._asked.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, variant: Variant, snapshot: Snapshot) -> asyncio.Future[bytes | None]:
        body = asyncio.get_running_loop().run_in_executor(self._thread, self._render, variant, snapshot)
        self._bodies[variant] = body
        self._under_way.add(body)
        body.add_done_callback(self._under_way.discard)
        return body

    def _render(self, variant: Variant, snapshot: Snapshot) -> bytes | None:
        try:
            body = self._renderers[variant.kind](snapshot)
        except Exception:
            if variant.kind not in self._defective:  # once, not once a second
                self._defective.add(variant.kind)
                self._log.exception("defect while rendering", kind=variant.kind)
            return None
        self._defective.discard(variant.kind)
        return gzip.compress(body, GZIP_LEVEL, mtime=0) if variant.compressed else body
