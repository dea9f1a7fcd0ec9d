"""The server over real sockets on loopback: what each route answers, and what clients cannot do to it."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from structlog.testing import capture_logs

from ceilingd.collectors import FAMILIES
from ceilingd.collectors.family import Family
from ceilingd.web import server as web_server
from ceilingd.web.server import ListenError, WebServer
from support import snapshots
from support.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ceilingd.records import Snapshot

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
PLAIN = {"Accept-Encoding": "identity"}


def snapshot(clock: FakeClock, base: Snapshot | None = None) -> Snapshot:
    """A snapshot made now."""
    return replace(base or snapshots.founding(), monotonic_seconds=clock.monotonic())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def server(clock: FakeClock) -> AsyncIterator[WebServer]:
    made = WebServer("127.0.0.1:0", FAMILIES, clock, 1.0)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def client(server: WebServer) -> AsyncIterator[aiohttp.ClientSession]:
    # As the server sends it: not unpacked, and never through a proxy.
    async with aiohttp.ClientSession(server.url, auto_decompress=False, trust_env=False) as session:
        yield session


async def exchange(port: int, request: bytes) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


# ------------------------------------------------------------------------------------------------------------ metrics


async def test_text_is_the_default(server: WebServer, client: aiohttp.ClientSession, clock: FakeClock) -> None:
    server.publish(snapshot(clock))
    async with client.get("/metrics", headers=PLAIN) as response:
        body = await response.text()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "Content-Encoding" not in response.headers
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Vary"] == "Accept, Accept-Encoding"
    assert "ceilingd_nvml_up" in {family.name for family in parse_text(body)}


async def test_openmetrics_by_accept_and_gzip_by_accept_encoding(
    server: WebServer, client: aiohttp.ClientSession, clock: FakeClock
) -> None:
    server.publish(snapshot(clock))
    async with client.get("/metrics", headers={**OPENMETRICS, "Accept-Encoding": "gzip"}) as response:
        body = gzip.decompress(await response.read()).decode()
        assert response.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert response.headers["Content-Encoding"] == "gzip"
    assert "ceilingd_nvml_up" in {family.name for family in parse_openmetrics(body)}


async def test_the_latest_snapshot_is_served(server: WebServer, client: aiohttp.ClientSession, clock: FakeClock) -> None:
    for lag_seconds in (0.25, 0.5):
        server.publish(replace(snapshot(clock), event_loop_lag_seconds=lag_seconds))
        async with client.get("/metrics", headers=PLAIN) as response:
            assert f"ceilingd_event_loop_lag_seconds {lag_seconds}\n" in await response.text()


async def test_head_sends_the_headers_alone(server: WebServer, client: aiohttp.ClientSession, clock: FakeClock) -> None:
    server.publish(snapshot(clock))
    async with client.get("/metrics", headers=PLAIN) as got, client.head("/metrics", headers=PLAIN) as head:
        assert head.status == 200
        assert head.headers["Content-Length"] == got.headers["Content-Length"]
        assert await head.read() == b""


@pytest.mark.parametrize("path", ["/metrics", "/"])
async def test_before_the_first_snapshot_a_sentence_says_so(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path, headers=PLAIN) as response:
        assert response.status == 503
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert (await response.text()).startswith("The first snapshot is not made yet: ")


@pytest.mark.parametrize("path", ["/metrics", "/"])
async def test_a_snapshot_that_stands_still_is_not_served(
    server: WebServer, client: aiohttp.ClientSession, clock: FakeClock, path: str
) -> None:
    server.publish(snapshot(clock))
    clock.advance(10)
    async with client.get(path) as response:
        assert response.status == 200
    clock.advance(0.5)
    async with client.get(path, headers=PLAIN) as response:
        assert response.status == 503
        assert "10 s old, but one is due every 1 s" in await response.text()


async def test_a_defect_in_a_family_is_a_sentence_and_not_the_end(clock: FakeClock) -> None:
    def broken(_: Snapshot) -> tuple[()]:
        raise RuntimeError("secret detail")

    server = WebServer("127.0.0.1:0", (Family("ceilingd_x_ratio", "gauge", "X.", (), broken),), clock, 1.0)
    await server.start()
    try:
        server.publish(snapshot(clock))
        async with aiohttp.ClientSession(server.url) as client:
            with capture_logs() as logs:
                async with client.get("/metrics") as response:
                    assert response.status == 500
                    assert "secret detail" not in await response.text()
            assert [entry["event"] for entry in logs] == ["defect while rendering"]
            async with client.get("/-/healthy") as response:
                assert response.status == 200
    finally:
        await server.stop()


# --------------------------------------------------------------------------------------------------- health and routes


async def test_alive_before_anything_is_known(client: aiohttp.ClientSession) -> None:
    async with client.get("/-/healthy") as response:
        assert (response.status, await response.text()) == (200, "ceilingd is alive.\n")


async def test_ready_while_snapshots_are_fresh_and_every_source_was_tried(
    server: WebServer, client: aiohttp.ClientSession, clock: FakeClock
) -> None:
    async def ready() -> tuple[int, str]:
        async with client.get("/-/ready") as response:
            return response.status, await response.text()

    status, text = await ready()
    assert (status, text[:36]) == (503, "The first snapshot is not made yet: ")

    waiting = tuple(replace(source, attempted=source.name != "sglang/qwen") for source in snapshots.founding().sources)
    server.publish(replace(snapshot(clock), sources=waiting))
    assert await ready() == (503, "Not read yet since start: sglang/qwen.\n")

    server.publish(snapshot(clock))
    assert await ready() == (200, "ceilingd is ready.\n")
    clock.advance(3)
    assert (await ready())[0] == 200
    clock.advance(0.1)
    status, text = await ready()
    assert (status, "one is due every 1 s" in text) == (503, True)


async def test_a_host_without_driver_is_ready_too(server: WebServer, client: aiohttp.ClientSession, clock: FakeClock) -> None:
    server.publish(snapshot(clock, snapshots.bare()))
    async with client.get("/-/ready") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/metric", "/-/", "/metrics/", "//metrics", "/%2e%2e/etc/passwd", "/favicon.ico"])
async def test_anything_else_is_not_found(server: WebServer, path: str) -> None:
    answer = await exchange(server.port, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"Content-Type: text/plain; charset=utf-8\r\n" in answer
    assert answer.endswith(b"Nothing is here: ceilingd serves /metrics, /-/healthy, /-/ready, /.\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/-/ready"])
async def test_other_methods_are_refused(client: aiohttp.ClientSession, method: str, path: str) -> None:
    async with client.request(method, path, data=b"x" * 1000) as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


async def test_the_page_is_locked_down(server: WebServer, client: aiohttp.ClientSession, clock: FakeClock) -> None:
    server.publish(snapshot(clock))
    async with client.get("/", headers=PLAIN) as response:
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cache-Control"] == "no-store"
        assert (await response.text()).startswith("<!doctype html>")


# ------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % index for index in range(1000)) + b"\r\n",
    ],
    ids=["TLS", "no HTTP", "many headers"],
)
async def test_what_is_no_request_gets_a_sentence(
    server: WebServer, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = await exchange(server.port, request_bytes)
    assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert answer.endswith(b"it speaks HTTP/1.1 without TLS here.\n")
    assert caplog.records == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["long header", "long path"],
)
async def test_what_is_too_long_is_told_so(server: WebServer, request_bytes: bytes) -> None:
    answer = await exchange(server.port, request_bytes)
    assert answer.startswith((b"HTTP/1.0 431 ", b"HTTP/1.1 431 "))
    assert answer.endswith(b"is longer than 8190 bytes, the most that is read.\n")


async def test_no_answer_tells_the_version_of_the_server(server: WebServer) -> None:
    for request in (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"nonsense\r\n\r\n"):
        answer = await exchange(server.port, request)
        assert b"\r\nServer: ceilingd\r\n" in answer
        assert b"aiohttp" not in answer
        assert b"Python" not in answer


async def test_more_connections_than_the_limit_are_closed(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "CONNECTIONS_MAX", 2)
    request = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    held = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        await reader.readuntil(b"alive.\n")
        held.append(writer)
    with pytest.raises(ConnectionError):
        await exchange(server.port, request)
    for writer in held:
        writer.close()


# ------------------------------------------------------------------------------------------------- slow ones, stopping


@pytest.fixture
def huge() -> tuple[Family, ...]:
    """An exposition far larger than all buffers on the way."""
    padding = "x" * 1000
    rows = tuple(((str(index), padding), 1.0) for index in range(30_000))
    return (Family("ceilingd_x_ratio", "gauge", "X.", ("a", "b"), lambda _: rows),)


def unread_scrape(port: int) -> socket.socket:
    """A client that asks for the metrics and reads nothing of the answer."""
    slow = socket.create_connection(("127.0.0.1", port), timeout=10)
    slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    return slow


async def test_a_client_that_does_not_read_is_cut_off(
    huge: tuple[Family, ...], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "SEND_SECONDS", 0.1)
    server = WebServer("127.0.0.1:0", huge, clock, 1.0)
    await server.start()
    try:
        server.publish(snapshot(clock))
        with closing(unread_scrape(server.port)) as slow:
            while not server.connections:
                await asyncio.sleep(0)
            while server.connections:
                await asyncio.sleep(0)
            received = sum(map(len, iter(lambda: slow.recv(1 << 20), b"")))
        assert 0 < received < 30_000_000, "what the kernel held, and then the end"
    finally:
        await server.stop()


async def test_stopping_takes_less_than_a_second_whatever_clients_do(huge: tuple[Family, ...], clock: FakeClock) -> None:
    server = WebServer("127.0.0.1:0", huge, clock, 1.0)
    await server.start()
    server.publish(snapshot(clock))
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(server.url) as idle:
        async with idle.get("/metrics") as response:  # kept alive, idle
            await response.read()
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        partial = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        partial.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        slow = unread_scrape(server.port)
        while server.connections < 4:
            await asyncio.sleep(0)
        with closing(silent), closing(partial), closing(slow):
            began = loop.time()
            await server.stop()
            assert loop.time() - began < 1
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", server.port)


# ---------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "url"),
    [("127.0.0.1:0", "http://127.0.0.1"), ("[::1]:0", "http://[::1]"), (":0", "http://localhost"), ("localhost:0", "http://")],
)
async def test_the_url_leads_to_the_server(clock: FakeClock, address: str, url: str) -> None:
    server = WebServer(address, FAMILIES, clock, 1.0)
    await server.start()
    try:
        assert server.url.startswith(url)
        assert server.url.endswith(f":{server.port}")
        async with aiohttp.ClientSession(server.url) as client, client.get("/-/healthy") as response:
            assert response.status == 200
    finally:
        await server.stop()


async def test_a_port_in_use_stops_the_start(server: WebServer, clock: FakeClock) -> None:
    second = WebServer(f"127.0.0.1:{server.port}", FAMILIES, clock, 1.0)
    with pytest.raises(ListenError, match=f"127.0.0.1:{server.port}"):
        await second.start()
    await second.stop()
