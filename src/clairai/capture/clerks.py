"""Takes nothing of ours; gives what an engine asks of its clerk: who takes captured rows on.

There are two: `near.py` in the engine's own process, `far.py` in a process of its own. Nobody who
asks anything here waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from clairai.capture import tickets
from clairai.capture.arena import Arena
from clairai.capture.landed import Wait
from clairai.capture.order import Order
from clairai.capture.results import Results
from clairai.capture.taken import Seat


class Clerk(Protocol):
    """One for each engine that captures. What it is told happens in that order."""

    @property
    def arena(self) -> Arena:
        """Where rows come to."""

    @property
    def results(self) -> Results:
        """What has become of them, as far as is known here."""

    @property
    def pending_nbytes(self) -> int:
        """Of rows that wait for a rule."""

    @property
    def trouble(self) -> str:
        """Why no rows are taken; empty if they are."""

    @property
    def is_apart(self) -> bool:
        """Whether it is a process of its own, to which the device says what has come."""

    def may_block(self, names: Iterable[str]) -> bool:
        """Whether one of these consumers asks for tokens to wait."""

    def begin(self, seat: Seat, order: Order) -> None: ...

    def amend(self, seat: Seat, steering: str) -> None:
        """From now on the request is steered so."""

    def finish(self, seat: Seat) -> None: ...

    def relabel(self, weights: str) -> None:
        """What comes from now on is of these weights."""

    def commit(self) -> None:
        """Have all that was given so far made safe; nobody waits for it."""

    def plan(self, told: tickets.Plan) -> None:
        """How all tickets up to the next plan lie."""

    def put(self, told: tickets.Row, wait: Wait) -> None:
        """Rows, or scores; they are there when `wait` returns."""

    def post(self) -> None:
        """What was told so far goes now."""

    def close(self) -> None:
        """Give on what is there, then close the consumers; this waits."""
