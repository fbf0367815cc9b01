"""Takes what the engine core says of its vectors, probes and tiers; gives it again without asking.

The core alone knows what a name means, and judges every request once more. What is held here is
for refusing in words what it would refuse, and for naming the content that a name stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
import numpy as np

from clairai.engine.steer.snapshot import (
    PreparedRow,
    PreparedVector,
    SteerableModel,
    SteeringSnapshot,
)
from clairai.engine.steer.steering_plan import PlanRow
from clairai.errors import SteeringOffError
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector.model import Vector
from clairai.wire import ring_messages, steering_messages

TIERS: Final = ("base", "prefill", "decode")
AskCore = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class CoreView:
    """The engine as it was last seen."""

    known: SteeringSnapshot  # of vectors and probes all but the numbers
    tiers: tuple[dict[str, Any], ...] = ()  # entries as the core shows them, each with its `tier`
    off: str | None = None  # why nothing is steered


class CoreCache:
    """`ask` reaches the core; `is_shared`: others change it too, through servers of their own."""

    def __init__(self, ask: AskCore, *, is_shared: bool) -> None:
        self._ask = ask
        self._is_shared = is_shared
        self._asking = asyncio.Lock()
        self._vectors: steering_messages.VectorState | None = None
        self._tiers: tuple[dict[str, Any], ...] = ()
        self._bank: ring_messages.BankState | None = None
        self._off: str | None = None
        self._view: CoreView | None = None
        self._has_looked = False

    def note(self, reply: msgspec.Struct) -> None:
        """What the core has said to anybody here."""
        match reply:
            case steering_messages.VectorState():
                self._vectors = reply
            case steering_messages.SteeringState():
                self._tiers = tuple(_entries(reply))
            case ring_messages.BankState():
                self._bank = reply
            case _:
                return
        self._view = None

    @property
    def has_global_steering(self) -> bool:
        """Whether every request is steered, as far as is known without asking."""
        return bool(self._tiers)

    async def view(self) -> CoreView:
        if self._is_shared or not self._has_looked:
            return await self.look()
        if self._view is None:
            self._view = self._made()
        return self._view

    async def look(self) -> CoreView:
        """As it is now; who asks at the same time waits for the same answer."""
        async with self._asking:
            await self._ask(ring_messages.ListProbes(), ring_messages.BankState)
            if self._off is None:
                await self._look_at_steering()
            self._has_looked = True
            self._view = self._made()
            return self._view

    async def _look_at_steering(self) -> None:
        """An engine that does not steer never will: it is asked once."""
        try:
            await self._ask(steering_messages.ListVectors(), steering_messages.VectorState)
            await self._ask(steering_messages.GetSteering(), steering_messages.SteeringState)
        except SteeringOffError as error:
            self._off = error.reason

    def _made(self) -> CoreView:
        probes = () if self._bank is None else self._bank.probes
        by_name = MappingProxyType({probe.name: _outline_probe(probe) for probe in probes})
        if self._vectors is None:
            return CoreView(
                SteeringSnapshot(SteerableModel(frozenset(), 0), probes=by_name), off=self._off
            )
        engine = SteerableModel(
            frozenset(map(Point.parse, self._vectors.points)), self._vectors.width
        )
        held = MappingProxyType({one.name: _outline_listed(one) for one in self._vectors.vectors})
        known = SteeringSnapshot(engine, held, by_name, version=self._vectors.version)
        return CoreView(known, self._tiers)


def _outline_probe(listed: ring_messages.ListedProbe) -> Probe:
    """Without its direction, which only the core knows."""
    point = Point.parse(listed.point)
    return Probe(listed.name, point, np.ones(1, np.float32), threshold=listed.threshold)


def _outline_listed(listed: steering_messages.ListedVector) -> PreparedVector:
    points = map(Point.parse, listed.points)
    return outline_vector(listed.digest, dict(zip(points, listed.norms, strict=True)))


@dataclass(frozen=True)
class _Outline:
    digest: str


def outline_vector(digest: str, lengths: Mapping[Point, float]) -> PreparedVector:
    """A vector without its numbers: what is judged by those the core judges."""
    rows = {
        point: PreparedRow(PlanRow(str(point), "", b""), length, peak=0.0)
        for point, length in lengths.items()
    }
    return PreparedVector(cast(Vector, _Outline(digest)), MappingProxyType(rows))


def _entries(state: steering_messages.SteeringState) -> Iterator[dict[str, Any]]:
    for tier in TIERS:
        for entry in msgspec.json.decode(getattr(state, tier), type=list[dict[str, Any]]):
            yield {**entry, "tier": tier}
