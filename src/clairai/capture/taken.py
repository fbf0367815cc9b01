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
