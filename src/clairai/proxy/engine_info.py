"""Takes upstream's own routes; gives what the proxy must know of it: its probes, its tokens.

Both are kept until they may have changed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec

from clairai.points import quote
from clairai.proxy.completions.token_text import TokenBytes, TokenTexts
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import RingFeed
from clairai.proxy.upstream import Upstream, UpstreamGone

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


class _ListedProbe(msgspec.Struct):
    name: str


class _ProbeList(msgspec.Struct):
    data: list[_ListedProbe]


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class EngineInfo:
    """Asked for by requests; one question at a time goes upstream."""

    def __init__(self, upstream: Upstream, feed: RingFeed) -> None:
        self._upstream = upstream
        self._feed = feed
        self._texts: TokenTexts | None = None
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
        self._names = _probe_names(found)
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise HttpRefusal(
                HTTPStatus.BAD_REQUEST,
                f"no probe is named {quote(unknown[0])}; GET /v1/probes lists them",
                code="probe",
                param="clairai.probes",
            )

    async def check_steering(self, *, is_steered: bool) -> None:
        """Refused if the engine would answer as if nothing was asked; rules need taps alone."""
        route = "/v1/steering/vectors" if is_steered else "/v1/probes"
        if not await self._has(route):
            raise HttpRefusal(
                HTTPStatus.CONFLICT, _NO_STEERING, code="steering-off", param="clairai"
            )

    async def check_capture(self) -> None:
        """Refused if the engine would answer and keep nothing."""
        if not await self._has("/v1/captures"):
            code = "capture-off"
            raise HttpRefusal(HTTPStatus.CONFLICT, _NO_CAPTURE, code=code, param="clairai.capture")

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

    async def texts(self) -> TokenTexts:
        """The texts of the engine's tokens; Refused if it cannot be asked for them."""
        async with self._asking:
            # Another engine may have another model.
            key = (self._feed.epoch, self._upstream.outages)
            if self._texts is None or key != self._texts_of:
                found = await self._ask("/v1/clairai/tokens")
                if found is None:
                    raise HttpRefusal(HTTPStatus.BAD_REQUEST, _NO_ROUTES, code="unsupported")
                self._texts = TokenTexts(msgspec.json.decode(found, type=TokenBytes).tokens)
                self._texts_of = key
            return self._texts

    async def _ask(self, path: str) -> bytes | None:
        """None if upstream has no such route, or nothing to say there."""
        async with self._upstream.ask("GET", path) as response:
            body = await self._upstream.whole(response)
            return body if response.status == HTTPStatus.OK else None


def _probe_names(body: bytes) -> tuple[str, ...]:
    return tuple(probe.name for probe in msgspec.json.decode(body, type=_ProbeList).data)


# MERGED
# Takes what is known of engine and ring; gives the one word that /health answers, and why.


HealthState = Literal["starting", "ready", "degraded", "failed"]
HEALTH_TIMEOUT_S: Final = 2.0
LOSS_MEMORY_S: Final = 60.0


@dataclass(frozen=True)
class HealthStatus:
    """How things stand."""

    status: HealthState
    reason: str | None = None


class HealthCheck:
    """Asks upstream, unless whoever started the engine has said how it is."""

    def __init__(self, upstream: Upstream, feed: RingFeed, engine_info: EngineInfo) -> None:
        self._upstream = upstream
        self._feed = feed
        self._knowledge = engine_info
        self._told: HealthStatus | None = None
        self._was_ready = False
        self._model: str | None = None

    @property
    def model(self) -> str | None:
        """The name that requests call the model by, as last heard."""
        return self._model

    def tell(self, word: HealthStatus | None) -> None:
        """What `clairai serve` knows of its engine, from any thread; None: look for yourself."""
        self._told = word

    async def word(self) -> HealthStatus:
        if self._told is not None:
            return self._told
        reason = await self._upstream_trouble()
        if reason is not None:
            return HealthStatus("failed" if self._was_ready else "starting", reason)
        self._was_ready = True
        return self._ring_word()

    def unanswered(self) -> HttpRefusal:
        """What a client is told whose request upstream could not be given."""
        told = self._told or HealthStatus("failed" if self._was_ready else "starting")
        if told.status == "starting":
            return HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{told.reason or 'the engine is starting'}; "
                f"try again when GET /health says it is ready",
                code="engine-starting",
                headers={"Retry-After": "2"},
            )
        if told.reason is not None:  # whoever started it does not start it again
            return HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, told.reason, code="engine-gone")
        return HttpRefusal(
            HTTPStatus.BAD_GATEWAY, "the engine does not answer; see its log", code="engine-gone"
        )

    async def _upstream_trouble(self) -> str | None:
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self._upstream.ask("GET", "/health") as got,
            ):
                status = got.status
            if status == HTTPStatus.OK and self._model is None:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    self._model = await self._knowledge.model()
        except (UpstreamGone, TimeoutError):
            self._model = None
            return "the engine does not answer"
        except (HttpRefusal, msgspec.MsgspecError):
            return "the engine refuses the proxy"
        return None if status == HTTPStatus.OK else "the engine says that it has failed"

    def _ring_word(self) -> HealthStatus:
        if not self._feed.is_attached:
            return HealthStatus("degraded", "the engine's ring is not attached: scores are lost")
        lost_at_s = self._feed.lost_at_s
        if lost_at_s is not None and time.monotonic() - lost_at_s < LOSS_MEMORY_S:
            return HealthStatus("degraded", "records of the ring were lost in the last minute")
        return HealthStatus("ready")
