"""What the proxy knows about the engine behind it: its probes, tokens, routes and health.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from clairai.errors import quote
from clairai.proxy.capture_watch import CaptureWatch, HealthProblem
from clairai.proxy.completions.token_text import TokenBytes, TokenTexts
from clairai.proxy.observe.observer import HealthState
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.ring_feed import EngineFeed
from clairai.proxy.upstream import OutOfDescriptors, Upstream, UpstreamGone, decode_answer
from clairai.wire import ring_messages

HEALTH_TIMEOUT_S: Final = 2.0
RECENT_S: Final = 1.0  # how old a status may be that probes and scrapes get
LOSS_MEMORY_S: Final = 60.0  # how long a lost record counts as degraded

_NO_ROUTES: Final = (
    "the engine has no clairai routes, which prompt_scores and named events need; start it with "
    "`clairai serve`, or with VLLM_PLUGINS naming clairai"
)

_NO_PROGRESS: Final = (
    "the engine core does not answer: it computes a long step, or it hangs; nobody supervises it"
)

_TORN: Final = (
    "loading new weights stopped half-way, so requests wait; send a whole set of weights, or "
    "restart the engine"
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
    version: int


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class BankChanges:
    """How many changes of the bank were passed on; what was known before the last is out of date.

    Counted when the engine has answered a change and before its client is: whoever that client
    tells of it finds it counted.
    """

    def __init__(self) -> None:
        self._num = 0

    @property
    def num(self) -> int:
        return self._num

    def add(self) -> None:
        self._num += 1


class _KnownBank(NamedTuple):
    """The engine's answer about its bank; `num_changes` and `engine` are of when it was asked."""

    num_changes: int
    engine: Any
    version: int
    names: tuple[str, ...] | None  # None: it has no route that says it


class EngineFacts:
    """Facts about the engine; each is asked once and kept until it may have changed."""

    def __init__(self, upstream: Upstream, feed: EngineFeed, changes: BankChanges) -> None:
        self._upstream = upstream
        self._feed = feed
        self._changes = changes
        self._texts: TokenTexts | None = None
        self._bank: _KnownBank | None = None
        self._texts_key: Any = None
        self._routes: dict[str, Any] = {}  # routes that the engine has, with the key of that engine
        self._asking = asyncio.Lock()

    @property
    def names(self) -> tuple[str, ...] | None:
        """The probes of the bank as last seen or heard; None if nobody knows them."""
        seen, heard = self._feed.bank, self._bank
        if heard is None or heard.names is None or heard.engine != self.engine_key():
            return None if seen is None else _names_of(seen)
        # A row may be of a bank from before the engine was asked.
        is_newer = seen is not None and seen.version >= heard.version
        return _names_of(seen) if seen is not None and is_newer else heard.names

    async def check_probes(self, names: tuple[str, ...] | None) -> None:
        """HttpRefusal if the engine's bank lacks one of these probes; None are all of them."""
        wanted = set(names or ())
        if self._is_bank_known() and wanted <= set(self.names or ()):
            return
        self._bank = await self._ask_bank()
        if self._bank.names is None:
            return  # it has no such route: probes it does not have get no scores
        unknown = [name for name in names or () if name not in self._bank.names]
        if unknown:
            raise HttpRefusal(
                HTTPStatus.BAD_REQUEST,
                f"no probe is named {quote(unknown[0])}; GET /v1/probes lists them",
                code="probe",
                param="clairai.probes",
            )

    def _is_bank_known(self) -> bool:
        """False if a row, or an answer, that named the probes may be of a bank from before."""
        if not self._changes.num:
            return True
        heard = self._bank
        return heard is not None and heard[:2] == (self._changes.num, self.engine_key())

    async def _ask_bank(self) -> _KnownBank:
        num_changes, engine = self._changes.num, self.engine_key()  # it may change meanwhile
        found = await self._ask("/v1/probes")
        if found is None:
            return _KnownBank(num_changes, engine, 0, None)
        bank = decode_answer(found, _ProbeList, what="/v1/probes")
        return _KnownBank(num_changes, engine, bank.version, _names_of(bank))

    def note_change(self) -> None:
        """The bank has changed, or may have: the next request of any process asks again."""
        self._changes.add()

    async def check_steering(self, *, is_steered: bool) -> None:
        """HttpRefusal if the engine would ignore steering, or rules, which only need taps."""
        route = "/v1/steering/vectors" if is_steered else "/v1/probes"
        if not await self._has_route(route):
            raise HttpRefusal(
                HTTPStatus.CONFLICT, _NO_STEERING, code="steering-off", param="clairai"
            )

    async def check_capture(self) -> None:
        """HttpRefusal if the engine would answer and store nothing."""
        if not await self._has_route("/v1/captures"):
            code = "capture-off"
            raise HttpRefusal(HTTPStatus.CONFLICT, _NO_CAPTURE, code=code, param="clairai.capture")

    async def _has_route(self, route: str) -> bool:
        """True if this engine has the route; asked once."""
        key = self.engine_key()
        if self._routes.get(route) != key and await self._ask(route) is not None:
            self._routes[route] = key
        return bool(self._routes.get(route) == key)

    async def model(self) -> str | None:
        """The model's name in requests."""
        found = await self._ask("/v1/models")
        models = [] if found is None else decode_answer(found, _ModelList, what="/v1/models").data
        return models[0].id if models else None

    async def check_alive(self) -> None:
        """UpstreamGone if the engine core does not answer; one without the route is believed."""
        await self._ask("/v1/clairai/alive")

    async def token_texts(self) -> TokenTexts:
        """The texts of the engine's tokens; HttpRefusal if it has no route for them."""
        async with self._asking:
            key = self.engine_key()  # another engine may have another model
            if self._texts is None or key != self._texts_key:
                found = await self._ask("/v1/clairai/tokens")
                if found is None:
                    raise HttpRefusal(HTTPStatus.BAD_REQUEST, _NO_ROUTES, code="unsupported")
                answer = decode_answer(found, TokenBytes, what="/v1/clairai/tokens")
                self._texts = TokenTexts(answer.tokens)
                self._texts_key = key
            return self._texts

    def engine_key(self) -> Any:
        """Changes whenever the engine may be another one."""
        return self._feed.epochs, self._upstream.num_outages

    async def _ask(self, path: str) -> bytes | None:
        """None if upstream has no such route, or says that it was not started for that.

        UpstreamGone if it fails: then nobody knows what it can do.
        """
        async with self._upstream.ask("GET", path) as response:
            body = await self._upstream.read_body(response)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UpstreamGone(f"{path} was answered with {response.status}")
        return body if response.status == HTTPStatus.OK else None


def _names_of(bank: ring_messages.Bank | _ProbeList) -> tuple[str, ...]:
    probes = bank.data if isinstance(bank, _ProbeList) else bank.probes
    return tuple(probe.name for probe in probes)


@dataclass(frozen=True)
class HealthStatus:
    """The state that GET /health answers, and why."""

    status: HealthState
    reason: str | None = None
    since: float | None = None  # in seconds since 1970; None: since it was first asked for
    is_stalled: bool = False  # the engine makes no progress: requests wait

    @property
    def is_answering(self) -> bool:
        """True if a request that is sent now is answered."""
        return self.status in ("ready", "degraded") and not self.is_stalled


@dataclass(frozen=True)
class KnownHealth:
    """What a HealthCheck knows without asking; other processes of the proxy are told."""

    status: HealthStatus | None  # as the launcher has set it
    is_supervised: bool
    was_ready: bool


class HealthCheck:
    """The health of engine and ring; asks upstream unless the launcher has set the status."""

    def __init__(
        self,
        upstream: Upstream,
        feed: EngineFeed,
        engine_facts: EngineFacts,
        capture_watch: CaptureWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._feed = feed
        self._engine_facts = engine_facts
        self._capture_watch = capture_watch
        self._set: HealthStatus | None = None
        self._last: HealthStatus | None = None
        self._clock = clock
        self._asking = asyncio.Lock()
        self._recent: tuple[HealthStatus, float, int] | None = None  # when asked, and of which
        self._silent_since_s: float | None = None
        self._was_ready = False
        self._model: str | None = None
        self.is_supervised = False  # a launcher watches the engine's processes
        # Of the engine that has half of its new weights.
        self._torn_epochs: tuple[int | None, ...] | None = None
        self.on_change: Callable[[], None] = lambda: None  # what is known; from any thread
        self.find_own_problems: Callable[[], list[HealthProblem]] = list  # of the proxy itself

    @property
    def model(self) -> str | None:
        """The model's name in requests, as last heard."""
        return self._model

    def set_status(self, status: HealthStatus | None) -> None:
        """Set the status that `clairai serve` knows, from any thread; None: ask upstream."""
        self.is_supervised = True
        self._set = status
        self._recent = None  # of before
        self.on_change()

    @property
    def known(self) -> KnownHealth:
        return KnownHealth(self._set, self.is_supervised, self._was_ready)

    def adopt(self, known: KnownHealth) -> None:
        """Know what the first process of the proxy knows."""
        self._set, self.is_supervised = known.status, known.is_supervised
        self._was_ready = known.was_ready
        self._recent = None

    def note_commit(self, *, is_torn: bool) -> None:
        """New weights were committed, or stopped half-way: that engine then answers nobody."""
        self._torn_epochs = self._feed.epochs if is_torn else None
        self._recent = None

    @property
    def last_state(self) -> HealthState | None:
        return None if self._last is None else self._last.status

    async def recent(self) -> HealthStatus:
        """As `status`, and up to a second old: all who watch ask the engine one question.

        It is asked at once when it has failed to answer anybody.
        """
        if self._set is not None:
            return await self.status()
        async with self._asking:
            found, num_outages = self._recent, self._upstream.num_outages
            if found is not None and found[2] == num_outages and self._clock() < found[1]:
                return found[0]
            status = await self.status()
            self._recent = (status, self._clock() + RECENT_S, self._upstream.num_outages)
            return status

    async def status(self) -> HealthStatus:
        """What is known now, and since when it has been so."""
        found = self._set or await self._ask_upstream()
        if found.since is None:
            last = self._last
            is_same = last is not None and last.status == found.status and last.since is not None
            found = replace(found, since=last.since if is_same and last else time.time())
        self._last = found
        return found

    async def _ask_upstream(self) -> HealthStatus:
        reason = await self._find_upstream_problem()
        if reason is not None:
            return HealthStatus("failed" if self._was_ready else "starting", reason)
        if not self._was_ready:
            self._was_ready = True
            self.on_change()
        if self._torn_epochs == self._feed.epochs:
            return HealthStatus("failed", _TORN)
        if not self.is_supervised and (silent_s := await self.silent_s()):
            began = time.time() - silent_s
            return HealthStatus("degraded", _NO_PROGRESS, began, is_stalled=True)
        ring = self._ring_status()
        problems = [*await self._capture_watch.problems(), *self.find_own_problems()]
        if not problems:
            return ring
        reasons = [*filter(None, [ring.reason]), *(one.reason for one in problems)]
        since = min(filter(None, [ring.since, *(one.since for one in problems)]), default=None)
        return HealthStatus("degraded", "; ".join(reasons), since)

    async def silent_s(self) -> float:
        """Ask the engine core for a sign of life; how long it has given none.

        Without a launcher nobody sees whether it hangs or computes a long step.
        """
        asked_s = time.monotonic()
        if await self._has_sign_of_life():
            self._silent_since_s = None
            return 0.0
        self._silent_since_s = self._silent_since_s or asked_s
        return time.monotonic() - self._silent_since_s

    async def _has_sign_of_life(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._engine_facts.check_alive()
        except (UpstreamGone, TimeoutError, HttpRefusal):
            return False
        return True

    def refusal(self) -> HttpRefusal:
        """The answer to a client whose request did not reach upstream."""
        status = self._set or HealthStatus("failed" if self._was_ready else "starting")
        if status.status == "starting":
            return HttpRefusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{status.reason or 'the engine is starting'}; "
                f"try again when GET /health says it is ready",
                code="engine-starting",
                headers={"Retry-After": "2"},
            )
        if status.reason is not None:  # the launcher does not start it again
            return HttpRefusal(HTTPStatus.SERVICE_UNAVAILABLE, status.reason, code="engine-gone")
        return HttpRefusal(
            HTTPStatus.BAD_GATEWAY, "the engine does not answer; see its log", code="engine-gone"
        )

    async def _find_upstream_problem(self) -> str | None:
        try:
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                self._upstream.ask("GET", "/health") as got,
            ):
                status = got.status
            if status == HTTPStatus.OK and self._model is None:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    self._model = await self._engine_facts.model()
        except (UpstreamGone, TimeoutError):
            self._model = None
            return "the engine does not answer"
        except OutOfDescriptors:
            return "the proxy has no file descriptors left"
        except HttpRefusal:
            return "the engine refuses the proxy"
        return None if status == HTTPStatus.OK else "the engine says that it has failed"

    def _ring_status(self) -> HealthStatus:
        if not self._feed.is_attached:
            owner = self._feed.name_cores(lambda ring: not ring.is_attached)
            return HealthStatus("degraded", f"{owner}'s ring is not attached: scores are lost")
        if self._feed.is_stalled:
            return HealthStatus("degraded", "the thread that reads the ring hangs: scores are lost")
        lost_at_s = self._feed.lost_at_s
        if lost_at_s is not None and time.monotonic() - lost_at_s < LOSS_MEMORY_S:
            return HealthStatus("degraded", "records of the ring were lost in the last minute")
        return HealthStatus("ready")
