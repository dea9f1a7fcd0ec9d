"""The SGLang source against a real HTTP server, in all the ways in which one answers."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ceilingd.config import Config, ServerSettings
from ceilingd.records import EngineReading
from ceilingd.sources.sglang import IDENTITY_INTERVAL_SECONDS, SglangServer
from ceilingd.sources.source import SourceError
from support.clock import FakeClock
from support.sglang_server import HANG, FakeSglang, Reply, SimulatedEngine

DATA = Path(__file__).parents[1] / "data"
METRICS = (DATA / "sglang/sglang_0.5.13_mtp.prom").read_bytes()
SERVER_INFO = (DATA / "sglang/server_info_0.5.13_qwen3.6-27b_tp2_mtp.json").read_bytes()
SERVER_INFO_NEW = (DATA / "sglang/server_info_0.5.23_qwen3.6-27b_tp2_mtp.json").read_bytes()
LOADS = (DATA / "sglang/v1_loads_0.5.23_mtp.json").read_bytes()
MODEL_INFO = b'{"model_path": "Qwen/Qwen3.6-27B-FP8", "model_type": "qwen3_5", "architectures": ["Qwen3_5"]}'

Open = Callable[..., SglangServer]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeSglang]:
    replies = {"/metrics": METRICS, "/model_info": MODEL_INFO, "/server_info": SERVER_INFO}
    async with FakeSglang(replies) as one:
        yield one
        assert not [request for request in one.requests if request.path.startswith("/health")]
        assert {request.method for request in one.requests} <= {"GET"}
        assert {request.query for request in one.requests} <= {""}


@pytest_asyncio.fixture
async def open_source(clock: FakeClock) -> AsyncIterator[Open]:
    opened: list[SglangServer] = []

    def open_(url: str, *, api_key_file: Path | None = None, **config: Any) -> SglangServer:
        settings = ServerSettings(url=url, name="qwen", api_key_file=api_key_file)
        opened.append(SglangServer("sglang/qwen", settings, Config(**config), clock))
        return opened[-1]

    yield open_
    await asyncio.gather(*(source.close() for source in opened))


async def settled(source: SglangServer) -> None:
    """The identity fetch in flight has ended."""
    assert source._identity_task is not None
    await asyncio.wait({source._identity_task})


async def failure(read: Awaitable[EngineReading]) -> tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        await read
    return caught.value.reason, str(caught.value)


# ------------------------------------------------------------------------------------------------------------- readings


async def test_a_reading(server: FakeSglang, open_source: Open) -> None:
    source = open_source(server.url)
    first = await source.read()
    assert first.identity is None  # asked in the background: the reading did not wait
    assert first.decode_source == "counters"
    assert first.body_bytes == len(METRICS)
    assert first.ranks[0].decode_steps_total == 46531.0
    await settled(source)
    second = await source.read()
    assert second.identity is not None
    assert second.identity.complete
    assert second.identity.version == "0.5.13"
    assert second.identity.architectures == ("Qwen3_5",)
    assert second.ranks == first.ranks


async def test_what_is_asked_of_the_server(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    source = open_source(server.url)
    for _ in range(300):
        await source.read()
        await settled(source)
        clock.advance(1.0)
    assert server.count("/metrics") == 300
    assert server.count("/server_info") == 1
    assert server.count("/model_info") == 300 // IDENTITY_INTERVAL_SECONDS
    assert server.count("/v1/loads") == 0  # 0.5.13 keeps no moments; older versions would bother the scheduler
    assert len(server.requests) == 300 + 1 + 300 // IDENTITY_INTERVAL_SECONDS
    (accept,) = {request.headers["Accept"] for request in server.requests if request.path == "/metrics"}
    assert accept == "text/plain;version=0.0.4"


async def test_gauges_only(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = (DATA / "sglang/sglang_0.4.6_mtp.prom").read_bytes()
    assert (await open_source(server.url).read()).decode_source == "gauges"


async def test_moments_are_taken_once_the_version_is_known_to_keep_them(server: FakeSglang, open_source: Open) -> None:
    server.replies.update({"/server_info": SERVER_INFO_NEW, "/v1/loads": LOADS})
    source = open_source(server.url)
    assert (await source.read()).decode_source == "counters"
    await settled(source)
    reading = await source.read()
    assert reading.decode_source == "decode_moments"
    assert reading.ranks[0].moments is not None
    assert reading.body_bytes == len(LOADS)
    assert server.count("/metrics") == 1


async def test_moments_without_enable_metrics_need_one_read(server: FakeSglang, open_source: Open) -> None:
    del server.replies["/metrics"]
    server.replies.update({"/server_info": SERVER_INFO_NEW, "/v1/loads": LOADS})
    source = open_source(server.url)
    reading = await source.read()
    assert reading.decode_source == "decode_moments"
    assert reading.identity is not None


@pytest.mark.parametrize(
    "loads", [Reply(status=404), Reply(status=401), Reply(status=500), b"<html>", b"", b'{"loads": []}', b"[]"]
)
async def test_without_usable_moments_metrics_are_read_and_nobody_asks_again(
    server: FakeSglang, open_source: Open, clock: FakeClock, loads: Reply | bytes
) -> None:
    server.replies.update({"/server_info": SERVER_INFO_NEW, "/v1/loads": loads})
    source = open_source(server.url)
    await source.read()
    await settled(source)
    for _ in range(5):
        clock.advance(1.0)
        assert (await source.read()).decode_source == "counters"
    assert server.count("/v1/loads") == 1


async def test_a_simulated_engine_end_to_end(open_source: Open, clock: FakeClock) -> None:
    engine = SimulatedEngine(clock, accept_length=3.5, round_seconds=0.05)
    clock.advance(1.0)
    async with FakeSglang(engine.replies()) as server:
        source = open_source(server.url)
        await source.read()
        await settled(source)
        first = await source.read()
        clock.advance(10.0)
        second = await source.read()
    before, after = first.ranks[0].moments, second.ranks[0].moments
    assert before is not None
    assert after is not None
    steps = after.steps - before.steps
    assert steps == pytest.approx(195)
    assert (after.sum_tokens - before.sum_tokens) / steps == pytest.approx(3.5)
    assert (after.sum_seconds - before.sum_seconds) / steps == pytest.approx(0.05)
    assert second.monotonic_seconds - first.monotonic_seconds == 10.0


async def test_a_base_url_with_a_path(server: FakeSglang, open_source: Open) -> None:
    server.replies["/engines/one/metrics"] = METRICS
    assert (await open_source(f"{server.url}/engines/one/").read()).decode_source == "counters"
    assert (await open_source(f"{server.url}/engines/one").read()).decode_source == "counters"


async def test_a_gzipped_answer(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = Reply(METRICS, gzip=True)
    reading = await open_source(server.url).read()
    assert reading.body_bytes == len(METRICS)
    assert reading.decode_source == "counters"


# ------------------------------------------------------------------------------------------------------------- failures

BAD_ANSWERS = {
    "404": (Reply(status=404), "metrics_disabled", "{url}/metrics answers 404: start SGLang with --enable-metrics"),
    "401": (
        Reply(status=401),
        "unauthorized",
        "{url}/metrics answers 401: put the server's API key into a file and name it in api_key_file",
    ),
    "403": (
        Reply(status=403),
        "unauthorized",
        "{url}/metrics answers 403: put the server's API key into a file and name it in api_key_file",
    ),
    "500": (Reply(b"Internal Server Error", 500), "http_status", "{url}/metrics answers 500: see the server's log"),
    "redirect": (
        Reply(status=307, headers={"Location": "/elsewhere"}),
        "redirect",
        "{url}/metrics answers with a redirect, which is not followed: give its target",
    ),
    "html": (
        Reply(b"<!DOCTYPE html><html></html>", content_type="text/html"),
        "not_an_exposition",
        "{url}/metrics answers 200, but the body is HTML or XML, not Prometheus metrics: is this the address of SGLang itself?",
    ),
    "empty": (
        b"",
        "empty_body",
        "{url}/metrics answers 200, but the body is empty: is this the address of SGLang itself?",
    ),
    "router": (
        b"# TYPE smg_requests_total counter\nsmg_requests_total 3\n",
        "not_an_engine",
        "{url}/metrics has no metrics of an SGLang engine: give the engine's own address, not a router's",
    ),
    "malformed": (
        b"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{ 1\n",
        "malformed",
        "the answer of {url}/metrics is not SGLang's: none of its lines for SGLang can be read",
    ),
    "cut": (Reply(METRICS, cut=True), "disconnected", "{host} closed the connection in the middle of its answer"),
    "large": (
        Reply(METRICS, repeat=100),
        "body_too_large",
        "{url}/metrics sends more than 100000 bytes: if this is SGLang, raise server_body_limit_bytes",
    ),
    "bomb": (
        Reply(b"# HELP sglang:x .\n" * 1_000_000, gzip=True),
        "body_too_large",
        "{url}/metrics sends more than 100000 bytes: if this is SGLang, raise server_body_limit_bytes",
    ),
}


@pytest.mark.parametrize(("answer", "reason", "message"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_bad_answers(server: FakeSglang, open_source: Open, answer: Reply | bytes, reason: str, message: str) -> None:
    server.replies["/metrics"] = answer
    source = open_source(server.url, server_body_limit_bytes=100_000)
    expected = message.format(url=server.url, host=server.url.removeprefix("http://"))
    assert await failure(source.read()) == (reason, expected)
    server.replies["/metrics"] = METRICS
    assert (await source.read()).decode_source == "counters"  # and the next one is fine again
    assert server.count("/elsewhere") == 0


async def test_nan_and_infinity_are_no_failure(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = METRICS.replace(b" 55.023", b" NaN").replace(b" 3.0785", b" +Inf")
    (rank,) = (await open_source(server.url).read()).ranks
    assert (rank.tokens_per_second, rank.accept_length, rank.running_requests) == (None, None, 1.0)


async def test_a_fresh_engine_without_ranks_is_no_failure(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = b'# TYPE sglang:process_cpu_seconds_total counter\nsglang:process_cpu_seconds_total{a="b"} 1\n'
    reading = await open_source(server.url).read()
    assert (reading.ranks, reading.decode_source) == ((), "gauges")


async def test_nobody_listens(server: FakeSglang, open_source: Open) -> None:
    url = server.url
    await server.stop()
    host = url.removeprefix("http://")
    expected = ("connection_refused", f"nothing listens on {host}: start the server (loading takes minutes)")
    assert await failure(open_source(url).read()) == expected


async def test_a_name_that_does_not_resolve(open_source: Open) -> None:
    reason, message = await failure(open_source("http://no-such-host.invalid:30000").read())
    assert (reason, message) == ("dns", "the name no-such-host.invalid does not resolve: correct the server's url")


async def test_https_to_a_server_that_speaks_http(server: FakeSglang, open_source: Open) -> None:
    reason, message = await failure(open_source(server.url.replace("http:", "https:")).read())
    assert reason == "tls"
    assert message.startswith("no trusted TLS connection to 127.0.0.1:")


async def test_a_port_that_does_not_speak_http(open_source: Open) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        reason, message = await failure(open_source(f"http://127.0.0.1:{port}").read())
    assert (reason, message) == ("malformed", f"127.0.0.1:{port} does not speak HTTP: is it the right port?")


async def test_a_connection_closed_before_the_answer(open_source: Open) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        assert (await failure(open_source(f"http://127.0.0.1:{port}").read()))[0] == "disconnected"


async def test_a_hanging_server_delays_nobody(server: FakeSglang, open_source: Open) -> None:
    async with FakeSglang({"/metrics": HANG}) as hanging:
        slow = asyncio.create_task(open_source(hanging.url, server_timeout_seconds=60.0).read())
        await hanging.wait_for("/metrics")
        assert (await open_source(server.url).read()).decode_source == "counters"
        assert not slow.done()
        slow.cancel()
        await asyncio.wait({slow})


async def test_a_hanging_server_times_out(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = HANG
    source = open_source(server.url, server_timeout_seconds=0.05)
    expected = f"{server.url} did not answer within 0.05 s: is it overloaded, or behind a firewall?"
    assert await failure(source.read()) == ("timeout", expected)
    assert source.timeout_seconds == 1.05  # the sampler's limit is behind ours


async def test_fifty_mebibytes_are_given_up_and_not_held(server: FakeSglang, open_source: Open) -> None:
    chunk = METRICS[:65536]
    server.replies["/metrics"] = Reply(chunk, repeat=800)
    source = open_source(server.url)  # the default limit is 8 MiB
    gc.collect()
    tracemalloc.start()
    try:
        assert (await failure(source.read()))[0] == "body_too_large"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20
    assert server.bytes_sent < 30 * 2**20


async def test_a_compressed_bomb_is_not_unpacked(server: FakeSglang, open_source: Open) -> None:
    source = open_source(server.url, server_body_limit_bytes=1_000_000)
    body = gzip.compress(b"# HELP sglang:x .\n" * 3_000_000)  # 54 MB in 50 KB
    server.replies["/metrics"] = Reply(body, headers={"Content-Encoding": "gzip"})
    gc.collect()
    tracemalloc.start()
    try:
        assert (await failure(source.read()))[0] == "body_too_large"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20


# ------------------------------------------------------------------------------------------------------------- identity


async def test_a_hanging_server_info_delays_no_reading_and_is_asked_once(
    server: FakeSglang, open_source: Open, clock: FakeClock
) -> None:
    server.replies["/server_info"] = HANG
    source = open_source(server.url)
    await source.read()
    await server.wait_for("/server_info")
    for _ in range(100):
        clock.advance(10.0)
        reading = await source.read()
    assert reading.identity is not None
    assert (reading.identity.model_path, reading.identity.complete) == ("Qwen/Qwen3.6-27B-FP8", False)
    assert server.count("/server_info") == 1
    await source.close()  # does not wait for it


async def test_a_read_given_up_does_not_give_up_server_info(server: FakeSglang, open_source: Open) -> None:
    server.replies.update({"/metrics": Reply(status=404), "/server_info": HANG})
    source = open_source(server.url, server_timeout_seconds=0.05)
    assert (await failure(source.read()))[0] == "metrics_disabled"
    assert source._identity_task is not None
    assert not source._identity_task.done()


async def test_older_endpoints_are_asked_only_where_the_newer_ones_are_unknown(server: FakeSglang, open_source: Open) -> None:
    server.replies = {"/metrics": METRICS, "/get_model_info": MODEL_INFO, "/get_server_info": SERVER_INFO}
    source = open_source(server.url)
    await source.read()
    await settled(source)
    reading = await source.read()
    assert reading.identity is not None
    assert reading.identity.complete
    assert (server.count("/get_model_info"), server.count("/get_server_info")) == (1, 1)
    server.replies.update({"/model_info": MODEL_INFO, "/server_info": Reply(status=500)})
    other = open_source(server.url)
    await other.read()
    await settled(other)
    assert (server.count("/server_info"), server.count("/get_server_info")) == (2, 1)


async def test_a_failing_identity_is_retried_ever_more_slowly(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    server.replies["/server_info"] = Reply(status=500)
    source = open_source(server.url)
    asked = []
    for second in range(1200):
        before = server.count("/server_info")
        await source.read()
        await settled(source)
        if server.count("/server_info") > before:
            asked.append(second)
        clock.advance(1.0)
    assert asked == [0, 30, 90, 210, 510, 810, 1110]
    server.replies["/server_info"] = SERVER_INFO
    clock.advance(300.0)
    await source.read()
    await settled(source)
    assert (await source.read()).identity is not None


@pytest.mark.parametrize("answer", [b"<html>", b"", b"[]", b'{"api_key": "PLACEHOLDER-secret"}', Reply(status=401)])
async def test_a_useless_identity_harms_no_reading(server: FakeSglang, open_source: Open, answer: Reply | bytes) -> None:
    server.replies["/server_info"] = answer
    source = open_source(server.url)
    await source.read()
    await settled(source)
    reading = await source.read()
    assert reading.identity is not None
    assert not reading.identity.complete
    assert source._identity_error is not None
    assert "PLACEHOLDER" not in source._identity_error


async def test_another_model_is_another_identity(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    source = open_source(server.url)
    await source.read()
    await settled(source)
    server.replies["/model_info"] = b'{"model_path": "other/model"}'
    server.replies["/server_info"] = json.dumps({**json.loads(SERVER_INFO), "model_path": "other/model"}).encode()
    clock.advance(IDENTITY_INTERVAL_SECONDS)
    await source.read()
    await settled(source)
    reading = await source.read()
    assert reading.identity is not None
    assert reading.identity.model_path == "other/model"
    assert server.count("/server_info") == 2


async def test_a_restart_is_another_identity(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    source = open_source(server.url)
    await source.read()
    await settled(source)
    clock.advance(60.0)
    await server.stop()
    assert (await failure(source.read()))[0] == "connection_refused"
    server.replies["/model_info"] = b'{"model_path": "other/model"}'
    await server.start()
    reading = await source.read()
    assert reading.identity is None  # not the one of before
    await settled(source)
    reading = await source.read()
    assert reading.identity is not None
    assert reading.identity.model_path == "other/model"
    assert server.count("/server_info") == 2


async def test_a_counter_that_fell_is_another_identity(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    source = open_source(server.url)
    await source.read()
    await settled(source)
    assert (await source.read()).identity is not None
    clock.advance(60.0)
    server.replies["/metrics"] = METRICS.replace(b" 46531.0", b" 12.0")
    assert (await source.read()).identity is None
    await settled(source)
    assert server.count("/server_info") == 2


async def test_a_server_that_flaps_is_not_asked_at_every_turn(server: FakeSglang, open_source: Open, clock: FakeClock) -> None:
    source = open_source(server.url)
    for _ in range(60):
        server.replies["/metrics"] = Reply(METRICS, cut=True)
        assert (await failure(source.read()))[0] == "disconnected"
        clock.advance(0.5)
        server.replies["/metrics"] = METRICS
        await source.read()
        await settled(source)
        clock.advance(0.5)
    assert server.count("/server_info") <= 7


# ------------------------------------------------------------------------------------------------------------- secrets


async def test_the_key_is_sent_and_read_anew(server: FakeSglang, open_source: Open, clock: FakeClock, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("first-key\n")
    source = open_source(server.url, api_key_file=key_file)
    await source.read()
    await settled(source)
    assert {request.headers.get("Authorization") for request in server.requests} == {"Bearer first-key"}
    key_file.write_text("second-key\n")
    clock.advance(IDENTITY_INTERVAL_SECONDS)
    await source.read()
    await settled(source)
    await source.read()
    assert server.requests[-1].headers["Authorization"] == "Bearer second-key"


async def test_no_error_shows_the_key(server: FakeSglang, open_source: Open, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret-key")
    source = open_source(server.url, api_key_file=key_file, server_body_limit_bytes=100_000)
    for answer, reason, _ in BAD_ANSWERS.values():
        server.replies["/metrics"] = answer
        failed, message = await failure(source.read())
        assert failed == reason
        assert "secret" not in message
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret-key"}


@pytest.mark.parametrize(("content", "what"), [(None, "No such file or directory"), (b"\xff\xfe", "it is not text")])
async def test_a_key_file_that_cannot_be_read(
    server: FakeSglang, open_source: Open, tmp_path: Path, content: bytes | None, what: str
) -> None:
    key_file = tmp_path / "key"
    if content is not None:
        key_file.write_bytes(content)
    expected = ("api_key_unreadable", f"api_key_file {key_file} cannot be read: {what}")
    assert await failure(open_source(server.url, api_key_file=key_file).read()) == expected


@pytest.mark.parametrize("content", ["", "two\nlines", "with space"])
async def test_a_key_file_without_a_key(server: FakeSglang, open_source: Open, tmp_path: Path, content: str) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(content)
    reason, message = await failure(open_source(server.url, api_key_file=key_file).read())
    assert (reason, message) == ("api_key_unreadable", f"api_key_file {key_file} must hold one key on one line")
    assert server.requests == []


# ------------------------------------------------------------------------------------------------------------- probe


async def test_probe_of_a_server_with_everything(server: FakeSglang, open_source: Open) -> None:
    server.replies.update({"/server_info": SERVER_INFO_NEW, "/v1/loads": LOADS})
    probe = await open_source(server.url).probe()
    assert (probe.version, probe.served_model_name, probe.decode_source) == ("0.5.23", "Qwen3.6-27B", "decode_moments")
    assert probe.problems == ()


async def test_probe_names_what_is_missing(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = b'# TYPE sglang:token_usage gauge\nsglang:token_usage{tp_rank="0"} 0\n'
    probe = await open_source(server.url).probe()
    assert (probe.version, probe.decode_source) == ("0.5.13", "gauges")
    assert probe.problems == (
        "/metrics lacks num_running_reqs, num_used_tokens, gen_throughput: they appear with the first request",
        "no decode step has run yet: the counters appear with the first one",
    )


async def test_probe_of_an_old_version_and_of_one_that_hides_itself(server: FakeSglang, open_source: Open) -> None:
    server.replies["/metrics"] = (DATA / "sglang/sglang_0.5.1_mtp.prom").read_bytes()
    server.replies["/server_info"] = SERVER_INFO.replace(b'"0.5.13"', b'"0.5.1"')
    probe = await open_source(server.url).probe()
    assert probe.problems == ("SGLang 0.5.1 counts no decode steps, only gauges that lag 40 steps: 0.5.7 and later count them",)
    server.replies["/server_info"] = Reply(status=401)
    probe = await open_source(server.url).probe()
    assert probe.problems == (
        f"{server.url}/server_info answers 401: put the server's API key into a file and name it in api_key_file",
    )


async def test_probe_waits_for_a_server_whose_schedulers_are_busy(server: FakeSglang, open_source: Open) -> None:
    server.replies["/server_info"] = HANG
    probing = asyncio.create_task(open_source(server.url, server_timeout_seconds=0.1).probe())
    await server.wait_for("/server_info")
    await asyncio.sleep(0.3)  # three times the limit of a scrape
    assert not probing.done()
    await server.stop()  # the busy server is stopped: its answer will never come
    with pytest.raises(SourceError, match="nothing listens"):
        await probing


async def test_probe_of_nobody(open_source: Open) -> None:
    with pytest.raises(SourceError, match="does not resolve"):
        await open_source("http://no-such-host.invalid").probe()
