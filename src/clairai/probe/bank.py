"""The probes an engine holds: which site and slot each has, and every change of them.

A site is one tensor in the forward pass. Two points may be the same tensor (post_block.4 is
pre_attn.5); then they share its slots. A bank never changes: every change is checked completely,
then gives a new bank with the next version. There are no device tensors here; `engine.score` has
them.

P = probes, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clairai.errors import CapacityError, ConfigError, PointError, ProbeError, quote
from clairai.points import Point
from clairai.probe.model import (
    Probe,
    check_direction_rows,
    replace_checked_directions,
    replace_directions,
)
from clairai.wire import ring_messages

# A bank must fit one message of MAX_MESSAGE_BYTES, and a probe takes at most 450 of them.
MAX_PROBES: Final = 2048
_MAX_LISTED: Final = 8

SiteSlot: TypeAlias = tuple[int, int]


class ProbeColumn(NamedTuple):
    """A probe, and where its scores are computed."""

    site_index: int
    slot_index: int
    probe: Probe


@dataclass(frozen=True, eq=False)
class EngineBank:
    """The probes of an engine, in column order: by site, then by slot."""

    sites: tuple[str, ...]
    site_index_of: Mapping[Point, int]
    capacity: int  # slots of each site
    width: int
    model: str
    version: int = 0
    placed: tuple[ProbeColumn, ...] = ()  # the columns when a probe was last added or moved
    names: tuple[str, ...] = ()  # of the probes in `placed`
    slots: tuple[SiteSlot, ...] = ()  # of the columns in `placed`
    # Directions that all probes were given since then, in column order. A trainer redirects
    # hundreds of probes again and again, and hardly anybody looks at each: `columns` applies them
    # when it is read.
    directions_PD: NDArray[np.float32] | None = None

    @classmethod
    def empty(
        cls,
        points: Sequence[Point],
        capacity: int,
        width: int,
        model: str,
        aliases: Mapping[Point, str] | None = None,
    ) -> EngineBank:
        """Return a bank without probes. Sites are numbered in the order in which points name them.

        `aliases` maps a point to its site where that is not the point's own name.
        """
        if not points:
            raise PointError("no tap points were given; list at least one, such as post_block.15")
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; give at least 1 probe for each point")
        names = {point: str(point) for point in points} | dict(aliases or {})
        sites = tuple(dict.fromkeys(names[point] for point in points))
        index_of = {site: index for index, site in enumerate(sites)}
        # A point that was not listed is served too if it is the same tensor as a listed one.
        tapped = {point: index_of[site] for point, site in names.items() if site in index_of}
        return cls(sites, MappingProxyType(tapped), capacity, width, model)

    @cached_property
    def columns(self) -> tuple[ProbeColumn, ...]:
        if self.directions_PD is None:
            return self.placed
        old = [column.probe for column in self.placed]
        probes = replace_checked_directions(old, self.directions_PD)
        return tuple(
            ProbeColumn(*slot, probe) for slot, probe in zip(self.slots, probes, strict=True)
        )

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(column.probe for column in self.columns)

    @property
    def by_name(self) -> Mapping[str, Probe]:
        return _ProbesByName(self)

    def to_message(self, weights: int | None = None) -> ring_messages.Bank:
        """What readers are told: the columns of records that carry this version."""
        probes = tuple(probe.info() for probe in self.probes)
        return ring_messages.Bank(self.version, probes, weights)

    def add(self, probes: Iterable[Probe]) -> EngineBank:
        """Add these probes."""
        added = tuple(probes)
        held = _by_name(self.columns)
        for probe in added:
            if probe.name in held:
                raise ProbeError(f"the bank has a probe named {probe.name}; use replace, or rename")
        self._check(added)
        return self._place(self.columns, added)

    def replace(self, *probes: Probe) -> EngineBank:
        """Replace the probes of the same names; one that keeps its site keeps its slot."""
        held = _by_name(self.columns)
        _check_held(held, (probe.name for probe in probes))
        self._check(probes)
        names = {probe.name for probe in probes}
        staying = [column for column in self.columns if column.probe.name not in names]
        moving = []
        for probe in probes:
            old = held[probe.name]
            if self.site_index_of[probe.point] == old.site_index:
                staying.append(old._replace(probe=probe))
            else:
                moving.append(probe)
        return self._place(staying, moving)

    def redirect(self, names: Sequence[str], rows_PD: NDArray[np.float32]) -> EngineBank:
        """Give the probes of these names other directions, one row each; all else stays."""
        if tuple(names) == self.names:
            self._check_width(rows_PD)
            checked_PD = check_direction_rows(names, rows_PD)
            return replace(self, version=self.version + 1, directions_PD=checked_PD)
        held = _by_name(self.columns)
        _check_held(held, names)
        if len(set(names)) != len(names):
            raise ProbeError(f"{len(names)} names, and some are there twice; give each once")
        self._check_width(rows_PD)
        redirected = replace_directions([held[name].probe for name in names], rows_PD)
        new = dict(zip(names, redirected, strict=True))
        columns = (c._replace(probe=new.get(c.probe.name, c.probe)) for c in self.columns)
        return self._next(columns)

    def _check_width(self, rows_PD: NDArray[np.float32]) -> None:
        if rows_PD.shape[1:] != (self.width,):
            raise ProbeError(
                f"directions have shape {rows_PD.shape} and {quote(self.model)} has width "
                f"{self.width}; use probes trained on this model"
            )

    def remove(self, names: Iterable[str]) -> EngineBank:
        """Remove the probes of these names and free their slots."""
        gone = frozenset(names)
        _check_held(_by_name(self.columns), gone)
        return self._place([column for column in self.columns if column.probe.name not in gone], ())

    def _place(self, kept: Sequence[ProbeColumn], added: Iterable[Probe]) -> EngineBank:
        """Give each added probe the first free slot at its site."""
        columns = [*kept]
        taken = {(column.site_index, column.slot_index) for column in kept}
        next_slot: dict[int, int] = {}
        for probe in added:
            site = self.site_index_of[probe.point]
            slot = next_slot.get(site, 0)
            while (site, slot) in taken:
                slot += 1
            self._check_capacity(site, slot)
            next_slot[site] = slot + 1
            columns.append(ProbeColumn(site, slot, probe))
        columns.sort(key=lambda column: (column.site_index, column.slot_index))
        return self._next(columns)

    def _next(self, columns: Iterable[ProbeColumn]) -> EngineBank:
        placed = tuple(columns)
        return replace(
            self,
            version=self.version + 1,
            placed=placed,
            names=tuple(column.probe.name for column in placed),
            slots=tuple((column.site_index, column.slot_index) for column in placed),
            directions_PD=None,
        )

    def _check_capacity(self, site: int, slot: int) -> None:
        if slot >= self.capacity:
            raise CapacityError(
                f"all {self.capacity} slots at {self.sites[site]} are taken; "
                "raise `capacity` in the config, or remove a probe"
            )

    def _check(self, probes: Sequence[Probe]) -> None:
        seen: set[str] = set()
        for probe in probes:
            if probe.name in seen:
                raise ProbeError(f"{probe.name} was given twice; names are unique: rename one")
            seen.add(probe.name)
            self._check_fits(probe)
        total = len(self.columns) + len(seen - _by_name(self.columns).keys())
        if total > MAX_PROBES:
            raise CapacityError(f"{total} probes, and a bank holds {MAX_PROBES}; remove some first")

    def _check_fits(self, probe: Probe) -> None:
        if probe.width != self.width:
            raise ProbeError(
                f"probe {probe.name} has width {probe.width} and {quote(self.model)} has "
                f"{self.width}; use a probe trained on this model"
            )
        if probe.model is not None and model_key(probe.model) != model_key(self.model):
            raise ProbeError(
                f"probe {probe.name} was made for {quote(probe.model)} and this engine serves "
                f"{quote(self.model)}; use a probe trained on it, or save it without `model`"
            )
        if probe.point not in self.site_index_of:
            raise PointError(
                f"probe {probe.name} reads {probe.point}, which is not tapped here; tapped are "
                f"{join_names(map(str, sorted(self.site_index_of)))}: "
                "use one, or add it to `points`"
            )


class _ProbesByName(Mapping[str, Probe]):
    """The probes of a bank by name; reading one name applies new directions to all of them."""

    def __init__(self, bank: EngineBank) -> None:
        self._bank = bank
        self._index = {name: index for index, name in enumerate(bank.names)}

    def __getitem__(self, name: str) -> Probe:
        return self._bank.columns[self._index[name]].probe

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def _check_held(held: Mapping[str, ProbeColumn], names: Iterable[str]) -> None:
    missing = sorted(set(names) - held.keys())
    if missing:
        raise ProbeError(
            f"the bank has no probe named {join_names(map(quote, missing))}; "
            f"it has {join_names(sorted(held)) or 'none'}: use one of those, or add"
        )


def _by_name(columns: Iterable[ProbeColumn]) -> dict[str, ProbeColumn]:
    return {column.probe.name: column for column in columns}


def model_key(model: str) -> str:
    """The last part of a model's name or path: where it was downloaded does not matter."""
    return model.rstrip("/").rpartition("/")[2].casefold()


def join_names(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    listed = [*names]
    more = len(listed) - _MAX_LISTED
    return ", ".join(listed[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
