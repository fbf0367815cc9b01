"""Takes a pick; gives where its rows lie in a part of the arena, and how that is told to the clerk.

N = wanted tokens, M = rows of one encoder (tokens times points), K = rows of the sample, D = width,
E = ranges of positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.capture import pipe_messages
from clairai.capture.staging_arena import ALIGNMENT, ArenaRegion
from clairai.capture.staging_reader import ROWS, SAMPLE, WHOLE_STEP
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.engine.capture.row_selection import CaptureFormat, RowSelection
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import STORED_DTYPES

SAMPLE_ONE_IN: Final = 256
MAX_SAMPLE: Final = 64


@dataclass(frozen=True, eq=False)
class EncoderGroup:
    """Rows of one encoder: of each kind in turn, point by point, token by token."""

    encoder: Encoder
    kinds: tuple[tuple[CaptureFormat, slice], ...]  # and which tokens of the pick
    flat_M: NDArray[np.int64]  # places in the stash
    sample_K: NDArray[np.int64]  # places among the M

    def told(self) -> pipe_messages.EncodedGroup:
        return pipe_messages.EncodedGroup(
            self.encoder.name,
            tuple(self.encoder.parameters.items()),
            tuple(
                pipe_messages.FormatRows(kind.points, kind.to, p.start, p.stop)
                for kind, p in self.kinds
            ),
            self.sample_K.tobytes(),
        )


def group_by_encoder(
    selection: RowSelection, stash_rows: int, rng: np.random.Generator
) -> list[EncoderGroup]:
    """One for each encoder of the pick."""
    bounds = selection.bounds()
    found: dict[Encoder, list[tuple[CaptureFormat, slice]]] = {}
    for kind, first, end in zip(selection.cast.kinds, bounds[:-1], bounds[1:], strict=True):
        if end > first:
            found.setdefault(kind.encoder, []).append((kind, slice(int(first), int(end))))
    groups = []
    for encoder, kinds in found.items():
        flat = [
            (kind.sites_P[:, None] * stash_rows + selection.row_N[part][None]).ravel()
            for kind, part in kinds
        ]
        flat_M = np.concatenate(flat)
        num_sampled = min(max(len(flat_M) // SAMPLE_ONE_IN, 1), MAX_SAMPLE)
        sample_K = rng.integers(0, len(flat_M), num_sampled)
        groups.append(EncoderGroup(encoder, tuple(kinds), flat_M, sample_K))
    return groups


@dataclass(frozen=True)
class StagedArray:
    """One array in the arena."""

    start: int
    dtype: str  # numpy's name of it
    torch_dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class StagingLayout:
    """Where the arrays of one pick lie, from the start of its region on."""

    fields: dict[tuple[int, str], StagedArray] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, group: int, name: str, dtype: str, *shape: int) -> None:
        """`dtype` is numpy's name of it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.fields[group, name] = StagedArray(self.nbytes, dtype, getattr(torch, dtype), shape)
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def told(self) -> tuple[pipe_messages.ArrayPlace, ...]:
        return tuple(
            pipe_messages.ArrayPlace(group, name, one.start, one.dtype, one.shape)
            for (group, name), one in self.fields.items()
        )


def lay_out_rows(
    selection: RowSelection, groups: Sequence[EncoderGroup], width: int, dtypes: Mapping[str, str]
) -> StagingLayout:
    """`dtypes` of `row` (the model's rows), `token` and `position` (the forward's inputs)."""
    layout = StagingLayout()
    num_index = len(selection) + sum(len(g.flat_M) + len(g.sample_K) for g in groups)
    layout.add(WHOLE_STEP, "index", "int64", num_index)
    layout.add(WHOLE_STEP, "token", dtypes["token"], len(selection))
    layout.add(WHOLE_STEP, "position", dtypes["position"], len(selection))
    for number, group in enumerate(groups):
        for name, column in group.encoder.layout(width).items():
            layout.add(number, f"{ROWS}{name}", column.dtype, len(group.flat_M), column.size)
        layout.add(number, SAMPLE, STORED_DTYPES[dtypes["row"]], len(group.sample_K), width)
    return layout


@dataclass(frozen=True, eq=False)
class GatherSpan:
    """Rows of one encoder among all that are gathered, or its sample."""

    first: int
    end: int
    group: int
    encoder: Encoder | None  # None: they stay as they are


def _spans(groups: Sequence[EncoderGroup]) -> Iterator[GatherSpan]:
    """In the order in which their places lie in the index."""
    first = 0
    for number, group in enumerate(groups):
        middle = first + len(group.flat_M)
        yield GatherSpan(first, middle, number, group.encoder)
        first = middle + len(group.sample_K)
        yield GatherSpan(middle, first, number, None)


@dataclass(frozen=True)
class DeviceIndex:
    """Where wanted rows are, on the device."""

    inputs_N: torch.Tensor  # in the forward's inputs
    stash: torch.Tensor  # in the stash, of all spans
    num_stash: int


class StagingPlan:
    """How the rows of a pick are taken; steps that decode alike share one."""

    def __init__(
        self,
        number: int,
        selection: RowSelection,
        groups: Sequence[EncoderGroup],
        layout: StagingLayout,
    ) -> None:
        self.number, self.selection, self.groups, self.layout = number, selection, groups, layout
        self.spans = tuple(_spans(groups))
        self.places: DeviceIndex | None = None  # once they are there
        self.uses = 0
        count_E = np.bincount(selection.entry_N, minlength=len(selection.cast.format_E))
        self._entries = np.flatnonzero(count_E)  # ranges that have rows here
        self._count_E = count_E[self._entries]
        self._at_E = np.cumsum(self._count_E) - self._count_E  # where each one's first row is

    def is_plan_for(self, selection: RowSelection) -> bool:
        """Whether the same rows are wanted of the same requests."""
        mine = self.selection
        if selection.cast is not mine.cast:
            return False
        if selection.row_N is mine.row_N and selection.entry_N is mine.entry_N:
            return True
        return np.array_equal(selection.row_N, mine.row_N) and np.array_equal(
            selection.entry_N, mine.entry_N
        )

    def wanted(self) -> NDArray[np.int64]:
        """Places in the forward's inputs, then in the stash: of each group, and of its sample."""
        parts = [self.selection.row_N]
        for group in self.groups:
            parts += [group.flat_M, group.flat_M[group.sample_K]]
        return np.concatenate(parts)

    def placed(self, index: torch.Tensor) -> DeviceIndex:
        """`index` is `wanted` on the device; kept for all uses."""
        num_tokens = len(self.selection)
        self.places = DeviceIndex(index[:num_tokens], index[num_tokens:], len(index) - num_tokens)
        return self.places

    def told(self, dtype: str) -> pipe_messages.StagingPlanMessage:
        """`dtype` of the model's rows."""
        cast, entries = self.selection.cast, self._entries
        return pipe_messages.StagingPlanMessage(
            number=self.number,
            dtype=dtype,
            fields=self.layout.told(),
            groups=tuple(group.told() for group in self.groups),
            counts=self._count_E.astype(np.int64).tobytes(),
            streams=cast.stream_E[entries].tobytes(),
            choices=cast.choice_E[entries].tobytes(),
            prompts=cast.prompt_E[entries].tobytes(),
        )

    def ticket(
        self, selection: RowSelection, number: int, region: ArenaRegion
    ) -> pipe_messages.StagedRows:
        """For a pick that this plan is for."""
        return pipe_messages.StagedRows(
            number,
            self.number,
            region.start,
            region.nbytes,
            region.end,
            selection.position_N[self._at_E].tobytes(),
            selection.seen_E[self._entries].tobytes(),
        )


@dataclass(frozen=True)
class StagingTensors:
    """The arrays of a plan in one region, to be written."""

    layout: StagingLayout
    pinned: PinnedArena
    start: int

    def tensor(self, group: int, name: str) -> torch.Tensor:
        one = self.layout.fields[group, name]
        return self.pinned.tensor(self.start + one.start, one.torch_dtype, one.shape)
