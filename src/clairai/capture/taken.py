"""Takes nothing of ours; gives the form in which rows come from a device, on their way to a disk.

N = tokens, P = points, K = rows of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs.base import Encoder

Seat = tuple[int, int]  # stream and choice


@dataclass(frozen=True)
class Verdict:
    """The highest score of some tokens of a request whose rows wait for it; None: not known."""

    seat: Seat
    probe: str
    threshold: float
    score: float | None


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows as they were before they were encoded."""

    rows_KD: NDArray[np.float32]
    encoded: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Load:
    """Encoded rows of some tokens at some points, for some consumers."""

    encoder: Encoder
    points: tuple[str, ...]
    to: tuple[str, ...]
    rows_N: NDArray[np.void]
    arrays: Mapping[str, NDArray[Any]]  # each [P, N, ...]; memory that is used again

    @property
    def key(self) -> tuple[object, ...]:
        """Loads with one key can be joined."""
        return (self.encoder, self.points, self.to)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def counts(self) -> dict[Seat, int]:
        """Rows of each answer."""
        return {seat: len(at) * len(self.points) for seat, at in by_seat(self.rows_N)}

    @staticmethod
    def joined(loads: Sequence[Load]) -> Load:
        """All of their rows, in memory of their own."""
        first = loads[0]
        arrays = {
            name: np.concatenate([load.arrays[name] for load in loads], axis=1)
            for name in first.arrays
        }
        rows_N = np.concatenate([load.rows_N for load in loads])
        return Load(first.encoder, first.points, first.to, rows_N, arrays)


class Taken(Protocol):
    """Rows of one step, or a part of it; on their way until `wait` returns."""

    @property
    def nbytes(self) -> int: ...

    def wait(self) -> None: ...

    def verdicts(self) -> Sequence[Verdict]: ...

    def loads(self) -> Sequence[Load]: ...

    def samples(self) -> Sequence[tuple[Encoder, Sample]]: ...

    def counts(self) -> Mapping[Seat, int]:
        """Rows of each answer."""

    def free(self) -> None:
        """Nobody reads its memory any more."""


def by_seat(
    rows_N: NDArray[np.void], places: NDArray[np.intp] | None = None
) -> list[tuple[Seat, NDArray[np.intp]]]:
    """Rows, or those at these places, by the answer they belong to."""
    at = np.arange(len(rows_N)) if places is None else places
    stream, choice = rows_N["stream"][at], rows_N["choice"][at]
    order = np.lexsort((choice, stream))
    stream, choice = stream[order], choice[order]
    is_new = np.ones(len(order), bool)
    is_new[1:] = (stream[1:] != stream[:-1]) | (choice[1:] != choice[:-1])
    firsts = np.flatnonzero(is_new)
    parts = np.split(at[order], firsts[1:]) if len(firsts) else []
    return [
        ((int(stream[first]), int(choice[first])), np.sort(part))
        for first, part in zip(firsts, parts, strict=True)
    ]
