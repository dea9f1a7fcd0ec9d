"""One SGLang server over HTTP, as a Source of `EngineReading`s.

Each read is one request: `/v1/loads` where the engine keeps decode moments, else `/metrics`. Who the server is comes from
`/model_info` and `/server_info` in the background, so that a scheduler too busy to answer delays no reading. What each endpoint
costs the server decides how it is asked:

- `/metrics` and `/model_info` are answered by the HTTP process: cheap.
- `/v1/loads` reads shared memory from 0.5.13 on, but asks the scheduler before, and can block: it is asked only once the
  version is known to keep moments (0.5.17).
- `/server_info` waits for every scheduler; up to 0.5.13 a call that is given up can hang all later ones. It is asked once, and
  again only after a restart or a change of model; one call at a time, with a long time limit and a long pause after a failure.
- `/health` and `/health_generate` run a real request through the engine: never.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import aiohttp
from yarl import URL

from ceilingd import __version__
from ceilingd.files import read_file
from ceilingd.observation import sums_fell
from ceilingd.parse.exposition import NotAnExpositionError
from ceilingd.parse.sglang import parse_loads, parse_metrics, parse_model_info, parse_server_info
from ceilingd.records import EngineReading
from ceilingd.sources.source import SourceError

if TYPE_CHECKING:
    from ceilingd.clock import Clock
    from ceilingd.config import Config, ServerSettings
    from ceilingd.records import DecodeSource, EngineIdentity

BACKOFF_MAX_SECONDS = 15.0
"""Longest pause between reads of a server that is down: a restart is seen within this."""
IDENTITY_TIMEOUT_SECONDS = 60.0
IDENTITY_INTERVAL_SECONDS = 30.0
"""How often `/model_info` is compared with what is known."""
IDENTITY_GAP_SECONDS = 10.0
"""Least time between two starts of an identity fetch, however often the server seems to restart."""
IDENTITY_BACKOFF_SECONDS = (30.0, 60.0, 120.0, 300.0)
"""Pause after the first, second, ... failure in a row."""
KEY_FILE_LIMIT_BYTES = 64 * 1024
MOMENTS_SINCE = (0, 5, 17)
COUNTERS_SINCE = (0, 5, 7)

_PLAIN_TEXT = "text/plain;version=0.0.4"
"""Without this some servers answer in OpenMetrics, with other names."""
_GONE = frozenset({"connection_refused", "disconnected", "dns", "unreachable"})
"""Reasons after which whoever answers next may be another process."""
_TRANSPORT = _GONE | {"timeout", "tls"}


class _StatusError(SourceError):
    """An answer other than 200."""

    def __init__(self, reason: str, message: str, status: int) -> None:
        super().__init__(reason, message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """What `ceilingd check` says about a server that answers."""

    version: str | None
    served_model_name: str | None
    decode_source: DecodeSource
    problems: tuple[str, ...]
    """One sentence each: what is missing, and the cure. Empty when nothing is."""


class SglangServer:
    """The source of one server. Its errors have a reason from a fixed list and never show a key or a password."""

    def __init__(self, name: str, settings: ServerSettings, config: Config, clock: Clock) -> None:
        self.name = name
        self.interval_seconds = config.sample_interval_seconds
        self.timeout_seconds = config.server_timeout_seconds + 1.0  # ours is first, and says more
        self.backoff_max_seconds = BACKOFF_MAX_SECONDS
        self._base = URL(settings.url)
        self._key_file = settings.api_key_file
        self._key: str | None = None
        self._read_timeout_seconds = config.server_timeout_seconds
        self._body_limit_bytes = config.server_body_limit_bytes
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._identity: EngineIdentity | None = None
        self._model_info: EngineIdentity | None = None
        self._identity_task: asyncio.Task[None] | None = None
        self._identity_started_seconds = float("-inf")
        self._identity_due_seconds = float("-inf")
        self._identity_failures = 0
        self._identity_error: str | None = None
        self._epoch = 0
        """Counts restarts of the server, so that an answer of the one before is not taken for the new one's."""
        self._moments_refused = False
        self._missing: tuple[str, ...] = ()
        self._last: EngineReading | None = None

    async def read(self) -> EngineReading:
        """One reading. Raises `SourceError`."""
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._read_timeout_seconds):
                if self._key_file is not None and self._key is None:
                    await self._load_key()
                reading = await self._scrape(began)
        except TimeoutError:
            raise self._timed_out(self._read_timeout_seconds) from None
        except SourceError as error:
            if error.reason in _GONE:
                self._forget()
            raise
        self._note_restart(reading)
        self._refresh_identity()
        return replace(reading, identity=self._identity)

    async def close(self) -> None:
        """Give up what is in flight and close the connections."""
        if self._identity_task is not None:
            self._identity_task.cancel()
            await asyncio.wait({self._identity_task})
        if self._session is not None:
            await self._session.close()

    async def probe(self) -> ServerProbe:
        """Look at the server once, its identity included. Raises `SourceError` where it gives no reading.

        Waits for `/server_info` as long as that may take: given up half-way, it makes SGLang up to 0.5.13 hang later ones."""
        await self.read()
        await self._wait_for_identity(2 * IDENTITY_TIMEOUT_SECONDS)
        reading = await self.read()  # now by the best endpoint of its version
        identity = reading.identity
        version = None if identity is None else identity.version
        problems = []
        if self._identity_error is not None:
            problems.append(self._identity_error)
        elif identity is None or not identity.complete:
            problems.append(f"{self._url('/server_info')} has not answered yet: the schedulers are busy or still starting")
        if reading.decode_source != "decode_moments":
            if self._missing:
                problems.append(f"/metrics lacks {', '.join(self._missing)}: they appear with the first request")
            if reading.decode_source == "gauges" and version is not None:
                problems.append(
                    "no decode step has run yet: the counters appear with the first one"
                    if _release(version) >= COUNTERS_SINCE
                    else f"SGLang {version} counts no decode steps, only gauges that lag 40 steps: 0.5.7 and later count them"
                )
        return ServerProbe(
            version, None if identity is None else identity.served_model_name, reading.decode_source, tuple(problems)
        )

    # ------------------------------------------------------------------------------------------------------- readings

    async def _scrape(self, began: float) -> EngineReading:
        if self._keeps_moments():
            try:
                return await self._read_loads(began)
            except SourceError as error:
                if error.reason in _TRANSPORT:
                    raise
                self._moments_refused = True
        try:
            return await self._read_metrics(began)
        except _StatusError as error:
            if error.status != 404:
                raise
        # The server lives but was started without --enable-metrics. Its moments, if it has any, need no such option.
        self._refresh_identity()
        if self._identity is None:
            await self._wait_for_identity(self._read_timeout_seconds / 2)
            if self._keeps_moments():
                return await self._scrape(began)
        raise SourceError("metrics_disabled", f"{self._url('/metrics')} answers 404: start SGLang with --enable-metrics")

    def _keeps_moments(self) -> bool:
        version = None if self._identity is None else self._identity.version
        return version is not None and _release(version) >= MOMENTS_SINCE and not self._moments_refused

    async def _read_loads(self, began: float) -> EngineReading:
        body, answered = await self._get("/v1/loads", self._read_timeout_seconds)
        try:
            loads = parse_loads(body)
        except ValueError as error:
            raise self._malformed("/v1/loads", error) from None
        if not loads.offers_moments:
            raise SourceError("malformed", f"{self._url('/v1/loads')} has no decode moments")
        return EngineReading(answered, "decode_moments", None, loads.ranks, len(body), answered - began)

    async def _read_metrics(self, began: float) -> EngineReading:
        body, answered = await self._get("/metrics", self._read_timeout_seconds, accept=_PLAIN_TEXT)
        try:
            metrics = parse_metrics(body)
        except NotAnExpositionError as error:
            raise SourceError(
                "empty_body" if not body.strip() else "not_an_exposition",
                f"{self._url('/metrics')} answers 200, but {error}: is this the address of SGLang itself?",
            ) from None
        except ValueError as error:
            raise self._malformed("/metrics", error) from None
        if metrics.malformed_lines and not metrics.ranks:
            raise self._malformed("/metrics", "none of its lines for SGLang can be read")
        if not metrics.ranks and b"sglang" not in body:
            raise SourceError(
                "not_an_engine",
                f"{self._url('/metrics')} has no metrics of an SGLang engine: give the engine's own address, not a router's",
            )
        self._missing = metrics.missing
        counted = any(rank.decode_steps_total is not None and rank.decode_tokens_total is not None for rank in metrics.ranks)
        source: DecodeSource = "counters" if counted else "gauges"
        return EngineReading(answered, source, None, metrics.ranks, len(body), answered - began)

    def _note_restart(self, reading: EngineReading) -> None:
        last, self._last = self._last, reading
        if last is not None and sums_fell(last.decode_source, last.ranks, reading.decode_source, reading.ranks):
            self._forget()

    # ------------------------------------------------------------------------------------------------------- identity

    def _forget(self) -> None:
        """Whoever answers next may be another process with another model."""
        self._epoch += 1
        self._identity = self._model_info = None
        self._identity_failures = 0
        self._identity_due_seconds = self._identity_started_seconds + IDENTITY_GAP_SECONDS
        self._moments_refused = False

    def _refresh_identity(self) -> None:
        """Start asking who the server is, if it is time and nobody is asking."""
        if self._identity_task is not None:
            if not self._identity_task.done():
                return
            self._identity_task.result()  # a defect in there shall be counted, not swallowed
        if self._clock.monotonic() >= self._identity_due_seconds:
            self._identity_task = asyncio.create_task(self._fetch_identity(), name=f"identity of {self.name}")

    async def _wait_for_identity(self, timeout_seconds: float) -> None:
        """Until the fetch in flight ends, but not longer; it goes on when we stop waiting."""
        if self._identity_task is not None:
            await asyncio.wait({self._identity_task}, timeout=timeout_seconds)

    async def _fetch_identity(self) -> None:
        epoch = self._epoch
        self._identity_started_seconds = self._clock.monotonic()
        try:
            await self._load_key()
            model = await self._fetch_model_info()
            if epoch == self._epoch and (self._identity is None or not self._identity.complete or model != self._model_info):
                self._identity, self._model_info = model, model
                identity = await self._fetch_server_info(model)
                if epoch == self._epoch:
                    self._identity, self._moments_refused = identity, False
        except SourceError as error:
            self._identity_error = str(error)
            if epoch == self._epoch:
                pause = IDENTITY_BACKOFF_SECONDS[min(self._identity_failures, len(IDENTITY_BACKOFF_SECONDS) - 1)]
                self._identity_failures += 1
                self._identity_due_seconds = self._clock.monotonic() + pause
        else:
            self._identity_error = None
            if epoch == self._epoch:
                self._identity_failures = 0
                self._identity_due_seconds = self._clock.monotonic() + IDENTITY_INTERVAL_SECONDS

    async def _fetch_model_info(self) -> EngineIdentity:
        body = await self._get_either("/model_info", "/get_model_info")
        try:
            return parse_model_info(body)
        except ValueError as error:
            raise self._malformed("/model_info", error) from None

    async def _fetch_server_info(self, model: EngineIdentity) -> EngineIdentity:
        body = await self._get_either("/server_info", "/get_server_info")
        try:
            identity = parse_server_info(body)
        except ValueError as error:
            raise self._malformed("/server_info", error) from None
        return replace(
            identity,
            model_path=model.model_path or identity.model_path,
            model_type=model.model_type,
            architectures=model.architectures,
        )

    async def _get_either(self, path: str, older_path: str) -> bytes:
        """The newer endpoint; only where the server does not know it the older one, for which newer servers log a warning."""
        try:
            body, _ = await self._get(path, IDENTITY_TIMEOUT_SECONDS)
        except _StatusError as error:
            if error.status != 404:
                raise
            body, _ = await self._get(older_path, IDENTITY_TIMEOUT_SECONDS)
        return body

    async def _load_key(self) -> None:
        """Read the API key anew, so that a rotated one is taken up. Raises `SourceError` where there is none."""
        if self._key_file is None:
            return
        try:
            key = (await asyncio.to_thread(read_file, self._key_file, KEY_FILE_LIMIT_BYTES)).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise SourceError("api_key_unreadable", f"api_key_file {self._key_file} cannot be read: {reason}") from None
        if not re.fullmatch(r"[\x21-\x7e]+", key):
            raise SourceError("api_key_unreadable", f"api_key_file {self._key_file} must hold one key on one line")
        self._key = key

    # ----------------------------------------------------------------------------------------------------------- HTTP

    def _url(self, path: str) -> str:
        return str(self._base / path.lstrip("/"))

    async def _get(self, path: str, timeout_seconds: float, accept: str = "application/json") -> tuple[bytes, float]:
        """The body of a GET and the monotonic instant its answer began. Raises `SourceError`."""
        url = self._base / path.lstrip("/")
        headers = {"Accept": accept, "Accept-Encoding": "identity"}  # compressing costs the server more than it saves
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._connections().get(
                url,
                headers=headers,
                allow_redirects=False,  # a redirect would carry the key elsewhere
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as response:
                answered = self._clock.monotonic()
                self._require_ok(response.status, path)
                return await self._read_body(response, path), answered
        except TimeoutError:
            raise self._timed_out(timeout_seconds) from None
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from None
        except UnicodeError:
            raise SourceError("url", f"{self._base} names a host that cannot be looked up: correct the server's url") from None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=4),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": f"ceilingd/{__version__}"},
            )
        return self._session

    def _require_ok(self, status: int, path: str) -> None:
        url = self._url(path)
        if status in (401, 403):
            message = f"{url} answers {status}: " + (
                "put the server's API key into a file and name it in api_key_file"
                if self._key_file is None
                else f"the key in {self._key_file} is not the server's"
            )
            raise _StatusError("unauthorized", message, status)
        if 300 <= status < 400:
            raise _StatusError("redirect", f"{url} answers with a redirect, which is not followed: give its target", status)
        if status != 200:
            raise _StatusError("http_status", f"{url} answers {status}: see the server's log", status)

    async def _read_body(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """The decompressed body, given up as soon as it exceeds the limit."""
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._body_limit_bytes:
                raise SourceError(
                    "body_too_large",
                    f"{self._url(path)} sends more than {self._body_limit_bytes} bytes: "
                    "if this is SGLang, raise server_body_limit_bytes",
                )
        return bytes(body)

    def _timed_out(self, seconds: float) -> SourceError:
        return SourceError(
            "timeout", f"{self._base} did not answer within {seconds:g} s: is it overloaded, or behind a firewall?"
        )

    def _malformed(self, path: str, what: object) -> SourceError:
        return SourceError("malformed", f"the answer of {self._url(path)} is not SGLang's: {what}")

    def _unreachable(self, error: aiohttp.ClientError) -> SourceError:
        host, port = self._base.host, self._base.port
        match error:
            case aiohttp.ClientConnectorDNSError():
                return SourceError("dns", f"the name {host} does not resolve: correct the server's url")
            case aiohttp.ClientSSLError():
                return SourceError(
                    "tls", f"no trusted TLS connection to {host}:{port}: is it https, and its certificate known to this host?"
                )
            case aiohttp.ClientConnectorError() if isinstance(error.os_error, ConnectionRefusedError):
                return SourceError(
                    "connection_refused", f"nothing listens on {host}:{port}: start the server (loading takes minutes)"
                )
            case aiohttp.ClientConnectorError():
                return SourceError("unreachable", f"{host}:{port} cannot be reached: {error.os_error.strerror or 'no route'}")
            case aiohttp.InvalidURL():
                return SourceError("url", f"{self._base} is no URL of a server")
            case aiohttp.ClientResponseError():
                return SourceError("malformed", f"{host}:{port} does not speak HTTP: is it the right port?")
            case _:
                return SourceError("disconnected", f"{host}:{port} closed the connection in the middle of its answer")


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version begins with: (0, 5, 17) for `0.5.17.post1`; empty for something else."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version)
    return tuple(int(number) for number in match.groups()) if match is not None else ()
