"""Takes how an answer ended and the rules it was asked with; gives the probe that stopped it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from clairai.match.choice_scores import (
    ChoiceScores,
    PromptRows,
    ScoreColumns,
    ScoreRow,
    ScoreSlice,
    Values,
    make_slice,
)
from clairai.proxy.completions.chunk import ChoiceView, ChunkView, RequestEcho, read_echo
from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.proxy.observe.observer import ChoiceResult, ProbeResult
from clairai.proxy.upstream import NotSteered
from clairai.wire import ring_messages

# What the engine writes as stop_reason: docs/api.md.
_STOPPED: Final = re.compile(r"clairai: probe (\S+) >= \S+ for \d+ tokens?")


def find_stopping_probe(
    rules: Sequence[Any], finish_reason: str | None, stop_reason: str | int | None
) -> str | None:
    """None if it ended otherwise: a client's own stop text may read like ours, a rule is asked."""
    if finish_reason != "stop" or not isinstance(stop_reason, str):
        return None
    found = _STOPPED.fullmatch(stop_reason)
    names = {rule.get("probe") for rule in rules if isinstance(rule, dict)}
    return found[1] if found is not None and found[1] in names else None


# MERGED
# Takes the rows of an answer as they are told; gives each probe's mean, highest and crossings.


class _ProbeSummary:
    """One probe."""

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self.count = self.above = 0
        self.total = 0.0
        self.max: float | None = None
        self.argmax: int | None = None

    def add(self, index: int, value: float) -> None:
        self.count += 1
        self.total += value
        if self.max is None or value > self.max:
            self.max, self.argmax = value, index
        if self.threshold is not None and value >= self.threshold:
            self.above += 1

    def result(self, name: str) -> ProbeResult:
        mean = self.total / self.count if self.count else None
        above = None if self.threshold is None else self.above
        return ProbeResult(name, mean, self.max, self.argmax, above, self.threshold)


class ScoreSummary:
    """One answer."""

    def __init__(self) -> None:
        self.count = 0  # tokens with a row
        self.lost = 0
        self._sums: dict[str, _ProbeSummary] = {}

    def add(self, start: int, rows: Iterable[ScoreRow | None]) -> None:
        """`rows` are those of the tokens from `start` on; None is a lost one."""
        for index, row in enumerate(rows, start):
            if row is None:
                self.lost += 1
                continue
            self.count += 1
            columns = row.columns
            for name, threshold, value in zip(
                columns.names, columns.thresholds, row.values, strict=True
            ):
                if value is not None:
                    self._sum(name, threshold).add(index, value)

    def results(self, names: Iterable[str]) -> tuple[ProbeResult, ...]:
        """In the order of `names`, those that were never scored too."""
        nothing = _ProbeSummary(None)
        return tuple(self._sums.get(name, nothing).result(name) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sums)

    def _sum(self, name: str, threshold: float | None) -> _ProbeSummary:
        if name not in self._sums:
            self._sums[name] = _ProbeSummary(threshold)
        return self._sums[name]


# MERGED
# Takes one request's tokens from upstream and rows from the ring; gives what can be told of both.
#
# Lives on the event loop. Rows find their sheet by the stream id that was minted for it, and by
# nothing else.


class RowBatch(NamedTuple):
    """Neighbouring rows of one choice, as plain lists; no scores where `phase` is a mark's."""

    stream: int
    choice: int
    bank: ring_messages.Bank
    positions: list[int]
    token_ids: list[int]
    phases: list[int]
    spans: list[int]
    scores: list[Values]


@dataclass
class ScoreBudget:
    """What all sheets hold together."""

    limit: int
    held: int = 0

    @property
    def has_room(self) -> bool:
        return self.held < self.limit


class RequestScores:
    """`is_attached()` tells whether rows can come at all; `names` are used until a bank is known.

    `max_scores` bounds what is held for a client that does not keep up, and `store` what is held
    for all of them; rows over either are lost.
    """

    def __init__(
        self,
        stream: int,
        asked: ClairaiOptions,
        *,
        max_scores: int,
        store: ScoreBudget,
        is_attached: Callable[[], bool],
        names: Sequence[str] = (),
        needs_echo: bool = False,
    ) -> None:
        self.stream = stream
        self.asked = asked
        self.response_id: str | None = None
        self.model: str | None = None
        self.prompt_ids: list[int] | None = None
        self.echo: msgspec.Raw | None = None  # what the engine says of this request
        self.told = RequestEcho()  # and what that is
        self.changed = asyncio.Event()  # a row came, or the ring went
        self.lost = 0  # rows that were told as lost, prompt included
        self._is_attached = is_attached
        self._is_echo_due = needs_echo  # an answer without it is none
        self._max_scores = max_scores
        self._store = store
        self._held = 0
        self._lanes: dict[int, ChoiceScores] = {}
        self._summaries: dict[int, ScoreSummary] = {}
        self._prompt = PromptRows() if asked.prompt_scores else None
        self._names = asked.names or tuple(names)
        self._bank: ring_messages.Bank | None = None
        self._columns = ScoreColumns((), ())
        self._picked: list[int | None] = []

    # From the ring

    def place(self, parcel: RowBatch) -> None:
        """Keep the rows of a parcel whose stream is this one's."""
        if parcel.bank is not self._bank:
            self._read_bank(parcel.bank)
        for at, phase in enumerate(parcel.phases):
            position = parcel.positions[at]
            if phase == ring_messages.CACHED:
                self._place_cached(parcel.choice, position, parcel.spans[at])
            elif phase != ring_messages.FINISHED:
                row = self._row(parcel.token_ids[at], parcel.scores[at])
                self._place_row(parcel.choice, phase, position, row)
        self.changed.set()

    def _place_row(self, choice: int, phase: int, position: int, row: ScoreRow) -> None:
        has_room = self._held < self._max_scores and self._store.has_room
        kept = row if has_room else None
        if phase == ring_messages.DECODE:
            lane = self._lane(choice)
            before = lane.held
            lane.add_row(position, kept, first=self._first)
            self._charge(lane.held - before)
            if self._prompt is not None and choice == 0:
                self._prompt.end()
        elif self._prompt is not None and choice == 0:
            before = self._prompt.held
            self._prompt.add_row(position, kept)
            self._charge(self._prompt.held - before)

    def _charge(self, size: int) -> None:
        self._held += size
        self._store.held += size

    def close(self) -> None:
        """Nobody takes anything from it any more."""
        self._charge(-self._held)

    def _place_cached(self, choice: int, position: int, span: int) -> None:
        if self._prompt is not None and choice == 0:
            self._prompt.add_cached(position, span)

    def _row(self, token_id: int, values: Values) -> ScoreRow:
        if self.asked.names is not None:
            values = [None if column is None else values[column] for column in self._picked]
        return ScoreRow(token_id, self._columns, values)

    def _read_bank(self, bank: ring_messages.Bank) -> None:
        held = {info.name: at for at, info in enumerate(bank.probes)}
        names = tuple(held) if self.asked.names is None else self.asked.names
        self._picked = [held.get(name) for name in names]
        thresholds = [None if at is None else bank.probes[at].threshold for at in self._picked]
        self._bank, self._names = bank, names
        self._columns = ScoreColumns(names, tuple(thresholds), bank.weights)

    # From upstream

    def read_head(self, view: ChunkView) -> None:
        """What a chunk says of the whole answer; the prompt says where generated tokens begin."""
        self.response_id = self.response_id or view.id
        self.model = self.model or view.model
        if self.prompt_ids is None:
            self.prompt_ids = view.prompt
        if self.echo is None and view.echo is not None:
            self.echo = view.echo.copy()
            self.told = read_echo(self.echo)
        if self._is_echo_due and not self.told.is_bound and view.choices:
            raise NotSteered

    def read_choice(self, view: ChoiceView) -> int:
        """What a chunk says of one choice; the index of its first token."""
        lane = self._lane(view.index)
        start = lane.tokens
        lane.add_tokens(view.token_ids or ())
        if view.finish_reason is not None:
            lane.finish_reason, lane.stop_reason = view.finish_reason, view.stop_reason
        return start

    def finish(self, choice: int, reason: str) -> None:
        self._lane(choice).finish_reason = reason

    # To the client

    def is_complete(self, choice: int) -> bool:
        """Whether waiting could bring no row of this choice that is not here."""
        if self._first is None or not self._is_attached():
            return True
        is_prompt_due = choice == 0 and self._prompt is not None and not self._prompt.is_told
        if is_prompt_due and not self._is_prompt_ready():
            return False
        return self._lane(choice).is_complete(self._first)

    def take(self, choice: int) -> ScoreSlice | None:
        """The scores that can be told now, all that are left if the choice has finished."""
        lane = self._lane(choice)
        start, before = lane.told, lane.held
        is_final = lane.finish_reason is not None
        # Without the prompt's length no position is known, and no row can be told.
        first = self._first if self._first is not None else 1 << 62
        is_cut_off_from_rows = self._first is None or not self._is_attached()
        rows = lane.take(first, is_final=is_final, is_cut_off_from_rows=is_cut_off_from_rows)
        self._charge(lane.held - before)
        if rows is None:
            return None
        self._summary(choice).add(start, rows)
        return self._noted(make_slice(rows, start, lane.told - start, self._names))

    def take_prompt(self, *, is_final: bool) -> ScoreSlice | None:
        """The prompt's scores, once: when all are here, or none can come any more."""
        prompt = self._prompt
        if prompt is None or prompt.is_told or self.prompt_ids is None:
            return None
        if not is_final and self._is_attached() and not self._is_prompt_ready():
            return None
        before = prompt.held
        rows, lost = prompt.take(self.prompt_ids)
        self._charge(-before)
        return self._noted(make_slice(rows, 0, len(rows), self._names)._replace(lost=lost))

    def results(self) -> tuple[ChoiceResult, ...]:
        """What became of each choice."""
        return tuple(self.result(choice) for choice in sorted(self._lanes))

    def result(self, choice: int) -> ChoiceResult:
        lane, summary = self._lane(choice), self._summary(choice)
        names = tuple(dict.fromkeys((*self._names, *summary.names)))
        return ChoiceResult(
            choice,
            lane.tokens,
            summary.count,
            summary.lost,
            lane.finish_reason,
            summary.results(names),
            lane.stop_reason,
            find_stopping_probe(self.asked.stop, lane.finish_reason, lane.stop_reason),
        )

    @property
    def mismatched(self) -> int:
        """Rows that carried another token than the request had there; told to nobody."""
        prompt = 0 if self._prompt is None else self._prompt.mismatched
        return prompt + sum(lane.mismatched for lane in self._lanes.values())

    @property
    def choices(self) -> tuple[int, ...]:
        return tuple(sorted(self._lanes))

    @property
    def ended(self) -> frozenset[int]:
        """Choices that upstream has ended."""
        lanes = self._lanes.items()
        return frozenset(choice for choice, lane in lanes if lane.finish_reason is not None)

    @property
    def is_expecting(self) -> bool:
        """Whether a choice that goes on has tokens whose rows can still come."""
        return any(not self.is_complete(choice) for choice in self._lanes.keys() - self.ended)

    @property
    def _first(self) -> int | None:
        return None if self.prompt_ids is None else len(self.prompt_ids)

    def _is_prompt_ready(self) -> bool:
        assert self._prompt is not None
        return self.prompt_ids is not None and self._prompt.is_complete(len(self.prompt_ids))

    def _noted(self, made: ScoreSlice) -> ScoreSlice:
        self.lost += len(made.lost)
        return made

    def _lane(self, choice: int) -> ChoiceScores:
        if choice not in self._lanes:
            self._lanes[choice] = ChoiceScores()
            self._summaries[choice] = ScoreSummary()
        return self._lanes[choice]

    def _summary(self, choice: int) -> ScoreSummary:
        return self._summaries[choice]
