"""Takes the tokens and the rows of one answer; gives its scores in order, each exactly once.

A row is told under a token only if both carry the same token id. What was told is never changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Score = float | None
Values = list[Score]


@dataclass(frozen=True)
class ScoreColumns:
    """The probes of a request, as one bank of the engine has them."""

    names: tuple[str, ...]
    thresholds: tuple[float | None, ...]
    weights: int | None = None  # version of the model's weights; None: the engine does not say


class ScoreRow(NamedTuple):
    """The scores of one forwarded token."""

    token_id: int
    columns: ScoreColumns
    values: Values

    @property
    def size(self) -> int:
        """What holding it costs, in scores."""
        return 1 + len(self.values)


class ScoreSlice(NamedTuple):
    """Some rows in order: `scores[j]` belongs to token `start + j`; a lost one is all null."""

    names: tuple[str, ...]
    start: int
    scores: list[Values]
    lost: tuple[int, ...]  # which of them, as j
    weights: tuple[int, ...] = ()  # versions of the model's weights that they are of, in order

    def fields(self) -> dict[str, Any]:
        """As it goes on the wire."""
        made: dict[str, Any] = {"names": self.names, "start": self.start, "scores": self.scores}
        if self.lost:
            made["lost"] = len(self.lost)
        if self.weights:
            made["weights"] = self.weights[0] if len(self.weights) == 1 else None
        return made

    def parts(self, size: int) -> list[ScoreSlice]:
        """The same in slices of `size` rows."""
        return [
            ScoreSlice(
                self.names,
                self.start + at,
                self.scores[at : at + size],
                tuple(j - at for j in self.lost if at <= j < at + size),
                self.weights,
            )
            for at in range(0, len(self.scores), size)
        ]


class ChoiceScores:
    """One answer. Tokens and rows come by two ways, in any order between them."""

    def __init__(self) -> None:
        self.told = 0  # tokens whose row, or whose lack of one, was given away
        self.tokens = 0  # generated so far
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.mismatched = 0
        self._ids: deque[int] = deque()  # of the tokens that are not told yet
        self._rows: dict[int, ScoreRow] = {}  # by position, not told yet
        self._newest = -1  # highest position that a row came for, kept or not
        self.held = 0  # size of all rows that are not told yet

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)
        self.tokens += len(token_ids)

    def add_row(self, position: int, row: ScoreRow | None, *, first: int | None) -> None:
        """Keep a row until its token can be told; None stands for one that cannot be kept.

        `first` is the position of the first generated token, if known.
        """
        if position > self._newest:
            self._newest = position
        if row is None or (first is not None and position < first + self.told):
            return  # told already: forwarded again after a preemption
        self._pop(position)
        self._rows[position] = row
        self.held += row.size

    def is_complete(self, first: int) -> bool:
        """Whether no row that can still come would be told: the last token has none."""
        last = self.tokens - 1
        return self.told >= last or self._newest >= first + last - 1

    def take(
        self, first: int, *, is_final: bool, is_cut_off_from_rows: bool
    ) -> list[ScoreRow | None] | None:
        """Rows of the next tokens that can be told, None for one that is lost; None if there is
        none to tell. The newest token is told only when final, and has no row: an engine that
        schedules ahead may forward it, but whether it does depends on timing.
        """
        start, last = self.told, self.tokens - 1
        found: list[ScoreRow | None] = []
        while self.told < last:
            position = first + self.told
            row = self._pop(position)
            is_lost = row is None and (is_final or is_cut_off_from_rows or self._newest > position)
            if row is None and not is_lost:
                break
            found.append(self._checked(row))
        if is_final and self.told == last:
            self._ids.popleft()
            self.told += 1
        return found if self.told > start else None

    def _pop(self, position: int) -> ScoreRow | None:
        row = self._rows.pop(position, None)
        self.held -= 0 if row is None else row.size
        return row

    def _checked(self, row: ScoreRow | None) -> ScoreRow | None:
        token_id = self._ids.popleft()
        self.told += 1
        if row is not None and row.token_id != token_id:
            self.mismatched += 1
            return None
        return row


def make_slice(
    rows: list[ScoreRow | None], start: int, count: int, names: tuple[str, ...]
) -> ScoreSlice:
    """`count` tokens from `start` on; those past `rows` never had one. `names` if no row has."""
    found = [row for row in rows if row is not None]
    if found:
        names = found[0].columns.names
        if any(row.columns.names != names for row in found):  # the bank changed in between
            return _make_mixed_slice(rows, start, count)
    empty: Values = [None] * len(names)
    scores = [empty if row is None else row.values for row in rows]
    scores += [empty] * (count - len(rows))
    return ScoreSlice(names, start, scores, _missing(rows), _weights(found))


def _make_mixed_slice(rows: list[ScoreRow | None], start: int, count: int) -> ScoreSlice:
    found = [row for row in rows if row is not None]
    names = tuple(dict.fromkeys(name for row in found for name in row.columns.names))
    held = [
        {} if row is None else dict(zip(row.columns.names, row.values, strict=True)) for row in rows
    ]
    scores = [[values.get(name) for name in names] for values in held]
    scores += [[None] * len(names)] * (count - len(rows))
    return ScoreSlice(names, start, scores, _missing(rows), _weights(found))


def _weights(rows: list[ScoreRow]) -> tuple[int, ...]:
    said = dict.fromkeys(row.columns.weights for row in rows)
    return tuple(version for version in said if version is not None)


def _missing(rows: list[ScoreRow | None]) -> tuple[int, ...]:
    return tuple(at for at, row in enumerate(rows) if row is None)


# MERGED
# Takes the rows and cached spans of a prompt; gives one row per token, once all is known of them.
#
# The prompt is shared by all answers of a request; its rows are those of the first answer.


class PromptRows:
    """What is known of the prompt's tokens so far."""

    def __init__(self) -> None:
        self.is_told = False
        self.mismatched = 0
        self.held = 0  # size of all rows, until they are told
        self._rows: dict[int, ScoreRow] = {}
        self._cached: set[int] = set()
        self._is_past = False  # a generated token was forwarded: no row of the prompt follows

    def add_row(self, position: int, row: ScoreRow | None) -> None:
        """None stands for a row that cannot be kept."""
        if self.is_told or row is None or position in self._rows:
            return  # forwarded again: the same token, the same score
        self._rows[position] = row
        self.held += row.size

    def add_cached(self, position: int, span: int) -> None:
        if not self.is_told:
            self._cached.update(range(position, position + span))

    def end(self) -> None:
        self._is_past = True

    def is_complete(self, count: int) -> bool:
        if self._is_past:
            return True
        if len(self._rows) + len(self._cached) < count:
            return False
        return all(at in self._rows or at in self._cached for at in range(count))

    def take(self, token_ids: Sequence[int]) -> tuple[list[ScoreRow | None], tuple[int, ...]]:
        """A row or None for each token, and which of the None are lost: a cached token has none."""
        self.is_told = True
        rows = [self._checked(at, token_id) for at, token_id in enumerate(token_ids)]
        lost = tuple(at for at, row in enumerate(rows) if row is None and at not in self._cached)
        self._rows.clear()
        self._cached.clear()
        self.held = 0
        return rows, lost

    def _checked(self, position: int, token_id: int) -> ScoreRow | None:
        row = self._rows.get(position)
        if row is not None and row.token_id != token_id:
            self.mismatched += 1
            self._cached.discard(position)
            return None
        return row
