"""Reads captured rows and scores from the staging arena, as the engine's messages describe them.

N = tokens, P = points, M = rows of one encoder (tokens times points), K = sampled rows, E = ranges
of positions.

Runs in: the capture writer process, or the worker where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.capture.pipe_messages import (
    HeldTokens,
    StagedMessage,
    StagedRows,
    StagedScores,
    StagingLayout,
)
from clairai.capture.staging_arena import StagingArena
from clairai.engine.capture.capture_plan import AnswerId
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import widen
from clairai.store.codecs.registry import named
from clairai.wire.ring_messages import MEDIA_SHIFT, ROW

Wait = Callable[[], None]
WHOLE_STEP: Final = -1  # the group of arrays that all encoders share
SAMPLE: Final = "sample"
IS_KEPT: Final = "kept"  # False for a rejected draft, in a step whose drafts the device knows
ROWS: Final = "rows."  # prefix of the encoder's arrays


@dataclass(frozen=True, eq=False)
class FidelitySample:
    """Some rows as they were before they were encoded, and encoded."""

    rows_KD: NDArray[np.float32]
    encoded: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Encoded rows of some tokens at some points, for some consumers."""

    encoder: Encoder
    points: tuple[str, ...]
    to: tuple[str, ...]
    rows_N: NDArray[np.void]
    arrays: Mapping[str, NDArray[Any]]  # each [P, N, ...]; views of the arena until joined

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with equal keys can be joined."""
        return (self.encoder, self.points, self.to)

    def counts(self) -> dict[AnswerId, int]:
        """Rows of each answer."""
        found = group_by_answer(self.rows_N)
        return {answer: len(indices) * len(self.points) for answer, indices in found}

    def select(self, indices: NDArray[np.intp]) -> EncodedRows:
        """Only the rows at these indices."""
        arrays = {name: array[:, indices] for name, array in self.arrays.items()}
        return replace(self, rows_N=self.rows_N[indices], arrays=arrays)

    @staticmethod
    def join(parts: Sequence[EncodedRows]) -> EncodedRows:
        """All rows of parts with one key, copied out of the arena."""
        first = parts[0]
        arrays = {
            name: np.concatenate([part.arrays[name] for part in parts], axis=1)
            for name in first.arrays
        }
        rows_N = np.concatenate([part.rows_N for part in parts])
        return EncodedRows(first.encoder, first.points, first.to, rows_N, arrays)


def group_by_answer(
    rows_N: NDArray[np.void], indices: NDArray[np.intp] | None = None
) -> list[tuple[AnswerId, NDArray[np.intp]]]:
    """The indices of the rows of each answer, in order; of all rows, or of these."""
    at = np.arange(len(rows_N)) if indices is None else indices
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


class _Layout:
    """A layout decoded once for all steps that use it."""

    def __init__(self, message: StagingLayout) -> None:
        self.number, self.dtype = message.number, message.dtype
        self.places = {(one.group, one.name): one for one in message.fields}
        self.groups = message.groups
        self.encoders = [named(one.encoder, dict(one.parameters)) for one in message.groups]
        self.samples = [np.frombuffer(one.sample, np.int64) for one in message.groups]
        count_E = np.frombuffer(message.counts, np.int64)
        self.stream_E = np.frombuffer(message.streams, np.uint64)
        self.choice_E = np.frombuffer(message.choices, np.uint16)
        self.prompt_E = np.frombuffer(message.prompts, np.int64)
        # Bounds of each range, in steps whose positions only the device knows.
        self.low_E = np.frombuffer(message.lows, np.int64)
        self.high_E = np.frombuffer(message.highs, np.int64)
        self.is_ahead = (WHOLE_STEP, IS_KEPT) in self.places
        self.entry_N = np.repeat(np.arange(len(count_E)), count_E)
        # The n-th row of a range is n after its first.
        self.within_N = np.arange(len(self.entry_N)) - (np.cumsum(count_E) - count_E)[self.entry_N]

    def array_names(self, group: int) -> list[str]:
        """Of the encoder's arrays."""
        return [name for number, name in self.places if number == group and name != SAMPLE]

    def counts(self) -> dict[AnswerId, int]:
        """At most: some of them may be left out."""
        found: dict[AnswerId, int] = {}
        for part in (part for group in self.groups for part in group.parts):
            entries = self.entry_N[part.first : part.end]
            for entry, count in enumerate(np.bincount(entries, minlength=len(self.stream_E))):
                if count:
                    answer = (int(self.stream_E[entry]), int(self.choice_E[entry]))
                    found[answer] = found.get(answer, 0) + int(count) * len(part.points)
        return found

    def positions(self, message: StagedRows) -> NDArray[np.int64]:
        first_E = np.frombuffer(message.firsts, np.int64)
        return first_E[self.entry_N] + self.within_N

    def rows(
        self, message: StagedRows, position_N: NDArray[np.int64], token_ids_N: NDArray[Any]
    ) -> NDArray[np.void]:
        """As they are stored."""
        entry_N, seen_E = self.entry_N, np.frombuffer(message.seen, np.int64)
        rows_N = np.zeros(len(entry_N), ROW)
        rows_N["stream"], rows_N["choice"] = self.stream_E[entry_N], self.choice_E[entry_N]
        rows_N["position"], rows_N["token_id"], rows_N["span"] = position_N, token_ids_N, 1
        rows_N["phase"] = position_N >= self.prompt_E[entry_N]
        rows_N["flags"] = position_N < seen_E[entry_N]
        if message.media:
            rows_N["flags"] |= np.frombuffer(message.media, np.uint8) << MEDIA_SHIFT
        return rows_N


def count_layout_rows(message: StagingLayout) -> dict[AnswerId, int]:
    """Rows of each answer in a step of this layout: tokens times the points it wants."""
    return _Layout(message).counts()


class StagedBatch:
    """What one message announces. It is on its way until `wait` returns, and read before `free`."""

    def __init__(self, message: StagedMessage, arena: StagingArena, wait: Wait) -> None:
        self.nbytes, self.wait = message.nbytes, wait
        self._start, self._end, self._arena = message.start, message.end, arena

    def counts(self) -> Mapping[AnswerId, int]:
        """Rows of each answer."""
        return {}

    def scores(self) -> Sequence[tuple[HeldTokens, float | None]]:
        """The highest score of tokens that decide about held rows; None if it is not known."""
        return ()

    def rows(self) -> Sequence[EncodedRows]:
        return ()

    def samples(self) -> Sequence[tuple[Encoder, FidelitySample]]:
        return ()

    def free(self) -> None:
        """Nobody reads the memory any more."""
        self._arena.free(self._end)

    def _array(self, start: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        first = self._start + start
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if first + nbytes > self._arena.nbytes:
            raise ValueError(f"bytes {first} to {first + nbytes} of {self._arena.nbytes}")
        return self._arena.memory[first : first + nbytes].view(dtype).reshape(shape)


class _RowBatch(StagedBatch):
    def __init__(
        self, layout: _Layout, message: StagedRows, arena: StagingArena, wait: Wait
    ) -> None:
        super().__init__(message, arena, wait)
        self._layout, self._message = layout, message

    def counts(self) -> Mapping[AnswerId, int]:
        return self._layout.counts()

    def rows(self) -> Sequence[EncodedRows]:
        if self._layout.is_ahead:
            return self._wanted_rows()
        position_N = self._layout.positions(self._message)
        if not np.array_equal(self._place(WHOLE_STEP, "position"), position_N):
            raise RuntimeError(
                "the forward pass read other positions than the batch was laid out for; "
                "these rows belong to no request: please report this"
            )
        rows_N = self._layout.rows(self._message, position_N, self._place(WHOLE_STEP, "token"))
        return self._all_rows(rows_N)

    def _all_rows(self, rows_N: NDArray[np.void]) -> list[EncodedRows]:
        groups = range(len(self._layout.groups))
        return [encoded for group in groups for encoded in self._group_rows(group, rows_N)]

    def _wanted_rows(self) -> Sequence[EncodedRows]:
        """Those of a step that was selected before it was known which rows are wanted."""
        layout = self._layout
        position_N = self._place(WHOLE_STEP, "position")
        low_N, high_N = layout.low_E[layout.entry_N], layout.high_E[layout.entry_N]
        is_wanted_N = self._place(WHOLE_STEP, IS_KEPT) & (low_N <= position_N)
        is_wanted_N &= position_N < high_N
        rows_N = layout.rows(self._message, position_N, self._place(WHOLE_STEP, "token"))
        found = list[EncodedRows]()
        parts = [part for group in layout.groups for part in group.parts]
        for part, encoded in zip(parts, self._all_rows(rows_N), strict=True):
            indices = np.flatnonzero(is_wanted_N[part.first : part.end])
            if len(indices):
                found.append(encoded.select(indices))
        return found

    def _place(self, group: int, name: str) -> NDArray[Any]:
        place = self._layout.places[group, name]
        return self._array(place.start, place.dtype, place.shape)

    def _group_rows(self, group: int, rows_N: NDArray[np.void]) -> Sequence[EncodedRows]:
        encoder, found, first = self._layout.encoders[group], list[EncodedRows](), 0
        for part in self._layout.groups[group].parts:
            num_points, num_tokens = len(part.points), part.end - part.first
            end = first + num_points * num_tokens
            arrays = {
                name.removeprefix(ROWS): self._place(group, name)[first:end].reshape(
                    num_points, num_tokens, -1
                )
                for name in self._layout.array_names(group)
            }
            rows = rows_N[part.first : part.end]
            found.append(EncodedRows(encoder, part.points, part.to, rows, arrays))
            first = end
        return found

    def samples(self) -> Sequence[tuple[Encoder, FidelitySample]]:
        return [(one, self._sample(group)) for group, one in enumerate(self._layout.encoders)]

    def _sample(self, group: int) -> FidelitySample:
        sample_K = self._layout.samples[group]
        encoded = {
            name.removeprefix(ROWS): self._place(group, name)[sample_K]
            for name in self._layout.array_names(group)
        }
        rows_KD = widen(self._place(group, SAMPLE).copy(), self._layout.dtype)
        return FidelitySample(rows_KD, encoded)


class _ScoreBatch(StagedBatch):
    def __init__(self, message: StagedScores, arena: StagingArena, wait: Wait) -> None:
        super().__init__(message, arena, wait)
        self._message = message

    def scores(self) -> Sequence[tuple[HeldTokens, float | None]]:
        return [(held, self._highest(held)) for held in self._message.held]

    def _highest(self, held: HeldTokens) -> float | None:
        probes = self._message.probes
        if held.probe not in probes or held.end <= held.first:
            return None
        num_tokens, end = self._message.num_tokens, held.end
        scores_PT = self._array(0, "float32", (len(probes), num_tokens))
        if self._message.num_requests:
            shape = (self._message.num_requests,)
            rejected_R = self._array(4 * len(probes) * num_tokens, "int32", shape)
            end -= int(rejected_R[held.request])
        scores_T = scores_PT[probes.index(held.probe), held.first : end]
        # fmax ignores NaN: a score that is no number is below every threshold.
        return float(np.fmax.reduce(scores_T))


class StagingReader:
    """Takes the messages in the order in which the engine sent them."""

    def __init__(self, arena: StagingArena) -> None:
        self._arena = arena
        self._layout: _Layout | None = None

    def set_layout(self, message: StagingLayout) -> None:
        """For all rows up to the next layout."""
        self._layout = _Layout(message)

    def open(self, message: StagedMessage, wait: Wait) -> StagedBatch:
        """Rows or scores; they are there when `wait` returns."""
        if isinstance(message, StagedScores):
            return _ScoreBatch(message, self._arena, wait)
        if self._layout is None or message.plan != self._layout.number:
            raise ValueError(
                f"message {message.number} uses layout {message.plan}, which was not sent"
            )
        return _RowBatch(self._layout, message, self._arena, wait)
