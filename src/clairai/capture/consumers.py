"""Capture consumers: where captured rows go. They are found as entry points, by kind.

A kind of consumer is an entry point of the group `clairai.capture_consumers`: a callable that gets
the options (a mapping) and an `EngineInfo`, and returns a Consumer. It raises ConfigError for
options it does not accept; then the engine does not start.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, Protocol, runtime_checkable

from clairai.capture.capture_settings import ConsumerSpec
from clairai.errors import ClairaiError, ConfigError, StoreStoppedError, quote
from clairai.store.row_block import RowBlock, count_rows
from clairai.wire.capture_messages import ConsumerStatus

GROUP: Final = "clairai.capture_consumers"
MAX_NAMED: Final = 65_536  # requests whose losses are counted one by one
LOSS_MEMORY_S: Final = 60.0  # how long a consumer that lost rows is said to be dropping
FREE_STEP_NBYTES: Final = 16 << 20
DROPPING: Final = (
    "rows come faster than it takes them, and were dropped in the last minute; capture less, give "
    "it a faster disk or a larger queue"
)
Policy = Literal["block", "drop", "spill"]


@dataclass(frozen=True)
class EngineInfo:
    """The engine whose rows a consumer gets."""

    model: str
    weights: str  # version
    dtype: str
    width: int
    points: tuple[str, ...]  # the tapped ones


class ConsumerHealth(Protocol):
    """The state of a consumer."""

    @property
    def name(self) -> str:
        """`writing`, `stopped` (continues by itself) or `failed`."""

    @property
    def reason(self) -> str: ...


class Consumer(Protocol):
    """Where rows go. One thread calls it, never the engine's; only `flush`, `losses`, `state` and
    `where` are called from other threads. `clairai.store.write.Writer` is a model of one.
    """

    @property
    def policy(self) -> Policy:
        """`block`: `offer` may wait, and generation with it; otherwise it never waits for room."""

    @property
    def where(self) -> str:
        """Where the rows can be found: a folder, an address."""

    @property
    def state(self) -> ConsumerHealth: ...

    def begin(
        self, stream: int, *, tags: Mapping[str, Any] | None, steering: Mapping[str, Any] | None
    ) -> None:
        """Before a request's first rows, and again when its steering changes.

        A consumer whose `begin` also takes `owner` gets the name of the API key that made it.
        """

    def offer(self, block: RowBlock) -> bool:
        """Rows of any requests at one point; False if they are refused, and counted in `losses`.

        A row can come again after a preemption: the newest one counts.
        """

    def finish(self, stream: int) -> None:
        """No more rows of this request, unless it begins again for another answer."""

    def losses(self, stream: int) -> int:
        """Rows of this request that were refused or lost since the last call."""

    def flush(self, timeout_s: float) -> None:
        """Return when everything accepted so far is safe; StoreStoppedError if it is not."""

    def close(self) -> None:
        """The end; StoreStoppedError if accepted rows are lost."""


@runtime_checkable
class SupportsStatus(Protocol):
    """A consumer as this package wraps it."""

    def status(self, name: str) -> ConsumerStatus: ...


def status_of(name: str, consumer: Consumer) -> ConsumerStatus:
    """Of a consumer that is guarded or remote; another says no more than its state."""
    if isinstance(consumer, SupportsStatus):
        return consumer.status(name)
    state = consumer.state
    return ConsumerStatus(name, consumer.where, state.name, state.reason)


Factory = Callable[[Mapping[str, Any], EngineInfo], Consumer]


def find_in_engine_kind(
    specs: Iterable[ConsumerSpec], found: Iterable[EntryPoint] | None = None
) -> str:
    """The first kind that must be in the engine's own process; empty if there is none.

    Such a factory says so by an attribute: `in_engine = True`.
    """
    known = {entry.name: entry for entry in found or entry_points(group=GROUP)}
    kinds = (spec.kind for spec in specs if getattr(_factory(spec, known), "in_engine", False))
    return next(kinds, "")


def open_consumers(
    specs: Iterable[ConsumerSpec], about: EngineInfo, found: Iterable[EntryPoint] | None = None
) -> dict[str, Consumer]:
    """All of them by name, or ConfigError and none is left open."""
    known = {entry.name: entry for entry in found or entry_points(group=GROUP)}
    opened: dict[str, Consumer] = {}
    try:
        for spec in specs:
            opened[spec.name] = _factory(spec, known)(spec.options, about)
    except BaseException:
        for consumer in opened.values():
            consumer.close()
        raise
    return opened


def _factory(spec: ConsumerSpec, known: Mapping[str, EntryPoint]) -> Factory:
    if spec.kind not in known:
        raise ConfigError(
            f"no capture consumer is named {quote(spec.kind)}; there are "
            f"{', '.join(sorted(known)) or 'none'}; a package that brings it has an entry point of "
            f"the group {GROUP}"
        )
    factory: Factory = known[spec.kind].load()
    return factory


def begin_request(
    consumer: Consumer,
    stream: int,
    *,
    tags: Mapping[str, Any] | None,
    steering: Mapping[str, Any] | None,
    owner: str | None,
) -> None:
    """Call a consumer's `begin`; one that takes no `owner` is not told it."""
    begin: Callable[..., None] = consumer.begin
    takes_owner = owner is not None and "owner" in inspect.signature(begin).parameters
    begin(stream, tags=tags, steering=steering, **({"owner": owner} if takes_owner else {}))


@dataclass(frozen=True)
class ConsumerFailure:
    reason: str
    name: str = "failed"
    since: float = field(default_factory=time.time)


class GuardedConsumer:
    """Wraps a consumer that anybody may have written: it never raises.

    A consumer that raises has failed, with the reason; rows that it then does not take are counted.
    """

    def __init__(self, inner: Consumer) -> None:
        self._inner = inner
        self._failed: ConsumerFailure | None = None
        self._losses: Counter[int] = Counter()
        self._num_refused = 0
        self._lock = threading.Lock()
        self._loss_episode = LossEpisode()
        self._own_since = OwnSince()

    @property
    def policy(self) -> Policy:
        return self._inner.policy

    @property
    def where(self) -> str:
        return self._inner.where

    @property
    def state(self) -> ConsumerHealth:
        if self._failed is None:
            try:
                return self._inner.state
            except Exception as error:
                self._fail(error)
        assert self._failed is not None
        return self._failed

    def status(self, name: str) -> ConsumerStatus:
        """How this consumer does; `name` is its name in the engine's settings."""
        state = self.state
        refused, lost = self._num_refused, self._count_lost()
        losing_since = self._loss_episode.since(refused + lost)
        if state.name == "writing" and losing_since is not None:
            state = _DroppingState(losing_since)
        return ConsumerStatus(
            consumer=name,
            where=self.where,
            state=state.name,
            reason=state.reason,
            since=getattr(state, "since", None) or self._own_since.of(state.name),
            refused=refused,
            lost=lost,
            free_nbytes=self._free_nbytes(),
        )

    def _count_lost(self) -> int:
        return int(getattr(getattr(self._inner, "counts", None), "lost", 0))

    def _free_nbytes(self) -> int | None:
        """Rounded down: not every file that somebody writes is worth a report."""
        try:
            found: int | None = getattr(self._inner, "free_nbytes", None)
        except OSError:
            return None
        return None if found is None else found // FREE_STEP_NBYTES * FREE_STEP_NBYTES

    def begin(
        self,
        stream: int,
        *,
        tags: Mapping[str, Any] | None,
        steering: Mapping[str, Any] | None,
        owner: str | None = None,
    ) -> None:
        if self._failed is not None:
            return
        try:
            begin_request(self._inner, stream, tags=tags, steering=steering, owner=owner)
        except Exception as error:
            self._fail(error)

    def offer(self, block: RowBlock) -> bool:
        if self._failed is None:
            try:
                is_accepted = bool(self._inner.offer(block))
            except Exception as error:
                self._fail(error)
            else:
                self._num_refused += 0 if is_accepted else block.num_rows
                return is_accepted
        self._num_refused += block.num_rows
        with self._lock:
            for stream, count in count_rows(block).items():
                if stream in self._losses or len(self._losses) < MAX_NAMED:
                    self._losses[stream] += count
        return False

    def finish(self, stream: int) -> None:
        if self._failed is not None:
            return
        try:
            self._inner.finish(stream)
        except Exception as error:
            self._fail(error)

    def losses(self, stream: int) -> int:
        with self._lock:
            own = self._losses.pop(stream, 0)
        try:
            return own + self._inner.losses(stream)
        except Exception as error:
            self._fail(error)
            return own

    def flush(self, timeout_s: float) -> None:
        if self._failed is not None:
            raise StoreStoppedError(self._failed.reason)
        self._inner.flush(timeout_s)

    def close(self) -> None:
        self._inner.close()

    def _fail(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, ClairaiError) else f"{error}"
        self._failed = ConsumerFailure(f"the consumer failed, {type(error).__name__}: {reason}")


@dataclass(frozen=True)
class _DroppingState:
    since: float
    name: str = "dropping"
    reason: str = DROPPING


class LossEpisode:
    """Since when rows are being lost; over when none was for LOSS_MEMORY_S."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._num_seen = 0
        self._began: float | None = None
        self._last = 0.0

    def since(self, num_lost: int) -> float | None:
        """When the present episode began; None: there is none. `num_lost` is of all time."""
        now = self._clock()
        if self._began is not None and now - self._last > LOSS_MEMORY_S:
            self._began = None
        if num_lost > self._num_seen:
            self._num_seen, self._last = num_lost, now
            self._began = now if self._began is None else self._began
        return self._began


class OwnSince:
    """When the state of a consumer that does not say it was first seen."""

    def __init__(self) -> None:
        self._name, self._since = "", 0.0

    def of(self, name: str) -> float:
        if name != self._name:
            self._name, self._since = name, time.time()
        return self._since
