"""What the handlers share: upstream, the ring's feed, the sheets of requests, runs, and counts.

Takes ProxySettings; lives from the app's start to its end, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from clairai.fields.request_fields import new_stream_id
from clairai.proxy.completions.completion_request import ScoredRequest
from clairai.proxy.completions.named_runs import NamedRuns
from clairai.proxy.completions.request_scores import RequestScores, RowBatch, ScoreBudget
from clairai.proxy.engine_info import EngineInfo, HealthCheck
from clairai.proxy.observe.observer import (
    CompletionEnd,
    MetricsObserver,
    Observer,
    Outcome,
    ProxyCounts,
)
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import RingFeed, RingFinder
from clairai.proxy.upstream import Upstream, UpstreamGone

_log: Final = logging.getLogger(__name__)


class Completion:
    """One completion on its way; `outcome` is what it would be if it ended now."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.sheet: RequestScores | None = None  # of one that asked for scores
        self.run: str | None = None
        self.outcome: Outcome = "cancelled"
        self.status: int = HTTPStatus.OK
        self._started_s = time.monotonic()
        self._first_s: float | None = None

    def note_token(self) -> None:
        """Upstream has begun: its first frame comes with its first token."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def answered(self, status: int) -> None:
        """Whole, with this status."""
        self.status = status
        self.outcome = "done" if status < HTTPStatus.BAD_REQUEST else "error"

    def failed(self, status: int) -> None:
        self.status, self.outcome = status, "error"

    def end(self) -> CompletionEnd:
        sheet, first_s = self.sheet, self._first_s
        return CompletionEnd(
            None if sheet is None else sheet.response_id,
            None if sheet is None else sheet.model,
            self.route,
            self.outcome,
            time.monotonic() - self._started_s,
            () if sheet is None else sheet.results(),
            is_scored=sheet is not None,
            run=self.run,
            status=self.status,
            first_token_seconds=None if first_s is None else first_s - self._started_s,
        )


class Proxy:
    """`app.state.proxy`."""

    def __init__(
        self,
        settings: ProxySettings,
        observers: Sequence[Observer],
        metrics: MetricsObserver | None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.upstream = Upstream(settings)
        self._observers = [*observers, *(() if metrics is None else (metrics,))]
        self.feed = RingFeed(
            deliver=self._deliver_soon, on_change=self._change_soon, observers=self._observers
        )
        self.engine_info = EngineInfo(self.upstream, self.feed)
        self.health = HealthCheck(self.upstream, self.feed, self.engine_info)
        self.lookout = RingFinder(settings, self.upstream, self.feed)
        self.runs = NamedRuns(settings)
        self._sheets: dict[int, RequestScores] = {}
        self._budget = ScoreBudget(settings.limits.scores_in_all)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = self._completions = self._cancelled = self._lost = self._mismatched = 0

    async def open(self) -> None:
        """RingError if the runtime folder cannot be used."""
        self.lookout.find_folder()
        self._loop = asyncio.get_running_loop()
        await self.upstream.open()
        self.lookout.start()
        self.feed.start()

    async def close(self) -> None:
        await self.runs.close()
        await self.lookout.close()
        await asyncio.to_thread(self.feed.stop)
        await self.upstream.close()

    # Completions

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A place among the requests that upstream works on; Refused if all are taken."""
        if self._streams >= self.settings.limits.streams:
            raise HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._streams} requests are being answered, and no more are taken; try later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self._streams += 1
        self._completions += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextmanager
    def completion(self, route: str) -> Iterator[Completion]:
        """One whose end the observers are told, however it comes."""
        completion = Completion(route)
        try:
            yield completion
        except HttpRefusal as refused:
            completion.failed(refused.status)
            raise
        except UpstreamGone:
            completion.failed(self.health.unanswered().status)
            raise
        except Exception:
            completion.failed(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        finally:
            self._note_end(completion)

    @contextmanager
    def scoring(self, request: ScoredRequest) -> Iterator[RequestScores]:
        """A sheet with a stream id that nobody else has or can guess."""
        stream, asked = new_stream_id(), request.asked
        sheet = RequestScores(
            stream,
            asked,
            max_scores=self.settings.limits.scores,
            budget=self._budget,
            is_attached=lambda: self.feed.is_attached,
            names=self.engine_info.names,
            needs_echo=request.is_bound,
        )
        self._sheets[stream] = sheet
        self.feed.watched[stream] = asked.prompt_scores
        try:
            yield sheet
        finally:
            del self.feed.watched[stream]
            del self._sheets[stream]
            sheet.close()
            self._lost += sheet.num_lost
            self._mismatched += sheet.num_mismatched
            if wrong := sheet.num_mismatched:
                _log.error("%d rows carried another token than the request: please report", wrong)

    def _note_end(self, completion: Completion) -> None:
        if completion.outcome == "cancelled":
            self._cancelled += 1
        end = completion.end()
        for observer in list(self._observers):
            try:
                observer.on_run_end(end)
            except Exception:
                _log.exception("%r is told no more", observer)
                self._observers.remove(observer)

    # From the feed's thread

    def _deliver_soon(self, parcels: list[RowBatch]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, parcels)

    def _change_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._change)

    def _deliver(self, parcels: list[RowBatch]) -> None:
        for parcel in parcels:
            sheet = self._sheets.get(parcel.stream)
            if sheet is not None:  # else: its client has gone meanwhile
                sheet.add_rows(parcel)

    def _change(self) -> None:
        self.lookout.look()
        for sheet in self._sheets.values():
            sheet.changed.set()

    def numbers(self) -> ProxyCounts:
        sheets = self._sheets.values()
        mismatched = self._mismatched + sum(sheet.num_mismatched for sheet in sheets)
        return ProxyCounts(
            ring=self.feed.numbers(mismatched),
            streams=self._streams,
            runs=len(self.runs),
            completions=self._completions,
            cancelled=self._cancelled,
            upstream_errors=self.upstream.errors,
            rows_lost=self._lost + sum(sheet.num_lost for sheet in sheets),
        )
