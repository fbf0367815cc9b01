"""Takes a pick and its part of the arena; gives where everything lies in it, and reads it later.

N = wanted tokens, M = rows of one encoder (tokens times points), K = rows of the sample, D = width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.capture.taken import Load, Sample, Seat, Verdict
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import STORED, widened
from clairai.tap.arena import ALIGNMENT, Arena, Region
from clairai.tap.lanes import Wait
from clairai.tap.picks import Held, Kind, Pick

SAMPLE_ONE_IN: Final = 256
MAX_SAMPLE: Final = 64


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of one encoder: of each kind in turn, point by point, token by token."""

    encoder: Encoder
    kinds: tuple[tuple[Kind, slice], ...]  # and which tokens of the pick
    flat_M: NDArray[np.int64]  # places in the stash
    sample_K: NDArray[np.int64]  # places among the M


def groups_of(pick: Pick, stash_rows: int, rng: np.random.Generator) -> list[Group]:
    """One for each encoder of the pick."""
    bounds = pick.bounds()
    found: dict[Encoder, list[tuple[Kind, slice]]] = {}
    for kind, first, end in zip(pick.cast.kinds, bounds[:-1], bounds[1:], strict=True):
        if end > first:
            found.setdefault(kind.encoder, []).append((kind, slice(int(first), int(end))))
    groups = []
    for encoder, kinds in found.items():
        flat = [
            (kind.sites_P[:, None] * stash_rows + pick.row_N[part][None]).ravel()
            for kind, part in kinds
        ]
        flat_M = np.concatenate(flat)
        num_sampled = min(max(len(flat_M) // SAMPLE_ONE_IN, 1), MAX_SAMPLE)
        sample_K = rng.integers(0, len(flat_M), num_sampled)
        groups.append(Group(encoder, tuple(kinds), flat_M, sample_K))
    return groups


@dataclass(frozen=True)
class Field:
    """One array in the arena."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Layout:
    """Where the arrays of one pick lie, from the start of its region on."""

    fields: dict[tuple[int, str], Field] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, group: int, name: str, dtype: str, *shape: int) -> None:
        """`dtype` is numpy's name of it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.fields[group, name] = Field(self.nbytes, nbytes, getattr(torch, dtype), shape)
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT


PICK: Final = -1  # the group of what concerns the whole pick


def layout_of(pick: Pick, groups: Sequence[Group], width: int, dtypes: Mapping[str, str]) -> Layout:
    """`dtypes` of `row` (the model's rows), `token` and `position` (the forward's inputs)."""
    layout = Layout()
    num_index = len(pick) + sum(len(g.flat_M) + len(g.sample_K) for g in groups)
    layout.add(PICK, "index", "int64", num_index)
    layout.add(PICK, "token", dtypes["token"], len(pick))
    layout.add(PICK, "position", dtypes["position"], len(pick))
    for number, group in enumerate(groups):
        for name, column in group.encoder.layout(width).items():
            layout.add(number, f"rows.{name}", column.dtype, len(group.flat_M), column.size)
        layout.add(number, "sample", STORED[dtypes["row"]], len(group.sample_K), width)
    return layout


@dataclass(eq=False)
class Plan:
    """How the rows of a pick are taken; steps that decode alike share one."""

    pick: Pick
    groups: Sequence[Group]
    layout: Layout
    index: torch.Tensor | None = None  # on the device, once it is there
    uses: int = 0

    def is_for(self, pick: Pick) -> bool:
        """Whether the same rows are wanted of the same requests."""
        return (
            pick.cast is self.pick.cast
            and np.array_equal(pick.row_N, self.pick.row_N)
            and np.array_equal(pick.entry_N, self.pick.entry_N)
        )

    def wanted(self) -> NDArray[np.int64]:
        """Places in the forward's inputs, then in the stash: of each group, and of its sample."""
        parts = [self.pick.row_N]
        for group in self.groups:
            parts += [group.flat_M, group.flat_M[group.sample_K]]
        return np.concatenate(parts)


class Staged:
    """Rows in the arena, or on their way there."""

    def __init__(self, pick: Pick, plan: Plan, arena: Arena, region: Region) -> None:
        self._pick, self._groups, self._layout = pick, plan.groups, plan.layout
        self._arena, self._region = arena, region
        self._wait: Wait | None = None
        self.dtype = "float32"  # of the rows

    @property
    def nbytes(self) -> int:
        return self._region.nbytes

    def tensor(self, group: int, name: str) -> torch.Tensor:
        """One array, to be written."""
        one = self._layout.fields[group, name]
        start = self._region.start + one.start
        memory = self._arena.memory[start : start + one.nbytes]
        return memory.view(one.dtype).view(one.shape)

    def _array(self, group: int, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self.tensor(group, name).numpy()
        return found

    def will_be(self, wait: Wait) -> None:
        self._wait = wait

    def wait(self) -> None:
        assert self._wait is not None
        self._wait()

    def counts(self) -> Mapping[Seat, int]:
        return self._pick.counts()

    def verdicts(self) -> Sequence[Verdict]:
        return ()

    def loads(self) -> Sequence[Load]:
        pick = self._pick
        position_N = self._array(PICK, "position")
        if not np.array_equal(position_N, pick.position_N):
            raise RuntimeError(
                "the forward read other positions than the batch was laid out for; "
                "these rows are nobody's: please report this"
            )
        rows_N = pick.rows(self._array(PICK, "token"))
        return [load for at in range(len(self._groups)) for load in self._loads(at, rows_N)]

    def _loads(self, at: int, rows_N: NDArray[np.void]) -> Sequence[Load]:
        group = self._groups[at]
        names = [name for number, name in self._layout.fields if number == at and name != "sample"]
        loads, first = [], 0
        for kind, part in group.kinds:
            num_points, num_rows = len(kind.points), part.stop - part.start
            end = first + num_points * num_rows
            arrays = {
                name.removeprefix("rows."): self._array(at, name)[first:end].reshape(
                    num_points, num_rows, -1
                )
                for name in names
            }
            loads.append(Load(kind.encoder, kind.points, kind.to, rows_N[part], arrays))
            first = end
        return loads

    def samples(self) -> Sequence[tuple[Encoder, Sample]]:
        return [self._sample(at, group) for at, group in enumerate(self._groups)]

    def _sample(self, at: int, group: Group) -> tuple[Encoder, Sample]:
        names = [name for number, name in self._layout.fields if number == at and name != "sample"]
        encoded = {n.removeprefix("rows."): self._array(at, n)[group.sample_K] for n in names}
        rows_KD = widened(self._array(at, "sample").copy(), self.dtype)
        return group.encoder, Sample(rows_KD, encoded)

    def free(self) -> None:
        self._arena.free(self._region)


class Scored:
    """Scores of the tokens of requests whose rows wait for them."""

    def __init__(self, held: Sequence[Held], scores: Mapping[str, torch.Tensor], wait: Wait):
        """`scores` of each probe that has any: one for each token of the step."""
        self._held, self._scores, self._wait = held, scores, wait

    @property
    def nbytes(self) -> int:
        return sum(int(scores.nbytes) for scores in self._scores.values())

    def wait(self) -> None:
        self._wait()

    def counts(self) -> Mapping[Seat, int]:
        return {}

    def verdicts(self) -> Sequence[Verdict]:
        return [
            Verdict(one.seat, one.hold.probe, one.hold.threshold, self._highest(one))
            for one in self._held
        ]

    def _highest(self, held: Held) -> float | None:
        scores_T = self._scores.get(held.hold.probe)
        if scores_T is None or held.end <= held.first:
            return None
        # A score that is no number is below every threshold.
        return float(np.fmax.reduce(scores_T.numpy()[held.first : held.end]))

    def loads(self) -> Sequence[Load]:
        return ()

    def samples(self) -> Sequence[tuple[Encoder, Sample]]:
        return ()

    def free(self) -> None:
        pass
