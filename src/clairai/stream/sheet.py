"""Takes one request's tokens from upstream and rows from the ring; gives what can be told of both.

Lives on the event loop. Rows find their sheet by the stream id that was minted for it, and by
nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from clairai import wire
from clairai.stream.asked import Asked
from clairai.stream.chunk import ChoiceView, ChunkView, Echo, read_echo
from clairai.stream.lane import Columns, Lane, Row, Slice, Values, cut
from clairai.stream.observe import ChoiceResult
from clairai.stream.prompt import PromptRows
from clairai.stream.stopping import stopped_by
from clairai.stream.summary import Summary
from clairai.stream.upstream import NotSteered


class Parcel(NamedTuple):
    """Neighbouring rows of one choice, as plain lists; no scores where `phase` is a mark's."""

    stream: int
    choice: int
    bank: wire.Bank
    positions: list[int]
    token_ids: list[int]
    phases: list[int]
    spans: list[int]
    scores: list[Values]


@dataclass
class Store:
    """What all sheets hold together."""

    limit: int
    held: int = 0

    @property
    def has_room(self) -> bool:
        return self.held < self.limit


class Sheet:
    """`is_attached()` tells whether rows can come at all; `names` are used until a bank is known.

    `max_scores` bounds what is held for a client that does not keep up, and `store` what is held
    for all of them; rows over either are lost.
    """

    def __init__(
        self,
        stream: int,
        asked: Asked,
        *,
        max_scores: int,
        store: Store,
        is_attached: Callable[[], bool],
        names: Sequence[str] = (),
        is_echo_due: bool = False,
    ) -> None:
        self.stream = stream
        self.asked = asked
        self.response_id: str | None = None
        self.model: str | None = None
        self.prompt_ids: list[int] | None = None
        self.echo: msgspec.Raw | None = None  # what the engine says of this request
        self.told = Echo()  # and what that is
        self.changed = asyncio.Event()  # a row came, or the ring went
        self.lost = 0  # rows that were told as lost, prompt included
        self._is_attached = is_attached
        self._is_echo_due = is_echo_due  # an answer without it is none
        self._max_scores = max_scores
        self._store = store
        self._held = 0
        self._lanes: dict[int, Lane] = {}
        self._summaries: dict[int, Summary] = {}
        self._prompt = PromptRows() if asked.prompt_scores else None
        self._names = asked.names or tuple(names)
        self._bank: wire.Bank | None = None
        self._columns = Columns((), ())
        self._picked: list[int | None] = []

    # From the ring

    def place(self, parcel: Parcel) -> None:
        """Keep the rows of a parcel whose stream is this one's."""
        if parcel.bank is not self._bank:
            self._read_bank(parcel.bank)
        for at, phase in enumerate(parcel.phases):
            position = parcel.positions[at]
            if phase == wire.CACHED:
                self._place_cached(parcel.choice, position, parcel.spans[at])
            elif phase != wire.FINISHED:
                row = self._row(parcel.token_ids[at], parcel.scores[at])
                self._place_row(parcel.choice, phase, position, row)
        self.changed.set()

    def _place_row(self, choice: int, phase: int, position: int, row: Row) -> None:
        has_room = self._held < self._max_scores and self._store.has_room
        kept = row if has_room else None
        if phase == wire.DECODE:
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

    def _row(self, token_id: int, values: Values) -> Row:
        if self.asked.names is not None:
            values = [None if column is None else values[column] for column in self._picked]
        return Row(token_id, self._columns, values)

    def _read_bank(self, bank: wire.Bank) -> None:
        held = {info.name: at for at, info in enumerate(bank.probes)}
        names = tuple(held) if self.asked.names is None else self.asked.names
        self._picked = [held.get(name) for name in names]
        thresholds = [None if at is None else bank.probes[at].threshold for at in self._picked]
        self._bank, self._names = bank, names
        self._columns = Columns(names, tuple(thresholds), bank.weights)

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

    def take(self, choice: int) -> Slice | None:
        """The scores that can be told now, all that are left if the choice has finished."""
        lane = self._lane(choice)
        start, before = lane.told, lane.held
        is_final = lane.finish_reason is not None
        # Without the prompt's length no position is known, and no row can be told.
        first = self._first if self._first is not None else 1 << 62
        is_hopeless = self._first is None or not self._is_attached()
        rows = lane.take(first, is_final=is_final, is_hopeless=is_hopeless)
        self._charge(lane.held - before)
        if rows is None:
            return None
        self._summary(choice).add(start, rows)
        return self._noted(cut(rows, start, lane.told - start, self._names))

    def take_prompt(self, *, is_final: bool) -> Slice | None:
        """The prompt's scores, once: when all are here, or none can come any more."""
        prompt = self._prompt
        if prompt is None or prompt.is_told or self.prompt_ids is None:
            return None
        if not is_final and self._is_attached() and not self._is_prompt_ready():
            return None
        before = prompt.held
        rows, lost = prompt.take(self.prompt_ids)
        self._charge(-before)
        return self._noted(cut(rows, 0, len(rows), self._names)._replace(lost=lost))

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
            stopped_by(self.asked.stop, lane.finish_reason, lane.stop_reason),
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

    def _noted(self, made: Slice) -> Slice:
        self.lost += len(made.lost)
        return made

    def _lane(self, choice: int) -> Lane:
        if choice not in self._lanes:
            self._lanes[choice] = Lane()
            self._summaries[choice] = Summary()
        return self._lanes[choice]

    def _summary(self, choice: int) -> Summary:
        return self._summaries[choice]
