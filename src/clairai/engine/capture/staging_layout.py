"""Plans where the selected rows of a step lie in a region of the staging arena.

N = selected tokens, M = rows of one encoder (tokens times points), K = sampled rows, E = ranges of
positions.

Runs in: the worker. The capture writer process reads the same layout in `staging_reader.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.capture.pipe_messages import (
    ArrayPlace,
    EncodedGroup,
    FormatRows,
    StagedRows,
    StagingLayout,
)
from clairai.capture.staging_arena import ALIGNMENT, ArenaRegion
from clairai.capture.staging_reader import IS_KEPT, ROWS, SAMPLE, WHOLE_STEP
from clairai.engine.capture.pinned_arena import PinnedArena
from clairai.engine.capture.row_selection import RowSelection
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import STORED_DTYPES

SAMPLE_ONE_IN: Final = 256
MAX_SAMPLE: Final = 64


@dataclass(frozen=True, eq=False)
class GatherSpan:
    """A part of the gathered stash rows: those of one encoder, or its sample."""

    first: int
    end: int
    group: int
    encoder: Encoder | None  # None: sampled rows, which are not encoded


class StagingPlan:
    """How the rows of a selection are gathered and where they go.

    Steps that select the same rows of the same requests share one plan, its index on the device
    and the layout that the capture writer has.
    """

    def __init__(
        self,
        number: int,
        selection: RowSelection,
        *,
        stash_rows: int,
        width: int,
        dtypes: Mapping[str, str],
        rng: np.random.Generator,
    ) -> None:
        """`dtypes` of the model's `row`, and of the forward pass's `token` and `position`."""
        self.selection = selection
        self.uses = 0
        # On the device, once they have been copied: places in the inputs, and in the stash.
        self.device_inputs_N: torch.Tensor | None = None
        self.device_stash: torch.Tensor | None = None
        # Of a step that is ahead: the request of each row, and how many rows of it follow.
        self.device_drafts_2N: torch.Tensor | None = None
        self.spans: list[GatherSpan] = []
        self.arrays: dict[tuple[int, str], ArrayPlace] = {}
        self.nbytes = 0
        self._add(WHOLE_STEP, "token", dtypes["token"], len(selection))
        self._add(WHOLE_STEP, "position", dtypes["position"], len(selection))
        groups, index = list[EncodedGroup](), [selection.row_N]
        if selection.left_N is not None:
            self._add(WHOLE_STEP, IS_KEPT, "bool", len(selection))
            index += [selection.batch.request_E[selection.entry_N], selection.left_N]
        for encoder, parts in _parts_by_encoder(selection).items():
            stash_M = _stash_places(selection, parts, stash_rows)
            num_sampled = min(max(len(stash_M) // SAMPLE_ONE_IN, 1), MAX_SAMPLE)
            sample_K = rng.integers(0, len(stash_M), num_sampled)
            self._add_group(len(groups), encoder, len(stash_M), num_sampled, width, dtypes["row"])
            parameters = tuple(encoder.parameters.items())
            formats = tuple(part for part, _ in parts)
            groups.append(EncodedGroup(encoder.name, parameters, formats, sample_K.tobytes()))
            index += [stash_M, stash_M[sample_K]]
        # Places in the forward pass's inputs, whose drafts they may be, then places in the stash,
        # span by span.
        self.index: NDArray[np.int64] = np.concatenate(index)
        self._add(WHOLE_STEP, "index", "int64", len(self.index))
        self._entries, self._first_rows, counts = _ranges_with_rows(selection)
        self.layout = StagingLayout(
            number=number,
            dtype=dtypes["row"],
            fields=tuple(self.arrays.values()),
            groups=tuple(groups),
            counts=counts.tobytes(),
            **self._describe_ranges(),
        )

    def _describe_ranges(self) -> dict[str, bytes]:
        """Fields of the layout."""
        batch = self.selection.batch
        found: dict[str, NDArray[Any]] = {
            "streams": batch.stream_E,
            "choices": batch.choice_E,
            "prompts": batch.prompt_E,
        }
        if self.selection.left_N is not None:
            found |= {"lows": batch.first_E, "highs": batch.end_E}
        return {name: column_E[self._entries].tobytes() for name, column_E in found.items()}

    def _add(self, group: int, name: str, dtype: str, *shape: int) -> None:
        """`dtype` is numpy's name."""
        self.arrays[group, name] = ArrayPlace(group, name, self.nbytes, dtype, shape)
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def _add_group(
        self, group: int, encoder: Encoder, num_rows: int, num_sampled: int, width: int, dtype: str
    ) -> None:
        for name, column in encoder.layout(width).items():
            self._add(group, f"{ROWS}{name}", column.dtype, num_rows, column.size)
        self._add(group, SAMPLE, STORED_DTYPES[dtype], num_sampled, width)
        first = self.spans[-1].end if self.spans else 0
        middle = first + num_rows
        self.spans.append(GatherSpan(first, middle, group, encoder))
        self.spans.append(GatherSpan(middle, middle + num_sampled, group, None))

    def is_plan_for(self, selection: RowSelection) -> bool:
        """True if the selection wants the same rows of the same requests."""
        mine = self.selection
        if selection.batch is not mine.batch:
            return False
        if selection.left_N is not None and (
            mine.left_N is None or not np.array_equal(selection.left_N, mine.left_N)
        ):
            return False
        if selection.row_N is mine.row_N and selection.entry_N is mine.entry_N:
            return True
        return np.array_equal(selection.row_N, mine.row_N) and np.array_equal(
            selection.entry_N, mine.entry_N
        )

    def set_device_index(self, index: torch.Tensor) -> None:
        """`index` as a tensor of the device, for all uses of the plan."""
        num_tokens = len(self.selection)
        self.device_inputs_N, self.device_stash = index[:num_tokens], index[num_tokens:]
        if self.selection.left_N is not None:
            drafts, self.device_stash = self.device_stash.tensor_split([2 * num_tokens])
            self.device_drafts_2N = drafts.view(2, num_tokens)

    def tensor(
        self, pinned: PinnedArena, region: ArenaRegion, group: int, name: str
    ) -> torch.Tensor:
        """One array of a region, to write to."""
        place = self.arrays[group, name]
        dtype: torch.dtype = getattr(torch, place.dtype)
        return pinned.tensor(region.start + place.start, dtype, place.shape)

    def staged_rows(self, selection: RowSelection, number: int, region: ArenaRegion) -> StagedRows:
        """The message about a selection that this plan is for."""
        return StagedRows(
            number,
            self.layout.number,
            region.start,
            region.nbytes,
            region.end,
            selection.position_N[self._first_rows].tobytes(),
            selection.seen_E[self._entries].tobytes(),
            b"" if selection.media_N is None else selection.media_N.tobytes(),
        )


def _parts_by_encoder(
    selection: RowSelection,
) -> dict[Encoder, list[tuple[FormatRows, NDArray[np.int64]]]]:
    """Each format's tokens, and its sites."""
    bounds = selection.bounds().tolist()
    found: dict[Encoder, list[tuple[FormatRows, NDArray[np.int64]]]] = {}
    for format, first, end in zip(selection.batch.formats, bounds[:-1], bounds[1:], strict=True):
        if end > first:
            part = FormatRows(format.points, format.to, first, end)
            found.setdefault(format.encoder, []).append((part, format.sites_P))
    return found


def _stash_places(
    selection: RowSelection, parts: list[tuple[FormatRows, NDArray[np.int64]]], stash_rows: int
) -> NDArray[np.int64]:
    """Part by part, in each point by point, then token by token."""
    places = [
        (sites_P[:, None] * stash_rows + selection.row_N[part.first : part.end][None]).ravel()
        for part, sites_P in parts
    ]
    return np.concatenate(places)


def _ranges_with_rows(
    selection: RowSelection,
) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
    """Ranges that have rows here: which, the index of each one's first row, and how many rows."""
    count_E = np.bincount(selection.entry_N, minlength=len(selection.batch.format_E))
    entries = np.flatnonzero(count_E)
    counts = count_E[entries].astype(np.int64)
    return entries, np.cumsum(counts) - counts, counts
