"""Takes the rows and cached spans of a prompt; gives one row per token, once all is known of them.

The prompt is shared by all answers of a request; its rows are those of the first answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from clairai.stream.lane import Row


class PromptRows:
    """What is known of the prompt's tokens so far."""

    def __init__(self) -> None:
        self.is_told = False
        self.mismatched = 0
        self.held = 0  # size of all rows, until they are told
        self._rows: dict[int, Row] = {}
        self._cached: set[int] = set()
        self._is_past = False  # a generated token was forwarded: no row of the prompt follows

    def add_row(self, position: int, row: Row | None) -> None:
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

    def take(self, token_ids: Sequence[int]) -> tuple[list[Row | None], tuple[int, ...]]:
        """A row or None for each token, and which of the None are lost: a cached token has none."""
        self.is_told = True
        rows = [self._checked(at, token_id) for at, token_id in enumerate(token_ids)]
        lost = tuple(at for at, row in enumerate(rows) if row is None and at not in self._cached)
        self._rows.clear()
        self._cached.clear()
        self.held = 0
        return rows, lost

    def _checked(self, position: int, token_id: int) -> Row | None:
        row = self._rows.get(position)
        if row is not None and row.token_id != token_id:
            self.mismatched += 1
            self._cached.discard(position)
            return None
        return row
