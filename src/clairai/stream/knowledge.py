"""Takes upstream's own routes; gives what the proxy must know of it: its probes, its tokens.

Both are kept until they may have changed.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import msgspec

from clairai.points import quote
from clairai.stream.feed import Feed
from clairai.stream.refusal import Refused
from clairai.stream.upstream import Upstream
from clairai.stream.vocabulary import Texts, TokenBytes

_NO_ROUTES: Final = (
    "the engine has no clairai routes, which prompt_scores and named events need; start it with "
    "`clairai serve`, or with VLLM_PLUGINS naming clairai"
)

_NO_STEERING: Final = (
    'the engine does not steer; start it with "steering": true or "vectors": [files] in its '
    "clairai settings, and with clairai's routes (`clairai serve` has them)"
)

_NO_CAPTURE: Final = (
    'the engine does not capture; start it with "capture": {"folder": "path"} in its clairai '
    "settings, and with clairai's routes (`clairai serve` has them)"
)


class _Probe(msgspec.Struct):
    name: str


class _ProbeList(msgspec.Struct):
    data: list[_Probe]


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class Knowledge:
    """Asked for by requests; one question at a time goes upstream."""

    def __init__(self, upstream: Upstream, feed: Feed) -> None:
        self._upstream = upstream
        self._feed = feed
        self._texts: Texts | None = None
        self._names: tuple[str, ...] = ()
        self._texts_of: Any = None
        self._able: dict[str, Any] = {}  # routes that the engine was seen to have
        self._asking = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The bank as last seen; for rows that never came."""
        bank = self._feed.bank
        return self._names if bank is None else tuple(probe.name for probe in bank.probes)

    async def check(self, names: tuple[str, ...] | None) -> None:
        """Refused if a probe of this name is in no bank that upstream could have now."""
        if names is None or set(names) <= set(self.names):
            return
        found = await self._ask("/v1/probes")
        if found is None:
            return  # nobody to ask: what has no score will be told as such
        self._names = _names(found)
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise Refused(
                HTTPStatus.BAD_REQUEST,
                f"no probe is named {quote(unknown[0])}; GET /v1/probes lists them",
                code="probe",
                param="clairai.probes",
            )

    async def check_steering(self, *, is_steered: bool) -> None:
        """Refused if the engine would answer as if nothing was asked; rules need taps alone."""
        route = "/v1/steering/vectors" if is_steered else "/v1/probes"
        if not await self._has(route):
            raise Refused(HTTPStatus.CONFLICT, _NO_STEERING, code="steering-off", param="clairai")

    async def check_capture(self) -> None:
        """Refused if the engine would answer and keep nothing."""
        if not await self._has("/v1/captures"):
            code = "capture-off"
            raise Refused(HTTPStatus.CONFLICT, _NO_CAPTURE, code=code, param="clairai.capture")

    async def _has(self, route: str) -> bool:
        """Whether this engine answers there; asked once."""
        key = (self._feed.epoch, self._upstream.outages)
        if self._able.get(route) != key and await self._ask(route) is not None:
            self._able[route] = key
        return self._able.get(route) == key

    def forget_bank(self) -> None:
        """The bank has changed: the next request that names a probe asks again."""
        self._feed.bank = None
        self._names = ()

    async def model(self) -> str | None:
        """The name that requests call the model by."""
        found = await self._ask("/v1/models")
        models = [] if found is None else msgspec.json.decode(found, type=_ModelList).data
        return models[0].id if models else None

    async def texts(self) -> Texts:
        """The texts of the engine's tokens; Refused if it cannot be asked for them."""
        async with self._asking:
            # Another engine may have another model.
            key = (self._feed.epoch, self._upstream.outages)
            if self._texts is None or key != self._texts_of:
                found = await self._ask("/v1/clairai/tokens")
                if found is None:
                    raise Refused(HTTPStatus.BAD_REQUEST, _NO_ROUTES, code="unsupported")
                self._texts = Texts(msgspec.json.decode(found, type=TokenBytes).tokens)
                self._texts_of = key
            return self._texts

    async def _ask(self, path: str) -> bytes | None:
        """None if upstream has no such route, or nothing to say there."""
        async with self._upstream.ask("GET", path) as response:
            body = await self._upstream.whole(response)
            return body if response.status == HTTPStatus.OK else None


def _names(body: bytes) -> tuple[str, ...]:
    return tuple(probe.name for probe in msgspec.json.decode(body, type=_ProbeList).data)
