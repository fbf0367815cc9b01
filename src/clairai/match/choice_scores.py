"""Joins rows to the tokens of a running request, in order and each exactly once.

Tokens and rows arrive separately, in any order. Four rules decide what belongs together:

- A row belongs to the token at its position, and only if both carry the same token id.
- A position that is forwarded again (after a preemption) has a newer row, which replaces the
  older one until the token has been delivered. What was delivered never changes.
- The newest sampled token has no score. An engine that schedules ahead may forward it, but
  whether it does depends on timing.
- The rows of one choice arrive in order: a missing row is lost once a later one is there, or the
  mark that the engine has finished the choice.

`align.py` applies the same rules to a request that has ended, all at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

Values = list[float | None]
_UNKNOWN_POSITION: Final = 1 << 62


@dataclass(frozen=True)
class ScoreColumns:
    """The probes of a request in one version of the bank."""

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


class MediaSpan(NamedTuple):
    """Consecutive tokens of a prompt that stand for one kind of media."""

    media: int  # IMAGE, AUDIO, ... of wire/ring_messages.py
    start: int
    span: int


class _HeldRows:
    """Rows by position, each held until its token is known."""

    def __init__(self) -> None:
        self.size = 0  # of all rows held
        self.num_mismatched = 0  # rows that carried another token id than the request
        self._rows: dict[int, ScoreRow] = {}

    def _hold(self, position: int, row: ScoreRow) -> None:
        older = self._rows.get(position)
        self.size += row.size - (0 if older is None else older.size)
        self._rows[position] = row

    def _match(self, position: int, token_id: int) -> ScoreRow | None:
        """The row of this token; None if there is none, or if it is another token's."""
        row = self._rows.pop(position, None)
        if row is None:
            return None
        self.size -= row.size
        if row.token_id != token_id:
            self.num_mismatched += 1
            return None
        return row


class ChoiceScores(_HeldRows):
    """The generated tokens of one choice and their rows.

    `first` is the position of the first generated token. It may be set later: until then rows
    are held and none is matched.
    """

    def __init__(self, first: int | None = None) -> None:
        super().__init__()
        self.first = first
        self.num_tokens = 0  # generated so far
        self.num_delivered = 0  # tokens already delivered, with or without scores
        self._token_ids: deque[int] = deque()  # of tokens not delivered yet
        self._newest = -1  # highest position of any row, held or not
        self._has_ended = False  # the engine has finished the choice: no row follows

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self._token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)

    def add_row(self, position: int, row: ScoreRow | None) -> None:
        """Hold a row until its token is delivered; None is a row that there is no room for."""
        if position > self._newest:
            self._newest = position
        is_late = self.first is not None and position < self.first + self.num_delivered
        if row is not None and not is_late:
            self._hold(position, row)

    def end(self) -> None:
        self._has_ended = True

    @property
    def is_complete(self) -> bool:
        """True if no row can still arrive for a token of so far, or if none can be matched."""
        if self.first is None or self._has_ended:
            return True
        last = self.num_tokens - 1
        return self.num_delivered >= last or self._newest >= self.first + last - 1

    @property
    def is_up_to_date(self) -> bool:
        """True if every token of so far that can have a score was delivered."""
        return self.num_delivered >= self.num_tokens - 1

    def take(self, *, is_final: bool, can_wait: bool = True) -> list[ScoreRow | None] | None:
        """Deliver the next tokens: their rows in order, None for a lost one; None for no token.

        The newest token is delivered only if `is_final`, and adds no row. Rows that have not
        arrived are lost if `is_final`, or if nothing is worth waiting for (not `can_wait`).
        """
        start, last = self.num_delivered, self.num_tokens - 1
        can_wait = can_wait and not (is_final or self._has_ended or self.first is None)
        first = _UNKNOWN_POSITION if self.first is None else self.first
        rows: list[ScoreRow | None] = []
        while self.num_delivered < last:
            position = first + self.num_delivered
            if can_wait and position >= self._newest and position not in self._rows:
                break
            rows.append(self._match(position, self._token_ids.popleft()))
            self.num_delivered += 1
        if is_final and self.num_delivered == last:
            self._token_ids.popleft()
            self.num_delivered += 1
        return rows if self.num_delivered > start else None


class PromptRows(_HeldRows):
    """The tokens of a prompt and their rows, delivered once and all together.

    All choices of a request share the prompt; its rows are those of the first choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_delivered = False
        self._cached: set[int] = set()
        self._media: dict[int, int] = {}  # by position, of those that are not text
        self._has_ended = False  # a generated token was forwarded: no row of the prompt follows

    def add_row(self, position: int, row: ScoreRow | None, media: int = 0) -> None:
        """None is a row that there is no room for."""
        if self.is_delivered:
            return
        if row is not None:
            self._hold(position, row)
        if media:
            self._media[position] = media

    def add_cached(self, position: int, span: int, media: int = 0) -> None:
        """Tokens that the prefix cache served: they have no row."""
        if self.is_delivered:
            return
        positions = range(position, position + span)
        self._cached.update(positions)
        if media:
            self._media.update(dict.fromkeys(positions, media))

    def end(self) -> None:
        self._has_ended = True

    def media_spans(self) -> tuple[MediaSpan, ...]:
        """The tokens so far that are no text, in order; ask before they are taken."""
        spans: list[MediaSpan] = []
        for position, media in sorted(self._media.items()):
            last = spans[-1] if spans else None
            if last is not None and (last.media, last.start + last.span) == (media, position):
                spans[-1] = last._replace(span=last.span + 1)
            else:
                spans.append(MediaSpan(media, position, 1))
        return tuple(spans)

    def is_complete(self, num_tokens: int) -> bool:
        if self._has_ended:
            return True
        if len(self._rows) + len(self._cached) < num_tokens:
            return False
        return all(at in self._rows or at in self._cached for at in range(num_tokens))

    def take(self, token_ids: Sequence[int]) -> tuple[list[ScoreRow | None], tuple[int, ...]]:
        """A row or None for each token, and the indices of those None that are lost."""
        self.is_delivered = True
        # A cached token has no row, and lacks none; one with a row was forwarded before.
        never_had = self._cached - self._rows.keys()
        rows = [self._match(at, token_id) for at, token_id in enumerate(token_ids)]
        lost = tuple(at for at, row in enumerate(rows) if row is None and at not in never_had)
        self._rows.clear()
        self._cached.clear()
        self._media.clear()
        self.size = 0
        return rows, lost
