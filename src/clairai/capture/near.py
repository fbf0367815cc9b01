"""Takes captured rows; has them taken to their consumers by a thread of the engine's own process.

For consumers that must be here, such as a function of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from clairai.capture import tickets
from clairai.capture.arena import Arena
from clairai.capture.collector import Collector, OriginOf
from clairai.capture.consumers import About, Consumer
from clairai.capture.landed import Reader, Wait
from clairai.capture.order import Order
from clairai.capture.results import Results
from clairai.capture.taken import Seat
from clairai.store.codecs.base import Encoder
from clairai.store.rows import Origin


class NearClerk:
    """A collector, and how tickets are read for it."""

    is_apart = False
    trouble = ""

    def __init__(
        self, consumers: Mapping[str, Consumer], collector: Collector, about: About, arena: Arena
    ) -> None:
        self._consumers, self.collector = consumers, collector
        self._about, self.arena = about, arena
        self._reader = Reader(arena)

    @property
    def results(self) -> Results:
        return self.collector.results

    @property
    def pending_nbytes(self) -> int:
        return self.collector.pending_nbytes

    def may_block(self, names: Iterable[str]) -> bool:
        return any(self._consumers[name].policy == "block" for name in names)

    def begin(self, seat: Seat, order: Order) -> None:
        self.collector.begin(seat, order)

    def amend(self, seat: Seat, steering: str) -> None:
        self.collector.amend(seat, steering)

    def finish(self, seat: Seat) -> None:
        self.collector.finish(seat)

    def relabel(self, weights: str) -> None:
        self.collector.relabel(origins(replace(self._about, weights=weights)))

    def commit(self) -> None:
        self.collector.commit()

    def plan(self, told: tickets.Plan) -> None:
        self._reader.plan(told)

    def put(self, told: tickets.Row, wait: Wait) -> None:
        self.collector.put(self._reader.taken(told, wait))

    def post(self) -> None:
        pass

    def close(self) -> None:
        self.collector.close()
        self.arena.close()


def origins(about: About) -> OriginOf:
    """What all rows of an encoder have in common."""
    return partial(_origin, about)


def _origin(about: About, encoder: Encoder) -> Origin:
    return Origin.of(
        model=about.model,
        weights=about.weights,
        dtype=about.dtype,
        width=about.width,
        encoder=encoder.name,
        parameters=encoder.parameters,
    )
