"""Takes a plan, a ticket and the arena; gives the ticket's rows, as the collector wants them.

N = wanted tokens, M = rows of one encoder (tokens times points), E = ranges of positions, P =
points, K = rows of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.capture import tickets
from clairai.capture.arena import Arena
from clairai.capture.taken import Load, Sample, Seat, Taken, Verdict
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.raw import widened
from clairai.store.codecs.registry import named

Wait = Callable[[], None]
WHOLE: Final = -1  # the group of what concerns the whole ticket
SAMPLE: Final = "sample"
ROWS: Final = "rows."  # what the encoder's arrays are called


class Plan:
    """A plan as it was told, read once for all of its tickets."""

    def __init__(self, told: tickets.Plan) -> None:
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

    def counts(self) -> dict[Seat, int]:
        """Rows of each answer: tokens times the points it wants."""
        found: dict[Seat, int] = {}
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
        rows_N = np.zeros(len(entry_N), wire.ROW)
        rows_N["stream"], rows_N["choice"] = self.stream_E[entry_N], self.choice_E[entry_N]
        rows_N["position"], rows_N["token_id"], rows_N["span"] = position_N, token_ids_N, 1
        rows_N["phase"] = position_N >= self.prompt_E[entry_N]
        rows_N["flags"] = position_N < seen_E[entry_N]
        return rows_N


class _Region:
    """What is in the arena, or on its way there."""

    def __init__(self, told: tickets.Row, arena: Arena, wait: Wait) -> None:
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


class Landed(_Region):
    """Rows of a ticket."""

    def __init__(self, plan: Plan, told: tickets.Ticket, arena: Arena, wait: Wait) -> None:
        super().__init__(told, arena, wait)
        self._plan = plan
        self._first_E = np.frombuffer(told.firsts, np.int64)
        self._seen_E = np.frombuffer(told.seen, np.int64)

    def counts(self) -> Mapping[Seat, int]:
        return self._plan.counts()

    def verdicts(self) -> Sequence[Verdict]:
        return ()

    def loads(self) -> Sequence[Load]:
        plan = self._plan
        position_N = self._first_E[plan.entry_N] + plan.within_N
        if not np.array_equal(self._field(WHOLE, "position"), position_N):
            raise RuntimeError(
                "the forward read other positions than the batch was laid out for; "
                "these rows are nobody's: please report this"
            )
        rows_N = plan.rows(position_N, self._field(WHOLE, "token"), self._seen_E)
        return [load for at in range(len(plan.groups)) for load in self._loads(at, rows_N)]

    def _field(self, group: int, name: str) -> NDArray[Any]:
        one = self._plan.fields[group, name]
        return self._array(one.start, one.dtype, one.shape)

    def _loads(self, at: int, rows_N: NDArray[np.void]) -> Sequence[Load]:
        encoder, loads, first = self._plan.encoders[at], list[Load](), 0
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
            loads.append(Load(encoder, part.points, part.to, rows, arrays))
            first = end
        return loads

    def samples(self) -> Sequence[tuple[Encoder, Sample]]:
        return [(encoder, self._sample(at)) for at, encoder in enumerate(self._plan.encoders)]

    def _sample(self, at: int) -> Sample:
        sample_K = self._plan.samples[at]
        encoded = {
            name.removeprefix(ROWS): self._field(at, name)[sample_K]
            for name in self._plan.names(at)
        }
        return Sample(widened(self._field(at, SAMPLE).copy(), self._plan.dtype), encoded)


class Scored(_Region):
    """Scores of the tokens of answers whose rows wait for them."""

    def __init__(self, told: tickets.Scores, arena: Arena, wait: Wait) -> None:
        super().__init__(told, arena, wait)
        self._told = told

    def counts(self) -> Mapping[Seat, int]:
        return {}

    def verdicts(self) -> Sequence[Verdict]:
        return [
            Verdict((one.stream, one.choice), one.probe, one.threshold, self._highest(one))
            for one in self._told.held
        ]

    def _highest(self, held: tickets.Held) -> float | None:
        told = self._told
        if held.probe not in told.probes or held.end <= held.first:
            return None
        scores_PT = self._array(0, "float32", (len(told.probes), told.num_tokens))
        scores_T = scores_PT[told.probes.index(held.probe), held.first : held.end]
        # A score that is no number is below every threshold.
        return float(np.fmax.reduce(scores_T))

    def loads(self) -> Sequence[Load]:
        return ()

    def samples(self) -> Sequence[tuple[Encoder, Sample]]:
        return ()


class Reader:
    """Takes plans and tickets in the order in which they were told."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._plan: Plan | None = None

    def plan(self, told: tickets.Plan) -> None:
        """For all tickets up to the next plan."""
        self._plan = Plan(told)

    def taken(self, told: tickets.Row, wait: Wait) -> Taken:
        if isinstance(told, tickets.Scores):
            return Scored(told, self._arena, wait)
        if self._plan is None or told.plan != self._plan.number:
            raise ValueError(f"ticket {told.number} is of plan {told.plan}, which was not told")
        return Landed(self._plan, told, self._arena, wait)
