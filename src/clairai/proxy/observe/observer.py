"""What the proxy tells whoever watches it: metrics, telemetry. Takes nothing; gives the protocols.

P = probes of the bank, R = rows of a record
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.wire import ring_messages

Outcome = Literal["done", "cancelled", "error"]


@dataclass(frozen=True)
class ProbeResult:
    """One probe over the scored tokens of one answer; None where no token has a score."""

    name: str
    mean: float | None
    max: float | None
    argmax: int | None  # the generated token with the highest score
    above: int | None  # tokens at or over the threshold; None if it has none
    threshold: float | None


@dataclass(frozen=True)
class ChoiceResult:
    """One answer of a request."""

    choice: int
    tokens: int  # generated
    count: int  # of them, with a score
    lost: int  # of them, without a score that there should have been
    finish_reason: str | None
    probes: tuple[ProbeResult, ...]
    stop_reason: str | int | None = None  # the engine's: a text, a token, or our rule
    stopped: str | None = None  # the probe whose rule ended it


@dataclass(frozen=True)
class CompletionEnd:
    """A completion has ended, however it did; one that asked for no scores has no `choices`."""

    response_id: str | None  # as the client knows it: chatcmpl-...
    model: str | None
    route: str  # /v1/chat/completions or /v1/completions
    outcome: Outcome
    seconds: float
    choices: tuple[ChoiceResult, ...]
    is_scored: bool = True
    run: str | None = None  # of a named run, as in X-Clairai-Run
    status: int = 200  # HTTP's
    first_token_seconds: float | None = None  # from the request on; None if none came in a stream


@dataclass(frozen=True)
class RingCounts:
    """The ring as this proxy has read it; counts go on across engines."""

    attached: bool = False
    epoch: int | None = None
    records_delivered: int = 0
    records_lost: int = 0
    lag: int = 0  # records published and not read yet
    rows: int = 0  # given to a request of this proxy
    orphaned: int = 0  # rows of streams that are not ours
    mismatched: int = 0  # rows whose token was not the request's: shown to nobody


@dataclass(frozen=True)
class ProxyCounts:
    """Everything countable, at one moment."""

    ring: RingCounts
    streams: int  # completions in the proxy now
    runs: int  # named runs held now
    completions: int  # begun since the start
    cancelled: int  # ended by their client
    upstream_errors: int
    rows_lost: int  # scores that a client was told are lost


class Observer(Protocol):
    """Must be quick, and must not raise: one that does is logged once and told no more."""

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        """Every record of the ring, whosever rows they are; called on the ring's own thread.

        Rows with phase CACHED and FINISHED have no scores (NaN). `stamp_ns` is when the engine
        published the record, on the clock of time.monotonic_ns().
        """

    def on_run_end(self, end: CompletionEnd) -> None:
        """Called on the event loop."""


class MetricsObserver(Observer, Protocol):
    """What GET /metrics answers."""

    content_type: str

    def text(self, numbers: ProxyCounts) -> bytes:
        """Called for each scrape, on a thread of its own."""
