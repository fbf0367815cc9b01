"""The scores of one request in the proxy: tokens from upstream joined with rows from the ring.

Runs in: the proxy, on the event loop. A row reaches its request by the stream id that the proxy
made for it, and by nothing else.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from clairai.match.choice_scores import (
    ChoiceScores,
    MediaSpan,
    PromptRows,
    ScoreColumns,
    ScoreRow,
    Values,
)
from clairai.proxy.completions.chunk import ChoiceView, ChunkView, RequestEcho, read_echo
from clairai.proxy.completions.completion_request import ClairaiOptions
from clairai.proxy.observe.observer import ChoiceResult, ProbeResult
from clairai.proxy.upstream import NotSteered
from clairai.wire import ring_messages

_ROWS_ADDED_UP: Final = 32
# What the engine writes as stop_reason: docs/api.md.
_STOPPED: Final = re.compile(r"clairai: probe (\S+) >= \S+ for \d+ tokens?")


class RowBatch(NamedTuple):
    """Consecutive rows of one choice, as plain lists; `scores` is empty for marks."""

    stream: int
    choice: int
    bank: ring_messages.Bank
    positions: list[int]
    token_ids: list[int]
    phases: list[int]
    spans: list[int]
    scores: list[Values]
    media: Sequence[int] = ()  # what each row stands for; empty: all are text


class ScoreSlice(NamedTuple):
    """The scores of consecutive tokens: `scores[j]` is of token `start + j`, all null if lost."""

    names: tuple[str, ...]
    start: int
    scores: list[Values]
    lost: tuple[int, ...]  # indices into `scores`
    weights: tuple[int, ...] = ()  # versions of the model's weights that the rows are of, in order
    media: tuple[MediaSpan, ...] = ()  # of a prompt: tokens that are no text

    def fields(self) -> dict[str, Any]:
        """The JSON fields of this slice."""
        fields: dict[str, Any] = {"names": self.names, "start": self.start, "scores": self.scores}
        if self.lost:
            fields["lost"] = len(self.lost)
        if self.weights:
            fields["weights"] = self.weights[0] if len(self.weights) == 1 else None
        if self.media:
            fields["media"] = describe_media(self.media)
        return fields

    def split(self, size: int) -> list[ScoreSlice]:
        """The same in slices of at most `size` tokens."""
        return [
            ScoreSlice(
                self.names,
                self.start + begin,
                self.scores[begin : begin + size],
                tuple(j - begin for j in self.lost if begin <= j < begin + size),
                self.weights,
                tuple(_cut_spans(self.media, self.start + begin, self.start + begin + size)),
            )
            for begin in range(0, len(self.scores), size)
        ]


def describe_media(spans: Iterable[MediaSpan]) -> list[dict[str, Any]]:
    """As `schema.PromptMedia` has it."""
    return [
        {"kind": ring_messages.MEDIA_NAMES[media], "start": start, "span": span}
        for media, start, span in spans
    ]


def _cut_spans(spans: Iterable[MediaSpan], begin: int, end: int) -> Iterator[MediaSpan]:
    """What of them lies from `begin` to before `end`."""
    for media, start, span in spans:
        first, last = max(start, begin), min(start + span, end)
        if first < last:
            yield MediaSpan(media, first, last - first)


def make_slice(
    rows: list[ScoreRow | None], start: int, count: int, names: tuple[str, ...]
) -> ScoreSlice:
    """Scores of `count` tokens from `start` on. A None row is lost, tokens past `rows` have none.

    `names` are the probes if there is no row to say it.
    """
    if count == 1 and rows and (row := rows[0]) is not None:  # the newest token's, as a rule
        columns = row.columns
        weights = () if columns.weights is None else (columns.weights,)
        return ScoreSlice(columns.names, start, [row.values], (), weights)
    found = [row for row in rows if row is not None]
    names = found[0].columns.names if found else names
    is_mixed = any(row.columns.names != names for row in found)  # the bank changed in between
    if is_mixed:
        names = tuple(dict.fromkeys(name for row in found for name in row.columns.names))
    empty: Values = [None] * len(names)
    scores = [
        empty if row is None else _values_of(row, names) if is_mixed else row.values for row in rows
    ]
    scores += [empty] * (count - len(rows))
    lost = tuple(index for index, row in enumerate(rows) if row is None)
    versions = dict.fromkeys(row.columns.weights for row in found)
    return ScoreSlice(names, start, scores, lost, tuple(v for v in versions if v is not None))


def _values_of(row: ScoreRow, names: tuple[str, ...]) -> Values:
    values = dict(zip(row.columns.names, row.values, strict=True))
    return [values.get(name) for name in names]


@dataclass
class _ProbeSummary:
    """One probe over the tokens of one choice."""

    threshold: float | None
    count: int = 0
    above: int = 0
    total: float = 0.0
    max: float | None = None
    argmax: int | None = None

    def add(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Add the scores of these tokens, in order."""
        self.count += len(values)
        self.total = sum(values, self.total)
        highest = max(values)
        if self.max is None or highest > self.max:
            self.max, self.argmax = highest, indices[values.index(highest)]
        if self.threshold is not None:
            self.above += sum(map(self.threshold.__le__, values))

    def result(self, name: str) -> ProbeResult:
        mean = self.total / self.count if self.count else None
        above = None if self.threshold is None else self.above
        return ProbeResult(name, mean, self.max, self.argmax, above, self.threshold)


class ScoreSummary:
    """Mean, maximum and crossings of each probe over one choice.

    Rows are added up a few at a time, probe by probe: that takes a fifth of the time. Without
    `has_probes` they are only counted.
    """

    def __init__(self, *, has_probes: bool = True) -> None:
        self._has_probes = has_probes
        self.count = 0  # tokens with a row
        self.lost = 0
        self._probes: dict[str, _ProbeSummary] = {}
        self._rows: list[ScoreRow] = []  # of one bank, and not added up yet
        self._indices: list[int] = []

    def add(self, start: int, rows: Iterable[ScoreRow | None]) -> None:
        """Add the rows of the tokens from `start` on; None is a lost one."""
        for index, row in enumerate(rows, start):
            if row is None:
                self.lost += 1
                continue
            self.count += 1
            if not self._has_probes:
                continue
            if self._rows and self._rows[0].columns is not row.columns:
                self._add_up()
            self._rows.append(row)
            self._indices.append(index)
            if len(self._rows) == _ROWS_ADDED_UP:
                self._add_up()

    def results(self, names: Iterable[str]) -> tuple[ProbeResult, ...]:
        """In the order of `names`, including probes that never had a score."""
        if not self._has_probes:
            return ()
        self._add_up()
        unscored = _ProbeSummary(None)
        return tuple(self._probes.get(name, unscored).result(name) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        self._add_up()
        return tuple(self._probes)

    def _add_up(self) -> None:
        rows, indices = self._rows, self._indices
        if not rows:
            return
        self._rows, self._indices = [], []
        columns = rows[0].columns
        by_probe = zip(*(row.values for row in rows), strict=True)
        for name, threshold, values in zip(
            columns.names, columns.thresholds, by_probe, strict=True
        ):
            if None not in values:
                self._probe(name, threshold).add(indices, values)
            elif scored := [at for at, value in enumerate(values) if value is not None]:
                kept = [values[at] for at in scored]
                self._probe(name, threshold).add([indices[at] for at in scored], kept)

    def _probe(self, name: str, threshold: float | None) -> _ProbeSummary:
        if name not in self._probes:
            self._probes[name] = _ProbeSummary(threshold)
        return self._probes[name]


def find_stopping_probe(
    probes: Collection[str], finish_reason: str | None, stop_reason: str | int | None
) -> str | None:
    """The probe whose rule ended the answer, if one did.

    A client's own stop string may read like ours, so the probe must be one of `probes`, those of
    the request's rules.
    """
    if finish_reason != "stop" or not isinstance(stop_reason, str):
        return None
    found = _STOPPED.fullmatch(stop_reason)
    return found[1] if found is not None and found[1] in probes else None


@dataclass
class ScoreBudget:
    """How many scores all requests together hold, and may hold."""

    limit: int
    held: int = 0

    @property
    def has_room(self) -> bool:
        return self.held < self.limit


class ChoiceEnd(NamedTuple):
    """Why a choice ended; None while it runs."""

    finish_reason: str | None
    stop_reason: str | int | None


class ScoreSink(Protocol):
    """Gets what is delivered to the client, as it is delivered."""

    def identify(self, response_id: str) -> None: ...

    def add_tokens(self, choice: int, token_ids: Sequence[int]) -> None: ...

    def add_scores(self, choice: int, made: ScoreSlice) -> None: ...

    def add_prompt(self, token_ids: list[int], made: ScoreSlice) -> None: ...


class _Choice:
    """One choice of the request."""

    def __init__(self, first: int | None, summary: ScoreSummary) -> None:
        self.scores = ChoiceScores(first)
        self.summary = summary
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


class RequestScores:
    """Joins the tokens and rows of one request.

    `is_attached()` says whether rows can arrive at all. `names()` are the probes until the first
    row says which bank it is of; None: nobody knows. Rows are lost while this request holds
    `max_scores` or more, or while `budget`, which all requests share, has no room. Call `hurry`
    before waiting for rows. Without `sums_up`, results have counts alone.
    """

    def __init__(
        self,
        stream: int,
        options: ClairaiOptions,
        *,
        max_scores: int,
        budget: ScoreBudget,
        is_attached: Callable[[], bool],
        names: Callable[[], Sequence[str] | None] = tuple,
        needs_echo: bool = False,
        sums_up: bool = True,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self.stream = stream
        self.options = options
        self.response_id: str | None = None
        self.model: str | None = None
        self.prompt_ids: list[int] | None = None
        self.raw_echo: msgspec.Raw | None = None  # what the engine says it does to this request
        self.echo = RequestEcho()  # the same, decoded
        self.changed = asyncio.Event()  # a row arrived, or the ring was attached or lost
        self.kept: ScoreSink | None = None  # set before the answer begins
        self.hurry = hurry
        self.num_lost = 0  # rows reported to the client as lost, prompt included
        self._is_attached = is_attached
        self._needs_echo, self._sums_up = needs_echo, sums_up
        self._max_scores = max_scores
        self._budget = budget
        self._held = 0
        self._choices: dict[int, _Choice] = {}
        self._prompt = PromptRows() if options.prompt_scores else None
        self._bank_names = names
        self._bank: ring_messages.Bank | None = None
        self._columns = ScoreColumns((), ())
        self._column_indices: list[int | None] = []  # in the bank, of the probes that were asked

    # From the ring

    def add_rows(self, batch: RowBatch) -> None:
        if batch.bank is not self._bank:
            self._read_bank(batch.bank)
        for at, phase in enumerate(batch.phases):
            media = batch.media[at] if batch.media else ring_messages.TEXT
            if phase == ring_messages.CACHED:
                if self._prompt is not None and batch.choice == 0:
                    self._prompt.add_cached(batch.positions[at], batch.spans[at], media)
            elif phase == ring_messages.FINISHED:
                self._end_rows(batch.choice)
            else:
                row = self._make_row(batch.token_ids[at], batch.scores[at])
                self._add_row(batch.choice, phase, batch.positions[at], row, media)
        self.changed.set()

    def _add_row(self, choice: int, phase: int, position: int, row: ScoreRow, media: int) -> None:
        has_room = self._held < self._max_scores and self._budget.has_room
        held_row = row if has_room else None
        if phase == ring_messages.DECODE:
            scores = self._choice(choice).scores
            before = scores.size
            scores.add_row(position, held_row)
            self._charge(scores.size - before)
            if self._prompt is not None and choice == 0:
                self._prompt.end()
        elif self._prompt is not None and choice == 0:
            before = self._prompt.size
            self._prompt.add_row(position, held_row, media)
            self._charge(self._prompt.size - before)

    def _end_rows(self, choice: int) -> None:
        self._choice(choice).scores.end()
        if self._prompt is not None and choice == 0:
            self._prompt.end()

    def _charge(self, size: int) -> None:
        self._held += size
        self._budget.held += size

    def close(self) -> None:
        """Give back this request's part of the budget."""
        self._charge(-self._held)

    @property
    def _names(self) -> tuple[str, ...]:
        """Those of the newest row; before the first one, as far as anybody knows them."""
        known = self._columns.names if self._bank is not None else self.options.names
        return tuple(self._bank_names() or ()) if known is None else known

    @property
    def _has_names(self) -> bool:
        has_own = self._bank is not None or self.options.names is not None
        return has_own or self._bank_names() is not None

    def _make_row(self, token_id: int, values: Values) -> ScoreRow:
        if self.options.names is not None:
            values = [None if index is None else values[index] for index in self._column_indices]
        return ScoreRow(token_id, self._columns, values)

    def _read_bank(self, bank: ring_messages.Bank) -> None:
        index_of = {info.name: index for index, info in enumerate(bank.probes)}
        names = tuple(index_of) if self.options.names is None else self.options.names
        indices = [index_of.get(name) for name in names]
        thresholds = [None if at is None else bank.probes[at].threshold for at in indices]
        self._bank, self._column_indices = bank, indices
        self._columns = ScoreColumns(names, tuple(thresholds), bank.weights)

    # From upstream

    def read_response(self, view: ChunkView) -> None:
        """Read what a chunk says about the response as a whole.

        The prompt's length says at which position the generated tokens begin.
        """
        if self.response_id is None and view.id is not None:
            self.response_id = view.id
            if self.kept is not None:
                self.kept.identify(view.id)
        self.model = self.model or view.model
        if self.prompt_ids is None and view.prompt is not None:
            self.prompt_ids = view.prompt
            for choice in self._choices.values():
                choice.scores.first = len(view.prompt)
        if self.raw_echo is None and view.echo is not None:
            self.raw_echo = view.echo.copy()
            self.echo = read_echo(self.raw_echo)
        if self._needs_echo and not self.echo.is_bound and view.choices:
            raise NotSteered

    def read_choice(self, view: ChoiceView) -> int:
        """Read what a chunk says about one choice; the index of its first token."""
        choice = self._choice(view.index)
        start = choice.scores.num_tokens
        if view.token_ids:
            self.add_tokens(view.index, view.token_ids)
        if view.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = view.finish_reason, view.stop_reason
        return start

    @property
    def is_streaming(self) -> bool:
        """True if a chunk says nothing more of the response as a whole than earlier ones have."""
        return (
            self.prompt_ids is not None
            and self.response_id is not None
            and (self._prompt is None or self._prompt.is_delivered)
            and (not self._needs_echo or self.echo.is_bound)
        )

    def add_tokens(self, choice: int, token_ids: Sequence[int]) -> None:
        """Add new tokens of a choice."""
        self._choice(choice).scores.add_tokens(token_ids)
        if self.kept is not None:
            self.kept.add_tokens(choice, token_ids)

    def finish(self, choice: int, reason: str) -> None:
        self._choice(choice).finish_reason = reason

    # To the client

    def is_complete(self, choice: int) -> bool:
        """True if waiting brings no further row for the tokens of this choice."""
        if self.prompt_ids is None or not self._is_attached():
            return True
        if not self._has_names:  # the first record that the engine publishes says which they are
            return False
        has_prompt = choice == 0 and self._prompt is not None and not self._prompt.is_delivered
        if has_prompt and not self._is_prompt_complete():
            return False
        return self._choice(choice).scores.is_complete

    def take(self, choice: int) -> ScoreSlice | None:
        """The scores that can be delivered now; all the rest if the choice has finished."""
        found = self._choice(choice)
        scores = found.scores
        start, before = scores.num_delivered, scores.size
        is_final = found.finish_reason is not None
        rows = scores.take(is_final=is_final, can_wait=self._is_attached())
        self._charge(scores.size - before)
        if rows is None:
            return None
        found.summary.add(start, rows)
        made = make_slice(rows, start, scores.num_delivered - start, self._names)
        if self.kept is not None:
            self.kept.add_scores(choice, made)
        return self._count_lost(made)

    def take_prompt(self, *, is_final: bool) -> ScoreSlice | None:
        """The prompt's scores, once: when all rows are here, or no more can arrive."""
        prompt = self._prompt
        if prompt is None or prompt.is_delivered or self.prompt_ids is None:
            return None
        if not is_final and self._is_attached() and not self._is_prompt_complete():
            return None
        before, media = prompt.size, prompt.media_spans()
        rows, lost = prompt.take(self.prompt_ids)
        self._charge(-before)
        made = make_slice(rows, 0, len(rows), self._names)._replace(lost=lost, media=media)
        if self.kept is not None:
            self.kept.add_prompt(self.prompt_ids, made)
        return self._count_lost(made)

    def ends(self) -> dict[int, ChoiceEnd]:
        """How each choice ended, if it has."""
        found = ((at, self._choices[at]) for at in self.choices)
        return {at: ChoiceEnd(one.finish_reason, one.stop_reason) for at, one in found}

    def results(self) -> tuple[ChoiceResult, ...]:
        return tuple(self.result(choice) for choice in self.choices)

    def result(self, choice: int) -> ChoiceResult:
        """How this choice ended, and its scores in short."""
        found = self._choice(choice)
        summary = found.summary
        names = tuple(dict.fromkeys((*self._names, *summary.names)))
        return ChoiceResult(
            choice,
            found.scores.num_tokens,
            summary.count,
            summary.lost,
            found.finish_reason,
            summary.results(names),
            found.stop_reason,
            find_stopping_probe(self.options.rule_probes, found.finish_reason, found.stop_reason),
        )

    @property
    def num_mismatched(self) -> int:
        """Rows that carried another token than the request has there; nobody is shown them."""
        prompt = 0 if self._prompt is None else self._prompt.num_mismatched
        return prompt + sum(choice.scores.num_mismatched for choice in self._choices.values())

    @property
    def num_tokens(self) -> int:
        """Generated so far, of all choices."""
        return sum(choice.scores.num_tokens for choice in self._choices.values())

    @property
    def choices(self) -> tuple[int, ...]:
        return tuple(sorted(self._choices))

    @property
    def running(self) -> tuple[int, ...]:
        """Choices that upstream has not finished."""
        return tuple(at for at in self.choices if self._choices[at].finish_reason is None)

    @property
    def is_expecting_rows(self) -> bool:
        """True if a running choice has tokens whose rows can still arrive."""
        return any(not self.is_complete(choice) for choice in self.running)

    def _is_prompt_complete(self) -> bool:
        assert self._prompt is not None
        return self.prompt_ids is not None and self._prompt.is_complete(len(self.prompt_ids))

    def _count_lost(self, made: ScoreSlice) -> ScoreSlice:
        self.num_lost += len(made.lost)
        return made

    def _choice(self, choice: int) -> _Choice:
        if choice not in self._choices:
            first = None if self.prompt_ids is None else len(self.prompt_ids)
            summary = ScoreSummary(has_probes=self._sums_up)
            self._choices[choice] = _Choice(first, summary)
        return self._choices[choice]
