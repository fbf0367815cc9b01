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
class Columns:
    """The probes of a request, as one bank of the engine has them."""

    names: tuple[str, ...]
    thresholds: tuple[float | None, ...]
    weights: int | None = None  # version of the model's weights; None: the engine does not say


class Row(NamedTuple):
    """The scores of one forwarded token."""

    token_id: int
    columns: Columns
    values: Values

    @property
    def size(self) -> int:
        """What holding it costs, in scores."""
        return 1 + len(self.values)


class Slice(NamedTuple):
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

    def parts(self, size: int) -> list[Slice]:
        """The same in slices of `size` rows."""
        return [
            Slice(
                self.names,
                self.start + at,
                self.scores[at : at + size],
                tuple(j - at for j in self.lost if at <= j < at + size),
                self.weights,
            )
            for at in range(0, len(self.scores), size)
        ]


class Lane:
    """One answer. Tokens and rows come by two ways, in any order between them."""

    def __init__(self) -> None:
        self.told = 0  # tokens whose row, or whose lack of one, was given away
        self.tokens = 0  # generated so far
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.mismatched = 0
        self._ids: deque[int] = deque()  # of the tokens that are not told yet
        self._rows: dict[int, Row] = {}  # by position, not told yet
        self._newest = -1  # highest position that a row came for, kept or not
        self.held = 0  # size of all rows that are not told yet

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)
        self.tokens += len(token_ids)

    def add_row(self, position: int, row: Row | None, *, first: int | None) -> None:
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

    def take(self, first: int, *, is_final: bool, is_hopeless: bool) -> list[Row | None] | None:
        """Rows of the next tokens that can be told, None for one that is lost; None if there is
        none to tell. The newest token is told only when final, and has no row: an engine that
        schedules ahead may forward it, but whether it does depends on timing.
        """
        start, last = self.told, self.tokens - 1
        found: list[Row | None] = []
        while self.told < last:
            position = first + self.told
            row = self._pop(position)
            is_lost = row is None and (is_final or is_hopeless or self._newest > position)
            if row is None and not is_lost:
                break
            found.append(self._checked(row))
        if is_final and self.told == last:
            self._ids.popleft()
            self.told += 1
        return found if self.told > start else None

    def _pop(self, position: int) -> Row | None:
        row = self._rows.pop(position, None)
        self.held -= 0 if row is None else row.size
        return row

    def _checked(self, row: Row | None) -> Row | None:
        token_id = self._ids.popleft()
        self.told += 1
        if row is not None and row.token_id != token_id:
            self.mismatched += 1
            return None
        return row


def cut(rows: list[Row | None], start: int, count: int, names: tuple[str, ...]) -> Slice:
    """`count` tokens from `start` on; those past `rows` never had one. `names` if no row has."""
    found = [row for row in rows if row is not None]
    if found:
        names = found[0].columns.names
        if any(row.columns.names != names for row in found):  # the bank changed in between
            return _cut_across(rows, start, count)
    empty: Values = [None] * len(names)
    scores = [empty if row is None else row.values for row in rows]
    scores += [empty] * (count - len(rows))
    return Slice(names, start, scores, _missing(rows), _weights(found))


def _cut_across(rows: list[Row | None], start: int, count: int) -> Slice:
    found = [row for row in rows if row is not None]
    names = tuple(dict.fromkeys(name for row in found for name in row.columns.names))
    held = [
        {} if row is None else dict(zip(row.columns.names, row.values, strict=True)) for row in rows
    ]
    scores = [[values.get(name) for name in names] for values in held]
    scores += [[None] * len(names)] * (count - len(rows))
    return Slice(names, start, scores, _missing(rows), _weights(found))


def _weights(rows: list[Row]) -> tuple[int, ...]:
    said = dict.fromkeys(row.columns.weights for row in rows)
    return tuple(version for version in said if version is not None)


def _missing(rows: list[Row | None]) -> tuple[int, ...]:
    return tuple(at for at, row in enumerate(rows) if row is None)
