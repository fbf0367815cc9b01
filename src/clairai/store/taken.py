"""Takes shards and which of their rows are wanted; gives them as one array, decoded on access.

Shapes: N wanted rows, D values of a decoded row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from clairai.errors import StoreDamagedError, StoreError
from clairai.points import Point
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import named
from clairai.store.rows import Origin
from clairai.store.shard import COLUMNS, POINT, ROWS, Opened

Places = NDArray[np.intp]


@dataclass(frozen=True)
class Part:
    """Wanted rows of one shard: where they are in it, and their columns."""

    shard: Opened
    places_N: Places
    columns: dict[str, NDArray[Any]]
    point_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        shard: Opened,
        stream: int,
        point: str | None,
        positions: Sequence[int] | None,
        choice: int | None,
    ) -> Part:
        every = {name: shard.array(name) for name in (*COLUMNS, POINT)}
        points = shard.head.points
        if len(every[POINT]) and int(every[POINT].max()) >= len(points):
            raise StoreDamagedError(f"shard {shard.name} names a point that it does not list")
        is_wanted = every["stream"] == np.uint64(stream)
        if point is not None:
            is_wanted &= every[POINT] == points.index(point)
        if positions is not None:
            is_wanted &= np.isin(every["position"], np.array(positions, np.int64))
        if choice is not None:
            is_wanted &= every["choice"] == choice
        places_N = np.flatnonzero(is_wanted)
        columns = {name: column[places_N] for name, column in every.items()}
        return cls(shard, places_N, columns, points)

    def encoded(self, places_N: Places) -> dict[str, NDArray[Any]]:
        names = [name for name in self.shard.tensors if name.startswith(ROWS)]
        return {name.removeprefix(ROWS): self.shard.array(name)[places_N] for name in names}

    def decoded(self, places_N: Places) -> NDArray[np.float32]:
        width = self.shard.head.origin.width
        return self._encoder.decode(self.encoded(places_N), width=width)

    @property
    def nbytes_per_row(self) -> int:
        return self._encoder.nbytes_per_row(self.shard.head.origin.width)

    @property
    def width(self) -> int:
        return self._encoder.decoded_width(self.shard.head.origin.width)

    @property
    def _encoder(self) -> Encoder:
        origin = self.shard.head.origin
        return named(origin.encoder, msgspec.json.decode(origin.parameters))


@dataclass(frozen=True)
class Rows:
    """Rows of one request. `rows[...]` decodes what is indexed; `numpy.asarray(rows)` all of it."""

    parts: tuple[Part, ...]
    part_N: Places  # which part each row is in
    place_N: Places  # and where in its shard
    stream: NDArray[np.uint64]
    choice: NDArray[np.uint16]
    position: NDArray[np.uint32]
    token_id: NDArray[np.int32]
    phase: NDArray[np.uint8]
    point: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Rows:
        """In order, each (choice, point, position) once: the one that was stored last."""
        found = [part for part in parts if len(part.places_N)]
        part_N = np.repeat(np.arange(len(found)), [len(part.places_N) for part in found])
        place_N = _joined([part.places_N for part in found], np.intp)
        columns = {
            name: _joined([part.columns[name] for part in found], dtype) for name, dtype in _TYPES
        }
        points = [p.point_names[index] for p in found for index in p.columns[POINT].tolist()]
        order = _order(columns, points)
        return cls(
            parts=tuple(found),
            part_N=part_N[order],
            place_N=place_N[order],
            point=tuple(points[index] for index in order.tolist()),
            **{name: column[order] for name, column in columns.items()},
        )

    def before(self, position: int) -> Rows:
        """Those of earlier positions."""
        chosen = np.flatnonzero(self.position < position)
        columns: dict[str, Any] = {
            name: getattr(self, name)[chosen] for name in ("part_N", "place_N", *dict(_TYPES))
        }
        point = tuple(self.point[index] for index in chosen.tolist())
        return Rows(parts=self.parts, point=point, **columns)

    def __len__(self) -> int:
        return len(self.part_N)

    @property
    def shape(self) -> tuple[int, int]:
        """Of all rows decoded."""
        return len(self), self.parts[0].width if self.parts else 0

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(part.shard.head.origin for part in self.parts)

    def __getitem__(self, index: Any) -> NDArray[np.float32]:
        chosen = np.arange(len(self))[index]
        values = self._decoded(np.atleast_1d(chosen))
        return values if np.ndim(chosen) else values[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("stored rows are decoded, which makes a copy")
        values = self._decoded(np.arange(len(self)))
        return values if dtype is None else values.astype(dtype)

    def encoded(self) -> dict[str, NDArray[Any]]:
        """The encoder's arrays as they are stored."""
        self._require_one_kind()
        blocks = [self._of_part(index) for index in range(len(self.parts))]
        found = [self.parts[i].encoded(self.place_N[chosen]) for i, chosen in enumerate(blocks)]
        names = found[0] if found else ()
        back = np.argsort(np.concatenate(blocks)) if blocks else np.arange(0)
        return {name: np.concatenate([one[name] for one in found])[back] for name in names}

    def _of_part(self, index: int) -> Places:
        return np.flatnonzero(self.part_N == index)

    def _decoded(self, chosen_M: Places) -> NDArray[np.float32]:
        self._require_one_kind()
        if not len(chosen_M):
            return np.empty((0, self.parts[0].width if self.parts else 0), np.float32)
        values: NDArray[np.float32] | None = None
        for index in np.unique(self.part_N[chosen_M]).tolist():
            is_here = self.part_N[chosen_M] == index
            decoded = self.parts[index].decoded(self.place_N[chosen_M[is_here]])
            if values is None:
                values = np.empty((len(chosen_M), decoded.shape[1]), np.float32)
            values[is_here] = decoded
        assert values is not None
        return values

    def _require_one_kind(self) -> None:
        kinds = {(origin.encoder, origin.parameters, origin.width) for origin in self.origins}
        if len(kinds) > 1:
            raise StoreError(
                "these rows were stored by encoders that differ; ask for fewer points or positions"
            )


_TYPES: Final = (
    ("stream", np.uint64),
    ("choice", np.uint16),
    ("position", np.uint32),
    ("token_id", np.int32),
    ("phase", np.uint8),
)


def _joined(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)


def _order(columns: dict[str, NDArray[Any]], points: Sequence[str]) -> Places:
    ranks = {name: rank for rank, name in enumerate(sorted(set(points), key=Point.parse))}
    rank_N = np.array([ranks[name] for name in points], np.int64)
    choice_N, position_N = columns["choice"], columns["position"]
    order = np.lexsort((position_N, rank_N, choice_N))  # stable: of equals, the newest is last
    keys = [column[order] for column in (choice_N, rank_N, position_N)]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return order[is_last]
