"""Asks the engine how its capture consumers do, for GET /health and GET /metrics.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from clairai.proxy.responses import HttpRefusal
from clairai.proxy.upstream import Upstream, UpstreamGone, decode_answer

ROUTE: Final = "/v1/clairai/capture"
ASK_EVERY_S: Final = 1.0  # each question interrupts the worker between two steps
ASK_TIMEOUT_S: Final = 2.0
_OFF: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


class ConsumerReport(msgspec.Struct, frozen=True):
    """One consumer, as wire/capture_messages.py describes it."""

    name: str
    state: str
    reason: str
    since: float
    refused: int
    lost: int
    free_nbytes: int | None

    @property
    def is_up(self) -> bool:
        return self.state in ("writing", "dropping")


class CaptureReport(msgspec.Struct, frozen=True):
    """All consumers; rows are counted since the engine started."""

    consumers: tuple[ConsumerReport, ...]
    rows: int
    dropped: int
    dropping_since: float | None
    discarded: int = 0


@dataclass(frozen=True)
class HealthProblem:
    """What is wrong with capturing, or with the proxy, and since when, in seconds since 1970."""

    reason: str
    since: float


class CaptureWatch:
    """The last report of this engine. Asks when somebody wants to know, and not too often."""

    def __init__(
        self,
        upstream: Upstream,
        engine_key: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine_key` changes when the engine may be another one."""
        self._upstream, self._engine_key, self._clock = upstream, engine_key, clock
        self._report: CaptureReport | None = None
        self._asked_s = float("-inf")
        self._off_key: Any = None  # of an engine that does not capture
        self._asking = asyncio.Lock()

    @property
    def report(self) -> CaptureReport | None:
        """As last heard; None if the engine does not capture."""
        return self._report

    async def look(self) -> CaptureReport | None:
        async with self._asking:
            if self._engine_key() != self._off_key and self._clock() >= self._asked_s + ASK_EVERY_S:
                await self._ask()
                self._asked_s = self._clock()
        return self._report

    async def problems(self) -> list[HealthProblem]:
        report = await self.look()
        if report is None:
            return []
        found = [
            HealthProblem(f"capture consumer {one.name} is {one.state}: {one.reason}", one.since)
            for one in report.consumers
            if one.state != "writing"
        ]
        if report.dropping_since is not None:
            reason = (
                "captured rows were dropped in the last minute: the capture writer takes them too "
                "slowly, or not at all"
            )
            found.append(HealthProblem(reason, report.dropping_since))
        return found

    async def _ask(self) -> None:
        key = self._engine_key()
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._upstream.ask("GET", ROUTE) as response,
            ):
                body = await self._upstream.read_body(response)
            if response.status in _OFF:
                self._off_key, self._report = key, None
            elif response.status == HTTPStatus.OK:
                self._report = decode_answer(body, CaptureReport, what=ROUTE)
        except (UpstreamGone, TimeoutError, HttpRefusal):
            return  # the engine's own health says what is wrong with it; the last report stands
