"""Caches what the engine core says of its vectors, probes and global steering.

Runs in: the API server. The core alone decides what a name means, and checks every request again.
The cache is there to refuse with a reason what the core would refuse, and to pin the content that
a name stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from clairai.errors import SteeringOffError
from clairai.fields.catalog import Catalog, KnownVector
from clairai.points import Point
from clairai.wire.control_messages import BankState, ListProbes
from clairai.wire.steering_messages import (
    GetSteering,
    ListedVector,
    ListVectors,
    SteeringState,
    VectorState,
)

TIERS: Final = ("base", "prefill", "decode")
AskCore = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class CoreView:
    """The engine core as last seen."""

    catalog: Catalog = field(default_factory=Catalog)
    width: int = 0
    tiers: tuple[dict[str, Any], ...] = ()  # entries as the core shows them, each with its `tier`
    off_reason: str | None = None  # why this engine cannot steer


@dataclass(frozen=True)
class _ProbeOutline:
    """A KnownProbe as the core lists it."""

    name: str
    point: Point
    threshold: float | None


class CoreCache:
    """`ask` reaches the core. `is_shared`: other API servers change the core too."""

    def __init__(self, ask: AskCore, *, is_shared: bool) -> None:
        self._ask = ask
        self._is_shared = is_shared
        self._refreshing = asyncio.Lock()
        self._vectors: VectorState | None = None
        self._tiers: tuple[dict[str, Any], ...] = ()
        self._bank: BankState | None = None
        self._off_reason: str | None = None
        self._view: CoreView | None = None
        self._is_complete = False

    def note(self, reply: msgspec.Struct) -> None:
        """Keep what the core has answered to anybody in this process."""
        match reply:
            case VectorState():
                self._vectors = reply
            case SteeringState():
                self._tiers = tuple(_entries(reply))
            case BankState():
                self._bank = reply
            case _:
                return
        self._view = None

    @property
    def has_global_steering(self) -> bool:
        """True if every request is steered, as far as is known without asking."""
        return bool(self._tiers)

    async def view(self) -> CoreView:
        """The cached view; asks only where it may be out of date."""
        if self._is_shared or not self._is_complete:
            return await self.refresh()
        if self._view is None:
            self._view = self._make_view()
        return self._view

    async def refresh(self) -> CoreView:
        """Ask the core now; concurrent callers take turns."""
        async with self._refreshing:
            await self._ask(ListProbes(), BankState)
            if self._off_reason is None:
                await self._refresh_steering()
            self._is_complete = True
            self._view = self._make_view()
            return self._view

    async def _refresh_steering(self) -> None:
        """An engine that cannot steer never will: it is asked once."""
        try:
            await self._ask(ListVectors(), VectorState)
            await self._ask(GetSteering(), SteeringState)
        except SteeringOffError as error:
            self._off_reason = error.reason

    def _make_view(self) -> CoreView:
        listed = () if self._bank is None else self._bank.probes
        probes = MappingProxyType(
            {
                one.name: _ProbeOutline(one.name, Point.parse(one.point), one.threshold)
                for one in listed
            }
        )
        state = self._vectors
        if state is None:
            return CoreView(Catalog(probes=probes), off_reason=self._off_reason)
        vectors = MappingProxyType({one.name: _outline_vector(one) for one in state.vectors})
        points = frozenset(map(Point.parse, state.points))
        return CoreView(Catalog(points, vectors, probes), state.width, self._tiers)


def _outline_vector(listed: ListedVector) -> KnownVector:
    points = map(Point.parse, listed.points)
    lengths = dict(zip(points, listed.norms, strict=True))
    return KnownVector(listed.digest, MappingProxyType(lengths))


def _entries(state: SteeringState) -> Iterator[dict[str, Any]]:
    for tier in TIERS:
        for entry in msgspec.json.decode(getattr(state, tier), type=list[dict[str, Any]]):
            yield {**entry, "tier": tier}
