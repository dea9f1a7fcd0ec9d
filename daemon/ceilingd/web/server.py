"""The HTTP server: /metrics, the status page, liveness and readiness. A request does no I/O but its own response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from ceilingd.clock import Clock
from ceilingd.collectors.family import Family
from ceilingd.exposition import CONTENT_TYPES, render
from ceilingd.records import Snapshot
from ceilingd.web.listen import ListenError, listen
from ceilingd.web.negotiation import accepts_gzip, choose_format
from ceilingd.web.page import CONTENT_SECURITY_POLICY, page
from ceilingd.web.renderings import Renderings, Variant

READY_INTERVALS = 3
"""The daemon is ready while its last snapshot is younger than this many sample intervals."""
LIVE_INTERVALS = 10
"""An older snapshot is not served at all: a number that stands still must not pass as live."""
KEEP_ALIVE_SECONDS = 75.0
"""Longer than the common scrape intervals, so that Prometheus keeps its connection."""
SEND_SECONDS = 10.0
"""A client that has not taken its response by then is cut off. Prometheus gives a scrape up after 10 s by default."""
LINGER_SECONDS = 1.0
"""How long the body of a request, which nothing here reads, is drained before the connection is closed."""
STOP_SECONDS = 0.3
"""Responses under way get this long when the server stops; aiohttp waits twice."""
CONNECTIONS_MAX = 256
HEADER_LINE_BYTES_MAX = 8190

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "ceilingd"}
_NEGOTIATED = {"Vary": "Accept, Accept-Encoding"}
_PAGE_HEADERS = {
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class WebServer:
    """Serves the last published snapshot. `start` before the first request, `stop` once."""

    def __init__(self, listen_address: str, families: Sequence[Family], clock: Clock, sample_interval_seconds: float) -> None:
        self._listen_address = listen_address
        self._clock = clock
        self._interval_seconds = sample_interval_seconds
        self._renderings = Renderings(
            {
                "text": partial(render, families, format="text"),
                "openmetrics": partial(render, families, format="openmetrics"),
                "page": lambda snapshot: page(snapshot).encode(errors="replace"),
            },
            clock,
        )
        self._routes: dict[str, _Handler] = {
            "/metrics": self._metrics,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
            "/": self._page,
        }
        self._runner: web.ServerRunner | None = None
        self._host, self._port = "", 0

    @property
    def port(self) -> int:
        """The port in use, which port 0 leaves to the system. Only after `start`."""
        return self._port

    @property
    def url(self) -> str:
        """Where a browser on this host finds the page. Only after `start`."""
        host = {"::": "localhost", "0.0.0.0": "localhost"}.get(self._host, self._host)  # noqa: S104  # compared, not bound
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def connections(self) -> int:
        """Open connections; never more than `CONNECTIONS_MAX` for long."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def start(self) -> None:
        """Listen. Raises `ListenError`."""
        sockets = await listen(self._listen_address)
        server = _Server(
            self._respond,
            access_log=None,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            max_line_size=HEADER_LINE_BYTES_MAX,
            max_field_size=HEADER_LINE_BYTES_MAX,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=STOP_SECONDS)
        await self._runner.setup()
        for bound in sockets:
            await web.SockSite(self._runner, bound).start()
        self._host, self._port = sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        """Stop listening and close every connection, within a second whatever clients do."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._renderings.close()

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this snapshot from now on. On the event loop; returns at once."""
        self._renderings.publish(snapshot)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self._answer(request)
        response.headers.update(_HEADERS)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has gone, which is its right
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        handler = self._routes.get(request.path)
        if handler is None:
            return _sentence(404, f"Nothing is here: ceilingd serves {', '.join(self._routes)}.")
        if request.method not in ("GET", "HEAD"):
            response = _sentence(405, f"{request.path} answers GET and HEAD only.")
            response.headers["Allow"] = "GET, HEAD"
            return response
        return await handler(request)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        format = choose_format(request.headers.get("Accept"))
        return await self._rendered(request, format, {"Content-Type": CONTENT_TYPES[format], **_NEGOTIATED})

    async def _page(self, request: web.BaseRequest) -> web.Response:
        response = await self._rendered(request, "page", {"Content-Type": "text/html; charset=utf-8", **_PAGE_HEADERS})
        if response.status == 503:
            response.headers["Refresh"] = "2"
        return response

    async def _rendered(self, request: web.BaseRequest, kind: str, headers: dict[str, str]) -> web.Response:
        missing = self._missing_snapshot(LIVE_INTERVALS)
        if missing is not None:
            return _unavailable(missing)
        compressed = accepts_gzip(request.headers.get("Accept-Encoding"))
        body = await self._renderings.body(Variant(kind, compressed))
        if body is None:
            return _sentence(
                500, "A defect of ceilingd keeps it from showing what it knows: its log says more; please report it."
            )
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    async def _healthy(self, _: web.BaseRequest) -> web.Response:
        return _sentence(200, "ceilingd is alive.")

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        missing = self._missing_snapshot(READY_INTERVALS) or self._missing_sources()
        return _sentence(200, "ceilingd is ready.") if missing is None else _unavailable(missing)

    def _missing_snapshot(self, intervals: int) -> str | None:
        """What is wrong, for a person, when there is no snapshot or it is older than so many sample intervals."""
        snapshot = self._renderings.snapshot
        if snapshot is None:
            return (
                "The first snapshot is not made yet: ceilingd waits for the first answer of its sources; try again in a second."
            )
        age = self._clock.monotonic() - snapshot.monotonic_seconds
        if age > intervals * self._interval_seconds:
            return (
                f"The last snapshot is {age:.0f} s old, but one is due every {self._interval_seconds:g} s: see ceilingd's log."
            )
        return None

    def _missing_sources(self) -> str | None:
        snapshot = self._renderings.snapshot
        waiting = [health.name for health in snapshot.sources if not health.attempted] if snapshot is not None else []
        return f"Not read yet since start: {', '.join(waiting)}." if waiting else None


def _sentence(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")


def _unavailable(text: str) -> web.Response:
    response = _sentence(503, text)
    response.headers["Retry-After"] = "1"
    return response


class _Server(web.Server):
    """aiohttp's server with a bound on connections and its own words for what is no HTTP."""

    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > CONNECTIONS_MAX:
            self._loop.call_soon(transport.abort)  # not at once: aiohttp is still setting the connection up


class _Protocol(RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """A request that cannot be parsed gets a sentence and no traceback in the log; a defect of ours gets both."""
        if status >= 500:
            logging.getLogger("ceilingd.web").error("defect while answering a request", exc_info=exc)
            response = _sentence(500, "A defect of ceilingd: its log says more; please report it.")
        elif isinstance(exc, LineTooLong):
            response = _sentence(
                431,
                f"The address or a header of this request is longer than {HEADER_LINE_BYTES_MAX} bytes, the most that is read.",
            )
        else:
            response = _sentence(
                status, "This is not a request that ceilingd understands: it speaks HTTP/1.1 without TLS here."
            )
        response.headers.update(_HEADERS)
        response.force_close()
        return response


__all__ = ["ListenError", "WebServer"]
