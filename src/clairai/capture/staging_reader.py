"""Takes nothing of ours; gives the form in which rows come from a device, on their way to a disk.

N = tokens, P = points, K = rows of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from clairai.capture import pipe_messages
from clairai.capture.staging_arena import StagingArena
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import widen
from clairai.store.codecs.registry import named
from clairai.wire import ring_messages

AnswerId = tuple[int, int]  # stream and choice


@dataclass(frozen=True)
class RuleScore:
    """The highest score of some tokens of a request whose rows wait for it; None: not known."""

    seat: AnswerId
    probe: str
    threshold: float
    score: float | None


@dataclass(frozen=True, eq=False)
class FidelitySample:
    """Some rows as they were before they were encoded."""

    rows_KD: NDArray[np.float32]
    encoded: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class EncodedRows:
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

    def counts(self) -> dict[AnswerId, int]:
        """Rows of each answer."""
        return {seat: len(at) * len(self.points) for seat, at in group_by_answer(self.rows_N)}

    @staticmethod
    def joined(loads: Sequence[EncodedRows]) -> EncodedRows:
        """All of their rows, in memory of their own."""
        first = loads[0]
        arrays = {
            name: np.concatenate([load.arrays[name] for load in loads], axis=1)
            for name in first.arrays
        }
        rows_N = np.concatenate([load.rows_N for load in loads])
        return EncodedRows(first.encoder, first.points, first.to, rows_N, arrays)


class StagedBatch(Protocol):
    """Rows of one step, or a part of it; on their way until `wait` returns."""

    @property
    def nbytes(self) -> int: ...

    def wait(self) -> None: ...

    def verdicts(self) -> Sequence[RuleScore]: ...

    def loads(self) -> Sequence[EncodedRows]: ...

    def samples(self) -> Sequence[tuple[Encoder, FidelitySample]]: ...

    def counts(self) -> Mapping[AnswerId, int]:
        """Rows of each answer."""

    def free(self) -> None:
        """Nobody reads its memory any more."""


def group_by_answer(
    rows_N: NDArray[np.void], places: NDArray[np.intp] | None = None
) -> list[tuple[AnswerId, NDArray[np.intp]]]:
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


# MERGED
# Takes a plan, a ticket and the arena; gives the ticket's rows, as the collector wants them.
#
# N = wanted tokens, M = rows of one encoder (tokens times points), E = ranges of positions, P =
# points, K = rows of a sample.


Wait = Callable[[], None]
WHOLE_STEP: Final = -1  # the group of what concerns the whole ticket
SAMPLE: Final = "sample"
ROWS: Final = "rows."  # what the encoder's arrays are called


class StagingPlanReader:
    """A plan as it was told, read once for all of its tickets."""

    def __init__(self, told: pipe_messages.StagingPlanMessage) -> None:
        self.number, self.dtype = told.number, told.dtype
        self.fields = {(one.group, one.name): one for one in told.fields}
        self.groups = told.groups
        self.encoders = [named(one.encoder, dict(one.parameters)) for one in told.groups]
        self.samples = [np.frombuffer(one.sample, np.int64) for one in told.groups]
        count_E = np.frombuffer(told.counts, np.int64)
        self.stream_E = np.frombuffer(told.streams, np.uint64)
        self.choice_E = np.frombuffer(told.choices, np.uint16)
        self.prompt_E = np.frombuffer(told.prompts, np.int64)
        self.entry_N = np.repeat(np.arange(len(count_E)), count_E)
        # The nth row of a range is n after its first.
        self.within_N = np.arange(len(self.entry_N)) - (np.cumsum(count_E) - count_E)[self.entry_N]

    def names(self, group: int) -> list[str]:
        """Of the encoder's arrays."""
        return [name for number, name in self.fields if number == group and name != SAMPLE]

    def counts(self) -> dict[AnswerId, int]:
        """Rows of each answer: tokens times the points it wants."""
        found: dict[AnswerId, int] = {}
        for part in (part for group in self.groups for part in group.parts):
            entries = self.entry_N[part.first : part.end]
            for entry, count in enumerate(np.bincount(entries, minlength=len(self.stream_E))):
                if count:
                    seat = (int(self.stream_E[entry]), int(self.choice_E[entry]))
                    found[seat] = found.get(seat, 0) + int(count) * len(part.points)
        return found

    def rows(
        self, position_N: NDArray[np.int64], token_ids_N: NDArray[Any], seen_E: NDArray[np.int64]
    ) -> NDArray[np.void]:
        """As they are stored."""
        entry_N = self.entry_N
        rows_N = np.zeros(len(entry_N), ring_messages.ROW)
        rows_N["stream"], rows_N["choice"] = self.stream_E[entry_N], self.choice_E[entry_N]
        rows_N["position"], rows_N["token_id"], rows_N["span"] = position_N, token_ids_N, 1
        rows_N["phase"] = position_N >= self.prompt_E[entry_N]
        rows_N["flags"] = position_N < seen_E[entry_N]
        return rows_N


class _StagedRegion:
    """What is in the arena, or on its way there."""

    def __init__(self, told: pipe_messages.StagedMessage, arena: StagingArena, wait: Wait) -> None:
        self.number, self.nbytes = told.number, told.nbytes
        self._start, self._end = told.start, told.end
        self._arena, self.wait = arena, wait

    def _array(self, start: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        first = self._start + start
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if first + nbytes > self._arena.nbytes:
            raise ValueError(f"bytes {first} to {first + nbytes} of {self._arena.nbytes}")
        return self._arena.memory[first : first + nbytes].view(dtype).reshape(shape)

    def free(self) -> None:
        self._arena.free(self._end)


class RowsReader(_StagedRegion):
    """Rows of a ticket."""

    def __init__(
        self,
        plan: StagingPlanReader,
        told: pipe_messages.StagedRows,
        arena: StagingArena,
        wait: Wait,
    ) -> None:
        super().__init__(told, arena, wait)
        self._plan = plan
        self._first_E = np.frombuffer(told.firsts, np.int64)
        self._seen_E = np.frombuffer(told.seen, np.int64)

    def counts(self) -> Mapping[AnswerId, int]:
        return self._plan.counts()

    def verdicts(self) -> Sequence[RuleScore]:
        return ()

    def loads(self) -> Sequence[EncodedRows]:
        plan = self._plan
        position_N = self._first_E[plan.entry_N] + plan.within_N
        if not np.array_equal(self._field(WHOLE_STEP, "position"), position_N):
            raise RuntimeError(
                "the forward read other positions than the batch was laid out for; "
                "these rows are nobody's: please report this"
            )
        rows_N = plan.rows(position_N, self._field(WHOLE_STEP, "token"), self._seen_E)
        return [load for at in range(len(plan.groups)) for load in self._loads(at, rows_N)]

    def _field(self, group: int, name: str) -> NDArray[Any]:
        one = self._plan.fields[group, name]
        return self._array(one.start, one.dtype, one.shape)

    def _loads(self, at: int, rows_N: NDArray[np.void]) -> Sequence[EncodedRows]:
        encoder, loads, first = self._plan.encoders[at], list[EncodedRows](), 0
        for part in self._plan.groups[at].parts:
            num_points, num_rows = len(part.points), part.end - part.first
            end = first + num_points * num_rows
            arrays = {
                name.removeprefix(ROWS): self._field(at, name)[first:end].reshape(
                    num_points, num_rows, -1
                )
                for name in self._plan.names(at)
            }
            rows = rows_N[part.first : part.end]
            loads.append(EncodedRows(encoder, part.points, part.to, rows, arrays))
            first = end
        return loads

    def samples(self) -> Sequence[tuple[Encoder, FidelitySample]]:
        return [(encoder, self._sample(at)) for at, encoder in enumerate(self._plan.encoders)]

    def _sample(self, at: int) -> FidelitySample:
        sample_K = self._plan.samples[at]
        encoded = {
            name.removeprefix(ROWS): self._field(at, name)[sample_K]
            for name in self._plan.names(at)
        }
        return FidelitySample(widen(self._field(at, SAMPLE).copy(), self._plan.dtype), encoded)


class ScoresReader(_StagedRegion):
    """Scores of the tokens of answers whose rows wait for them."""

    def __init__(self, told: pipe_messages.StagedScores, arena: StagingArena, wait: Wait) -> None:
        super().__init__(told, arena, wait)
        self._told = told

    def counts(self) -> Mapping[AnswerId, int]:
        return {}

    def verdicts(self) -> Sequence[RuleScore]:
        return [
            RuleScore((one.stream, one.choice), one.probe, one.threshold, self._highest(one))
            for one in self._told.held
        ]

    def _highest(self, held: pipe_messages.HeldTokens) -> float | None:
        told = self._told
        if held.probe not in told.probes or held.end <= held.first:
            return None
        scores_PT = self._array(0, "float32", (len(told.probes), told.num_tokens))
        scores_T = scores_PT[told.probes.index(held.probe), held.first : held.end]
        # A score that is no number is below every threshold.
        return float(np.fmax.reduce(scores_T))

    def loads(self) -> Sequence[EncodedRows]:
        return ()

    def samples(self) -> Sequence[tuple[Encoder, FidelitySample]]:
        return ()


class StagingReader:
    """Takes plans and tickets in the order in which they were told."""

    def __init__(self, arena: StagingArena) -> None:
        self._arena = arena
        self._plan: StagingPlanReader | None = None

    def plan(self, told: pipe_messages.StagingPlanMessage) -> None:
        """For all tickets up to the next plan."""
        self._plan = StagingPlanReader(told)

    def taken(self, told: pipe_messages.StagedMessage, wait: Wait) -> StagedBatch:
        if isinstance(told, pipe_messages.StagedScores):
            return ScoresReader(told, self._arena, wait)
        if self._plan is None or told.plan != self._plan.number:
            raise ValueError(f"ticket {told.number} is of plan {told.plan}, which was not told")
        return RowsReader(self._plan, told, self._arena, wait)
