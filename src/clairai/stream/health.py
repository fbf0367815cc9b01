"""Takes what is known of engine and ring; gives the one word that /health answers, and why."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

import msgspec

from clairai.stream.feed import Feed
from clairai.stream.knowledge import Knowledge
from clairai.stream.refusal import Refused
from clairai.stream.upstream import Upstream, UpstreamGone

Status = Literal["starting", "ready", "degraded", "failed"]
ASK_TIMEOUT_S: Final = 2.0
LOSS_MEMORY_S: Final = 60.0


@dataclass(frozen=True)
class Word:
    """How things stand."""

    status: Status
    reason: str | None = None


class Health:
    """Asks upstream, unless whoever started the engine has said how it is."""

    def __init__(self, upstream: Upstream, feed: Feed, knowledge: Knowledge) -> None:
        self._upstream = upstream
        self._feed = feed
        self._knowledge = knowledge
        self._told: Word | None = None
        self._was_ready = False
        self._model: str | None = None

    @property
    def model(self) -> str | None:
        """The name that requests call the model by, as last heard."""
        return self._model

    def tell(self, word: Word | None) -> None:
        """What `clairai serve` knows of its engine, from any thread; None: look for yourself."""
        self._told = word

    async def word(self) -> Word:
        if self._told is not None:
            return self._told
        reason = await self._upstream_trouble()
        if reason is not None:
            return Word("failed" if self._was_ready else "starting", reason)
        self._was_ready = True
        return self._ring_word()

    def unanswered(self) -> Refused:
        """What a client is told whose request upstream could not be given."""
        told = self._told or Word("failed" if self._was_ready else "starting")
        if told.status == "starting":
            return Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{told.reason or 'the engine is starting'}; "
                f"try again when GET /health says it is ready",
                code="engine-starting",
                headers={"Retry-After": "2"},
            )
        if told.reason is not None:  # whoever started it does not start it again
            return Refused(HTTPStatus.SERVICE_UNAVAILABLE, told.reason, code="engine-gone")
        return Refused(
            HTTPStatus.BAD_GATEWAY, "the engine does not answer; see its log", code="engine-gone"
        )

    async def _upstream_trouble(self) -> str | None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), self._upstream.ask("GET", "/health") as got:
                status = got.status
            if status == HTTPStatus.OK and self._model is None:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    self._model = await self._knowledge.model()
        except (UpstreamGone, TimeoutError):
            self._model = None
            return "the engine does not answer"
        except (Refused, msgspec.MsgspecError):
            return "the engine refuses the proxy"
        return None if status == HTTPStatus.OK else "the engine says that it has failed"

    def _ring_word(self) -> Word:
        if not self._feed.is_attached:
            return Word("degraded", "the engine's ring is not attached: scores are lost")
        lost_at_s = self._feed.lost_at_s
        if lost_at_s is not None and time.monotonic() - lost_at_s < LOSS_MEMORY_S:
            return Word("degraded", "records of the ring were lost in the last minute")
        return Word("ready")
