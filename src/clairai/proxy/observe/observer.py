"""What the proxy reports to metrics, telemetry and logs, and the protocol they implement.

P = probes of the bank, R = rows of a record
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.proxy.capture_watch import CaptureReport
from clairai.wire import ring_messages

Outcome = Literal["done", "cancelled", "error"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("done", "cancelled", "error")
HealthState = Literal["starting", "ready", "degraded", "failed"]
# What a completion can ask of clairai.
FEATURES: Final = ("scores", "prompt_scores", "steering", "rules", "capture", "events")


@dataclass(frozen=True)
class ProbeResult:
    """One probe over the scored tokens of one answer; None where no token has a score."""

    name: str
    mean: float | None
    max: float | None
    argmax: int | None  # index of the generated token with the highest score
    above: int | None  # tokens at or above the threshold; None if it has none
    threshold: float | None


@dataclass(frozen=True)
class ChoiceResult:
    """One answer of a request."""

    choice: int
    tokens: int  # generated
    count: int  # of them, with a score
    lost: int  # of them, those whose score was lost
    finish_reason: str | None
    probes: tuple[ProbeResult, ...]  # empty if no observer reads them
    stop_reason: str | int | None = None  # vLLM's: a stop string, a stop token, or one of our rules
    stopped: str | None = None  # the probe whose rule ended it


@dataclass(frozen=True)
class CompletionEnd:
    """How a completion ended; one that asked for no scores has no `choices`."""

    response_id: str | None  # as the client sees it: chatcmpl-...
    model: str | None
    route: str  # /v1/chat/completions or /v1/completions
    outcome: Outcome
    seconds: float
    choices: tuple[ChoiceResult, ...]
    is_scored: bool = True
    run: str | None = None  # of a named run, as in X-Clairai-Run
    status: int = 200  # HTTP's
    first_token_seconds: float | None = None  # after the request; None if no token was streamed
    key: str | None = None  # name of the client's API key
    request_id: str | None = None  # as the client gave it in X-Request-Id


@dataclass(frozen=True)
class CoreRingCounts:
    """The ring of one of several engine cores."""

    attached: bool
    records_delivered: int
    records_lost: int
    lag: int
    rows: int


@dataclass(frozen=True)
class RingCounts:
    """The rings as this proxy has read them; counts continue over engines."""

    attached: bool = False  # to the rings of all engine cores
    restarts: int = 0  # engines attached after the first
    records_delivered: int = 0
    records_lost: int = 0
    lag: int = 0  # records published and not read yet
    rows: int = 0  # given to a request of this proxy
    orphaned: int = 0  # rows of streams that are not ours
    mismatched: int = 0  # rows that carried another token than the request: nobody sees them
    cores: tuple[CoreRingCounts, ...] = ()  # by number; only of an engine that has several


@dataclass(frozen=True)
class ProxyCounts:
    """All counts of the proxy at one moment: completions = streams + all that ended."""

    ring: RingCounts
    streams: int  # completions in the proxy now
    runs: int  # named runs held now
    completions: int  # begun since the start
    ended: Mapping[Outcome, int]
    upstream_errors: int
    rows_lost: int  # rows that a client was told are lost
    tokens: int = 0  # of scored completions, those that run now too
    errors: Mapping[str, int] = field(default_factory=dict)  # completions, by class of HTTP status
    asked: Mapping[str, int] = field(default_factory=dict)  # completions, by feature
    answered: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by route and class
    refused: tuple[tuple[int, int], ...] = ()  # requests that the proxy itself refused, by status
    kept_answers: int = 0  # whose scores can be fetched by their id
    kept_bytes: int = 0
    kept_dropped: int = 0  # for want of room, before their time
    processes: int = 1  # that answer completions now
    process_restarts: int = 0  # completion processes that were started after others had ended
    cut_off: int = 0  # completions that ended with their process; they count as errors too
    health: HealthState | None = None  # None: nobody has asked yet
    capture: CaptureReport | None = None  # None: the engine does not capture


def reads_probes(observer: Observer) -> bool:
    """False for one that says, by `reads_probes = False`, that it never reads ChoiceResult.probes.

    If that holds for all, nobody adds scores up.
    """
    return getattr(observer, "reads_probes", True)


class TimesReport(msgspec.Struct, frozen=True):
    """How long the completions of one process took, by bucket, and which rules ended them."""

    whole: tuple[list[int], float]  # counts, and the sum of seconds
    first_token: tuple[list[int], float]
    stopped: dict[str, int]  # by probe


class Observer(Protocol):
    """Must be quick and must not raise: one that raises is logged and removed."""

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        """Called for every record of the ring, whoever's rows it has; on the feed's thread.

        Rows with phase CACHED and FINISHED have no scores (NaN). `stamp_ns` is when the engine
        published the record, on the clock of time.monotonic_ns().
        """

    def on_completion_end(self, end: CompletionEnd) -> None:
        """Called on the event loop."""


class MetricsObserver(Observer, Protocol):
    """An observer that also answers GET /metrics."""

    content_type: str

    def snapshot(
        self, counts: ProxyCounts, others: Sequence[TimesReport] = ()
    ) -> Callable[[], bytes]:
        """Called on the event loop for each scrape, at the moment of `counts`.

        `others` are the completions of other processes, which are in `counts` already.

        The result formats the snapshot; it is called on a thread of its own.
        """
