"""What all handlers share: upstream, the ring, the scores of running requests, runs and counts.

Runs in: the proxy, on the event loop, from the start of the app to its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from clairai.fields.request_fields import new_stream_id
from clairai.proxy.capture_watch import CaptureWatch
from clairai.proxy.completions.completion_request import ScoredRequest
from clairai.proxy.completions.kept_scores import KeptScores
from clairai.proxy.completions.named_runs import NamedRuns
from clairai.proxy.completions.request_scores import RequestScores, RowBatch, ScoreBudget
from clairai.proxy.connections import Connections
from clairai.proxy.engine_facts import BankChanges, EngineFacts, HealthCheck
from clairai.proxy.engine_watch import EngineWatch
from clairai.proxy.load_limits import BodyBudget, ByteRates, LargeBodies, Places
from clairai.proxy.observe.observer import (
    FEATURES,
    OUTCOMES,
    CompletionEnd,
    MetricsObserver,
    Observer,
    Outcome,
    ProxyCounts,
    reads_probes,
)
from clairai.proxy.processes.shared_counts import (
    SharedBankChanges,
    SharedBodyBudget,
    SharedByteRates,
    SharedCounts,
    SharedPlaces,
    SharedScoreBudget,
)
from clairai.proxy.processes.totals import TotalCounts
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import EngineFeed, RingFinder
from clairai.proxy.upstream import Upstream, UpstreamGone

if TYPE_CHECKING:
    from clairai.proxy.processes.first_process import CompletionProcesses

_log: Final = logging.getLogger(__name__)


class Completion:
    """One completion while it is answered; `outcome` is what it would be if it ended now."""

    def __init__(
        self, route: str, *, key: str | None = None, request_id: str | None = None
    ) -> None:
        """`key` is the name of the client's key, `request_id` its own name for the request."""
        self.route = route
        self._key, self._request_id = key, request_id
        self.scores: RequestScores | None = None  # if it asked for scores
        self.run: str | None = None
        self.outcome: Outcome = "cancelled"
        self.status: int = HTTPStatus.OK
        self.started_s = time.monotonic()
        self._first_s: float | None = None

    def note_token(self) -> None:
        """A token has come from upstream."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def set_answered(self, status: int) -> None:
        self.status = status
        self.outcome = "done" if status < HTTPStatus.BAD_REQUEST else "error"

    def set_failed(self, status: int) -> None:
        self.status, self.outcome = status, "error"

    @property
    def num_tokens(self) -> int:
        """Generated so far; 0 if it asked for no scores, because then nobody counts."""
        return 0 if self.scores is None else self.scores.num_tokens

    def end(self) -> CompletionEnd:
        scores, first_s = self.scores, self._first_s
        return CompletionEnd(
            None if scores is None else scores.response_id,
            None if scores is None else scores.model,
            self.route,
            self.outcome,
            time.monotonic() - self.started_s,
            () if scores is None else scores.results(),
            is_scored=scores is not None,
            run=self.run,
            status=self.status,
            first_token_seconds=None if first_s is None else first_s - self.started_s,
            key=self._key,
            request_id=self._request_id,
        )


class CompletionCounts:
    """Completions: after every call, as many have begun as run and have ended."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.ended: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        # By class of HTTP status; 2xx: an answer that began and broke off.
        self.errors = Counter(dict.fromkeys(("2xx", "4xx", "5xx"), 0))
        self._running: set[Completion] = set()
        self._num_tokens = 0  # of those that have ended

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens + sum(one.num_tokens for one in self._running)

    def running_since_s(self) -> list[float]:
        return [one.started_s for one in self._running]

    def begin(self, completion: Completion) -> None:
        self.num_begun += 1
        self._running.add(completion)

    def end(self, completion: Completion) -> None:
        self._running.remove(completion)
        self._num_tokens += completion.num_tokens
        self.ended[completion.outcome] += 1
        if completion.outcome == "error":
            self.errors[status_class(completion.status)] += 1


def status_class(status: int) -> str:
    """As a label, which is to have few values: `4xx`."""
    return f"{status // 100}xx"


@dataclass(frozen=True)
class Obstacle:
    """Why a request that is sent now is not answered, and when to ask again."""

    reason: str
    retry_after_s: int


class Proxy:
    """`app.state.proxy`."""

    def __init__(
        self,
        settings: ProxySettings,
        observers: Sequence[Observer],
        metrics: MetricsObserver | None,
        shared: SharedCounts | None = None,
    ) -> None:
        """`shared` are the counts of all processes, if this is one of several."""
        self.settings = settings
        self.processes: CompletionProcesses | None = None  # of the first process of several
        self._is_first = shared is None or shared.number == 0
        self.on_ring_change: Callable[[], None] = lambda: None
        self.metrics = metrics
        self.upstream = Upstream(settings)
        self._observers = [*observers, *(() if metrics is None else (metrics,))]
        self.feed = EngineFeed(
            deliver=self._deliver_threadsafe,
            on_change=self._notify_threadsafe,
            observers=self._observers,
        )
        changes = BankChanges() if shared is None else SharedBankChanges(shared)
        self.engine_facts = EngineFacts(self.upstream, self.feed, changes)
        self.capture_watch = CaptureWatch(self.upstream, self.engine_facts.engine_key)
        self.health = HealthCheck(self.upstream, self.feed, self.engine_facts, self.capture_watch)
        self._engine_watch = EngineWatch(
            self.upstream, self.health, stall_s=settings.timeouts.stall
        )
        self._ring_finder = RingFinder(settings, self.upstream, self.feed)
        self.large_bodies = LargeBodies()
        self._make_budgets(settings, shared)
        self.connections: Connections | None = None  # of the server, which is created later
        self._scores: dict[int, RequestScores] = {}  # by stream
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completions = CompletionCounts()
        self._asked = dict.fromkeys(FEATURES, 0)
        self._answered: Counter[tuple[str, str]] = Counter()  # by route and class of status
        self._num_lost = self._num_mismatched = 0
        self._refused: Counter[int] = Counter()  # by status

    def _make_budgets(self, settings: ProxySettings, shared: SharedCounts | None) -> None:
        """What all requests may take and hold."""
        limits, number, held = settings.limits, None, settings
        self._places, self._budget = Places(), ScoreBudget(limits.scores_in_all)
        self.bodies, self.byte_rates = BodyBudget(limits), ByteRates(limits)
        if shared is not None:
            number, held = shared.number, settings.share_of_held(shared.num_processes)
            self._places = SharedPlaces(shared)
            self._budget = SharedScoreBudget(limits.scores_in_all, shared)
            self.bodies = SharedBodyBudget(limits, shared)
            self.byte_rates = SharedByteRates(limits, shared)
        self.runs = NamedRuns(held, number)
        self.kept_scores = KeptScores(held)

    async def open(self) -> None:
        """RingError if the runtime folder cannot be used."""
        self._loop = asyncio.get_running_loop()
        if self._is_first:  # others are told which ring to read
            self._ring_finder.find_folder()
        await self.upstream.open()
        if self._is_first:
            self._ring_finder.start()
        self._engine_watch.start()
        self.feed.start()

    async def close(self) -> None:
        await self.runs.close()
        self.kept_scores.close()
        await self._engine_watch.close()
        await self._ring_finder.close()
        await asyncio.to_thread(self.feed.stop)
        await self.upstream.close()

    def end_answers(self) -> None:
        """From any thread: end whatever waits for upstream, because it will not go on."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end_answers)

    def _end_answers(self) -> None:
        self.upstream.hang_up()
        if self.processes is not None:
            self.processes.end_answers()

    def set_engine_ending(self, *, is_ending: bool) -> None:
        """From any thread: whether the engine's ring goes as it should."""
        self.feed.is_engine_ending = is_ending
        self.health.on_change()

    @property
    def is_reading(self) -> bool:
        """True while every process that answers completions reads the engine's ring."""
        return self.feed.is_attached and (self.processes is None or self.processes.is_reading)

    # Completions

    async def find_obstacle(self) -> Obstacle | None:
        """None if a completion that is sent now is answered; asks upstream once a second."""
        if self._places.num_taken >= self.settings.limits.streams:
            return Obstacle("as many requests are being answered as may be at once", 1)
        if self.connections is not None and self.connections.is_full:
            return Obstacle("as many connections are open as may be at once", 1)
        health = await self.health.recent()
        if health.is_answering:
            return None
        reason = health.reason or f"the engine is {health.status}"
        return Obstacle(reason, 2 if health.status == "starting" else 5)

    @contextmanager
    def reserve_place(self) -> Iterator[None]:
        """Count one request that upstream works on; HttpRefusal if there are too many."""
        num_taken = self._places.num_taken
        if num_taken >= self.settings.limits.streams:
            raise HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{num_taken} requests are being answered, the most at once; try later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self._places.add(1)
        try:
            yield
        finally:
            self._places.add(-1)

    @contextmanager
    def observe_completion(
        self, route: str, *, key: str | None = None, request_id: str | None = None
    ) -> Iterator[Completion]:
        """A completion; the observers learn how it ends."""
        completion = Completion(route, key=key, request_id=request_id)
        self._completions.begin(completion)
        try:
            yield completion
        except HttpRefusal as refused:
            completion.set_failed(refused.status)
            raise
        except UpstreamGone:
            completion.set_failed(self.health.refusal().status)
            raise
        except Exception:
            completion.set_failed(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        finally:
            self._report_end(completion)

    @contextmanager
    def open_scores(self, request: ScoredRequest) -> Iterator[RequestScores]:
        """Collect the scores of a request, under a stream id that nobody else has or can guess."""
        stream, options = new_stream_id(), request.options.without_vectors()
        for feature in request.features:
            self._asked[feature] += 1
        scores = RequestScores(
            stream,
            options,
            max_scores=self.settings.limits.scores,
            budget=self._budget,
            is_attached=lambda: self.feed.is_attached,
            names=lambda: self.engine_facts.names,
            needs_echo=request.needs_echo,
            sums_up=options.is_named or any(map(reads_probes, self._observers)),
            hurry=self.feed.hurry,
        )
        self._scores[stream] = scores
        self.feed.watched[stream] = options.prompt_scores
        try:
            yield scores
        finally:
            del self.feed.watched[stream]
            del self._scores[stream]
            scores.close()
            self._num_lost += scores.num_lost
            self._num_mismatched += scores.num_mismatched
            if wrong := scores.num_mismatched:
                _log.error("%d rows carried another token than the request: please report", wrong)

    def _report_end(self, completion: Completion) -> None:
        self._completions.end(completion)  # and nothing is awaited until the observers know
        end = completion.end()
        for observer in list(self._observers):
            try:
                observer.on_completion_end(end)
            except Exception:
                _log.exception("%r failed and is removed", observer)
                self._observers.remove(observer)

    def count_refusal(self, status: int) -> None:
        self._refused[int(status)] += 1

    def count_answer(self, route: str, status: int) -> None:
        """`route` is one of the table: what clients write adds no series."""
        self._answered[route, status_class(status)] += 1

    # From the feed's thread

    def _deliver_threadsafe(self, batches: list[RowBatch]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, batches)

    def _notify_threadsafe(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._notify)

    def _deliver(self, batches: list[RowBatch]) -> None:
        for batch in batches:
            scores = self._scores.get(batch.stream)
            if scores is not None:  # else its client has left
                scores.add_rows(batch)

    def _notify(self) -> None:
        """The ring was attached or lost."""
        self._ring_finder.look()
        self.on_ring_change()
        for scores in self._scores.values():
            scores.changed.set()

    async def total_counts(self) -> TotalCounts:
        """The counts of all processes of this proxy."""
        if self.processes is None:
            return TotalCounts(self.counts())
        return await self.processes.total_counts()

    def running_since_s(self) -> list[float]:
        return self._completions.running_since_s()

    def counts(self) -> ProxyCounts:
        """Of one moment: nothing here waits."""
        running, completions = self._scores.values(), self._completions
        num_mismatched = self._num_mismatched + sum(one.num_mismatched for one in running)
        return ProxyCounts(
            ring=self.feed.counts(num_mismatched),
            streams=completions.num_running,
            runs=len(self.runs),
            completions=completions.num_begun,
            ended=dict(completions.ended),
            tokens=completions.num_tokens,
            errors=dict(completions.errors),
            asked=dict(self._asked),
            answered=dict(self._answered),
            upstream_errors=self.upstream.num_errors,
            rows_lost=self._num_lost + sum(one.num_lost for one in running),
            refused=tuple(sorted(self._refused.items())),
            kept_answers=len(self.kept_scores),
            kept_bytes=self.kept_scores.nbytes,
            kept_dropped=self.kept_scores.num_dropped,
            health=self.health.last_state,
            capture=self.capture_watch.report,
        )
