"""Takes a request to be passed on; gives upstream's answer as it comes, or why there is none.

Follows no redirect and no proxy setting: keys go to the address that was given, and nowhere else.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, ClassVar, Final

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from clairai.proxy.completions.sse import data_frame
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal

# A little under the 5 s after which vLLM closes an idle connection (envs.py,
# VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request on one that is just being closed would be lost.
KEEP_ALIVE_S: Final = 2.0
READ_BYTES: Final = 1 << 16
Headers = Iterable[tuple[str, str]]

_HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade"),
    )
)
# What a browser or a client has to do with this proxy, and with it alone.
_NOT_FORWARDED: Final = frozenset(
    ("host", "content-length", "cookie", "origin", "referer", "authorization", "expect")
)
_NOT_RETURNED: Final = frozenset(("server", "date", "content-length", "set-cookie", "alt-svc"))


class UpstreamGone(Exception):
    """It ended in the middle of an answer."""

    code: ClassVar[str] = "engine-gone"
    message: ClassVar[str] = "the engine ended in the middle of the answer"

    @classmethod
    def told(cls) -> dict[str, Any]:
        """OpenAI's shape: what a client is told who has a part of the answer."""
        about = {"type": "server_error", "param": None, "code": cls.code}
        return {"error": {"message": cls.message, **about}}

    @classmethod
    def frame(cls) -> bytes:
        return data_frame(msgspec.json.encode(cls.told()))


class NotSteered(UpstreamGone):
    """It answers a request that was to be steered or watched, and does not say that it is."""

    code = "unsupported"
    message = "the engine does not say that it steers this answer, so it is not given"


class Upstream:
    """The engine's HTTP server."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self.errors = 0  # completions that it did not answer, or not to the end
        self.outages = 0  # times it could not be reached: what was known of it may be old

    async def open(self) -> None:
        path = self._settings.upstream_socket
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            if path is None
            else aiohttp.UnixConnector(str(path), limit=0, keepalive_timeout=KEEP_ALIVE_S)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.timeouts.connect, sock_read=None
            ),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes | AsyncIterable[bytes] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, its body not read yet; leaving early hangs up, which ends the work on it."""
        assert self._session is not None
        url = URL(self._settings.upstream_url + path, encoded=True)
        sent = CIMultiDict(headers)
        key = self._settings.upstream_api_key
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        # In parts where it is large: other streams go on between them.
        data = _in_parts(body) if isinstance(body, bytes) else body
        try:
            response = await self._session.request(
                method, url, headers=sent, data=data, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.outages += 1
            raise UpstreamGone(type(error).__name__) from error
        try:
            if response.status == HTTPStatus.UNAUTHORIZED and key is not None:
                raise HttpRefusal(HTTPStatus.BAD_GATEWAY, "the engine refuses the proxy's own key")
            yield response
        finally:
            response.close()  # a body that was read to its end has given its connection back

    async def whole(self, response: aiohttp.ClientResponse) -> bytes:
        """The body; UpstreamGone if it ends early, Refused if it is larger than any answer is."""
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


def _in_parts(body: bytes) -> bytes | io.BytesIO:
    return io.BytesIO(body) if len(body) > READ_BYTES else body


def request_headers(
    headers: Headers, *, has_own_key: bool, is_edited: bool
) -> list[tuple[str, str]]:
    """The client's headers that upstream gets; its key only if the proxy has none of its own."""
    back = _NOT_FORWARDED - ({"authorization"} if not has_own_key else frozenset())
    if is_edited:
        back |= {"accept-encoding"}  # we have to read the answer
    made = _drop_headers(headers, back)
    return [(name, value) for name, value in made if not name.lower().startswith("sec-")]


def response_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Upstream's headers that the client gets; who may read an answer is not upstream's to say."""
    kept = _drop_headers(headers.items(), _NOT_RETURNED)
    return [(name, value) for name, value in kept if not name.lower().startswith("access-control-")]


def _drop_headers(headers: Headers, dropped: frozenset[str]) -> list[tuple[str, str]]:
    pairs = list(headers)
    named = [value for name, value in pairs if name.lower() == "connection"]
    hops = {part.strip().lower() for value in named for part in value.split(",")}
    gone = _HOP_BY_HOP | dropped | hops
    return [(name, value) for name, value in pairs if name.lower() not in gone]
