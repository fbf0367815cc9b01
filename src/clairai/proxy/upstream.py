"""The HTTP client of the engine's server, and which headers pass in each direction.

It follows no redirect and no proxy setting: keys go to the configured address and nowhere else.
Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from typing import Any, ClassVar, Final, TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from clairai.proxy.completions.sse import data_frame
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.upstream_connection import Address, ConnectionPool, UpstreamResponse

READ_BYTES: Final = 1 << 16
Headers = Iterable[tuple[str, str]]
_Answer = TypeVar("_Answer")

_HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade"),
    )
)
# Headers that are between a client and this proxy alone. vLLM takes its request id from
# X-Request-Id, and the proxy makes it.
_NOT_FORWARDED: Final = frozenset(
    (
        *("host", "content-length", "cookie", "origin", "referer", "authorization", "expect"),
        "x-request-id",
    )
)
_NOT_FORWARDED_PREFIXES: Final = ("sec-", "x-clairai-")
_NOT_RETURNED: Final = _HOP_BY_HOP | {"server", "date", "content-length", "set-cookie", "alt-svc"}


class UpstreamGone(Exception):
    """Upstream cannot be reached, or ended in the middle of an answer."""

    code: ClassVar[str] = "engine-gone"
    message: ClassVar[str] = "the engine ended in the middle of the answer"

    @classmethod
    def error_body(cls) -> dict[str, Any]:
        """The error in OpenAI's shape, for a client that has a part of the answer."""
        about = {"type": "server_error", "param": None, "code": cls.code}
        return {"error": {"message": cls.message, **about}}

    @classmethod
    def frame(cls) -> bytes:
        return data_frame(msgspec.json.encode(cls.error_body()))


class OutOfDescriptors(HttpRefusal):
    """This process can open no connection to upstream; those that are open go on."""

    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the proxy has no file descriptors left; try later, or raise its `ulimit -n`",
            code="overloaded",
            headers={"Retry-After": "1"},
        )


class NotSteered(UpstreamGone):
    """Upstream answers a steered, watched or captured request without confirming that it is."""

    code = "unsupported"
    message = "the engine does not say that it steers this answer, so it is not given"


def decode_answer(body: bytes, kind: type[_Answer], *, what: str) -> _Answer:
    """Decode the answer to `what`; UpstreamGone if upstream has answered something else.

    It may be another server than ours, whose routes of these names mean other things.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamGone(f"{what} was answered with something else") from None


class Upstream:
    """The engine's HTTP server."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._pool: ConnectionPool | None = None
        self.num_errors = 0  # completions that it did not answer, or not to the end
        self.num_outages = 0  # times it could not be reached: facts about it may be out of date
        self.on_outage: Callable[[], None] = lambda: None
        self._asking: set[asyncio.Timeout] = set()  # no answer has begun
        self._answering: set[UpstreamResponse] = set()

    async def open(self) -> None:
        path, idle_s = self._settings.upstream_socket, self._settings.timeouts.upstream_idle
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s)
            if path is None
            else aiohttp.UnixConnector(str(path), limit=0, keepalive_timeout=idle_s)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        address = Address.of(self._settings.upstream_url, None if path is None else str(path))
        if address is not None:
            connect_s = self._settings.timeouts.connect
            self._pool = ConnectionPool(address, connect_s=connect_s, keep_s=idle_s)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._session is not None:
            await self._session.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it, or for the rest of an answer."""
        return len(self._asking) + len(self._answering)

    def hang_up(self) -> None:
        """End every request that waits for upstream, as if it had ended: it will not go on."""
        self.note_outage()
        for asking in list(self._asking):
            asking.reschedule(0.0)
        for response in list(self._answering):
            response.content.set_exception(aiohttp.ServerDisconnectedError())
            response.close()

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes | AsyncIterable[bytes] | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """The response, its body not read yet; leaving early hangs up, which ends its work.

        `silence_s` is how long upstream may send nothing; None: as long as for control requests.
        """
        if body is None and not headers:
            # The proxy's own question goes where completions go: they find its connection open when
            # upstream, without descriptors, accepts no other.
            body = b""
        sent = CIMultiDict(headers)
        key = self._settings.upstream_api_key
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        asking = asyncio.timeout(None)
        try:
            async with asking:
                self._asking.add(asking)
                response = await self._send(method, path, sent, body, silence_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error
        finally:
            self._asking.discard(asking)
        self._answering.add(response)
        del body  # the answer may take minutes
        try:
            if response.status == HTTPStatus.UNAUTHORIZED and key is not None:
                raise HttpRefusal(HTTPStatus.BAD_GATEWAY, "the engine refuses the proxy's own key")
            yield response
        finally:
            self._answering.discard(response)
            response.close()  # reading a body to its end has given the connection back

    async def _send(
        self,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | AsyncIterable[bytes] | None,
        silence_s: float | None,
    ) -> UpstreamResponse:
        timeouts = self._settings.timeouts
        silence_s = timeouts.control if silence_s is None else silence_s
        is_small = isinstance(body, bytes) and len(body) <= READ_BYTES
        if is_small and self._pool is not None:  # a completion, as a rule
            pairs = headers.items()
            return await self._pool.ask(method, path, pairs, body, silence_s=silence_s)  # type: ignore[arg-type]
        assert self._session is not None
        # A large body is sent in parts, so that other streams go on in between.
        is_large = isinstance(body, bytes) and not is_small
        return await self._session.request(
            method,
            URL(self._settings.upstream_url + path, encoded=True),
            headers=headers,
            data=io.BytesIO(body) if is_large else body,  # type: ignore[arg-type]
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=timeouts.connect, sock_read=silence_s
            ),
        )

    def _unreachable(self, error: Exception) -> UpstreamGone | OutOfDescriptors:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return OutOfDescriptors()
        self.note_outage()
        return UpstreamGone(type(error).__name__)

    def note_outage(self) -> None:
        """It could not be reached, by this process or by another of the proxy."""
        self.num_outages += 1
        self.on_outage()

    async def read_body(self, response: UpstreamResponse) -> bytes:
        """The whole body; UpstreamGone if it ends early, HttpRefusal if it is too large."""
        limit = self._settings.limits.answer_bytes
        body = bytearray()
        try:
            while raw := await response.content.readany():
                body += raw
                if len(body) > limit:
                    raise HttpRefusal(HTTPStatus.BAD_GATEWAY, f"the answer has over {limit} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamGone(type(error).__name__) from error
        return bytes(body)


def request_headers(
    headers: Headers, *, has_own_key: bool, is_edited: bool
) -> list[tuple[str, str]]:
    """The client's headers that upstream gets; the key only if the proxy has none of its own."""
    kept = _drop_headers(headers, _not_forwarded(has_own_key, is_edited))
    return [
        (name, value)
        for name, value in kept
        if not name.lower().startswith(_NOT_FORWARDED_PREFIXES)
    ]


@cache
def _not_forwarded(has_own_key: bool, is_edited: bool) -> frozenset[str]:
    kept = frozenset() if has_own_key else frozenset(("authorization",))
    # The proxy has to read an answer that it edits.
    dropped = frozenset(("accept-encoding",)) if is_edited else frozenset()
    return (_NOT_FORWARDED - kept) | dropped | _HOP_BY_HOP


def response_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Upstream's headers that the client gets; CORS headers are the proxy's own."""
    kept = _drop_headers(headers.items(), _NOT_RETURNED)
    return [(name, value) for name, value in kept if not name.lower().startswith("access-control-")]


def _drop_headers(headers: Headers, dropped: frozenset[str]) -> list[tuple[str, str]]:
    """`dropped`, and what a Connection header names."""
    pairs = [(name.lower(), name, value) for name, value in headers]
    named = [value for lower, _, value in pairs if lower == "connection"]
    hops = {part.strip().lower() for value in named for part in value.split(",")}
    gone = dropped | hops if hops else dropped
    return [(name, value) for lower, name, value in pairs if lower not in gone]
