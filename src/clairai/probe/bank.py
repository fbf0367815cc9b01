"""Takes a bank's columns and another direction for each; gives the columns, made when asked for.

A trainer turns hundreds of probes at once, again and again, and hardly anybody looks at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from clairai.errors import CapacityError, ConfigError, PointError, ProbeError
from clairai.points import Point, quote
from clairai.probe.model import (
    Probe,
    check_direction_rows,
    replace_checked_directions,
    replace_directions,
)
from clairai.wire import ring_messages

SiteSlot: TypeAlias = tuple[int, int]  # site and slot


class ProbeColumn(NamedTuple):
    """Where one probe sits."""

    site_index: int
    slot_index: int
    probe: Probe


class RedirectedColumns(Sequence[ProbeColumn]):
    """As `root`, each probe with its row of the block: those rows were checked, and stay."""

    def __init__(
        self,
        root: tuple[ProbeColumn, ...],
        block_PD: NDArray[np.float32],
        names: tuple[str, ...],
        places: tuple[SiteSlot, ...],
    ) -> None:
        """`names` and `places` are the root's, in its order."""
        assert len(root) == len(block_PD)
        self.root, self.block_PD = root, block_PD
        self.names, self.places = names, places

    @cached_property
    def _all(self) -> tuple[ProbeColumn, ...]:
        probes = replace_checked_directions([column.probe for column in self.root], self.block_PD)
        return tuple(
            ProbeColumn(*place, probe) for place, probe in zip(self.places, probes, strict=True)
        )

    def __len__(self) -> int:
        return len(self.root)

    @overload
    def __getitem__(self, index: int) -> ProbeColumn: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ProbeColumn, ...]: ...

    def __getitem__(self, index: int | slice) -> ProbeColumn | tuple[ProbeColumn, ...]:
        return self._all[index]

    def __iter__(self) -> Iterator[ProbeColumn]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RedirectedColumns | tuple):
            return NotImplemented
        return self._all == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as what holds it


class ProbesByName(Mapping[str, Probe]):
    """The probes of some columns, as they are at this moment."""

    def __init__(self, names: tuple[str, ...], columns: Sequence[ProbeColumn]) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._columns = columns

    def __getitem__(self, name: str) -> Probe:
        return self._columns[self._index[name]].probe

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


# MERGED
# Takes probes by name; gives each a column at a tapped site. The book-keeping: no tensors.
#
# A site is one tensor in the forward pass; two points may be the same tensor (post_block.4 is
# pre_attn.5), and then share its slots. Every change is checked whole before it makes new
# Columns.


# A bank must fit one message of wire.MAX_MESSAGE_BYTES, and a column takes at most 450 of them.
MAX_PROBES: Final = 2048
_MAX_LISTED: Final = 8


@dataclass(frozen=True)
class EngineBank:
    """Which probe has which column, in order of site and then slot; a change gives new Columns."""

    sites: tuple[str, ...]
    site_index_of: Mapping[Point, int]
    capacity: int  # slots of each site
    width: int
    model: str
    version: int = 0
    columns: Sequence[ProbeColumn] = ()

    @classmethod
    def empty(
        cls,
        points: Sequence[Point],
        capacity: int,
        width: int,
        model: str,
        aliases: Mapping[Point, str] | None = None,
    ) -> EngineBank:
        """No probes yet; sites are numbered as `points` first name them.

        `aliases` gives the site of a point where that is not the point's own name.
        """
        if not points:
            raise PointError("no tap points were given; list at least one, such as post_block.15")
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; give at least 1 probe for each point")
        names = {point: str(point) for point in points} | dict(aliases or {})
        sites = tuple(dict.fromkeys(names[point] for point in points))
        index_of = {site: index for index, site in enumerate(sites)}
        # A point nobody listed is still served if it is the same tensor as one that was.
        tapped = {point: index_of[site] for point, site in names.items() if site in index_of}
        return cls(sites, MappingProxyType(tapped), capacity, width, model)

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Every probe, in column order."""
        return tuple(column.probe for column in self.columns)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of every probe, in column order."""
        if isinstance(self.columns, RedirectedColumns):
            return self.columns.names
        return tuple(column.probe.name for column in self.columns)

    @property
    def by_name(self) -> Mapping[str, Probe]:
        """Every probe."""
        return ProbesByName(self.names, self.columns)

    def bank(self, weights: int | None = None) -> ring_messages.Bank:
        """What readers are told: the columns of records that carry this version."""
        probes = tuple(column.probe.info() for column in self.columns)
        return ring_messages.Bank(self.version, probes, weights)

    def slots(self) -> tuple[SiteSlot, ...]:
        """(site_index, slot_index) of each column, in column order."""
        if isinstance(self.columns, RedirectedColumns):
            return self.columns.places
        return tuple((column.site_index, column.slot_index) for column in self.columns)

    def add(self, probes: Iterable[Probe]) -> EngineBank:
        """With these probes too, or none of them: an error leaves everything as it was."""
        added = tuple(probes)
        held = _by_name(self.columns)
        for probe in added:
            if probe.name in held:
                raise ProbeError(f"the bank has a probe named {probe.name}; use replace, or rename")
        self._check(added)
        return self._with(self.columns, added)

    def replace(self, *probes: Probe) -> EngineBank:
        """With these in the place of their namesakes; one that keeps its site keeps its slot."""
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
        return self._with(staying, moving)

    def redirect(self, names: Sequence[str], rows_PD: NDArray[np.float32]) -> EngineBank:
        """With other directions for the probes of these names, a row for each; all else stays."""
        if tuple(names) == self.names:
            return self._turned(rows_PD)
        held = _by_name(self.columns)
        _check_held(held, names)
        if len(set(names)) != len(names):
            raise ProbeError(f"{len(names)} names, and some are there twice; give each once")
        self._check_width(rows_PD)
        new = dict(
            zip(names, replace_directions([held[n].probe for n in names], rows_PD), strict=True)
        )
        columns = tuple(
            ProbeColumn(
                column.site_index, column.slot_index, new.get(column.probe.name, column.probe)
            )
            for column in self.columns
        )
        return replace(self, version=self.version + 1, columns=columns)

    def _turned(self, rows_PD: NDArray[np.float32]) -> EngineBank:
        """With another direction for each probe, in column order."""
        self._check_width(rows_PD)
        checked_PD = check_direction_rows(self.names, rows_PD)
        before = self.columns
        root = before.root if isinstance(before, RedirectedColumns) else tuple(before)
        columns = RedirectedColumns(root, checked_PD, self.names, self.slots())
        return replace(self, version=self.version + 1, columns=columns)

    def _check_width(self, rows_PD: NDArray[np.float32]) -> None:
        if rows_PD.shape[1:] != (self.width,):
            raise ProbeError(
                f"directions have shape {rows_PD.shape} and {quote(self.model)} has width "
                f"{self.width}; use probes trained on this model"
            )

    def remove(self, names: Iterable[str]) -> EngineBank:
        """Without the probes of these names; their slots are free again."""
        gone = frozenset(names)
        _check_held(_by_name(self.columns), gone)
        return self._with([column for column in self.columns if column.probe.name not in gone], ())

    def _with(self, kept: Sequence[ProbeColumn], added: Iterable[Probe]) -> EngineBank:
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
        return replace(self, version=self.version + 1, columns=tuple(columns))

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
    """The last part of a model's name or path: where it was downloaded from does not matter."""
    return model.rstrip("/").rpartition("/")[2].casefold()


def join_names(names: Iterable[str]) -> str:
    every = [*names]
    more = len(every) - _MAX_LISTED
    return ", ".join(every[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
