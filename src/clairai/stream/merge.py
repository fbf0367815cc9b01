"""Takes upstream's frames one by one; gives what a voice makes of them, with the scores, in order.

Only the chunk that ends a choice may wait, and only for that choice's rows: whatever belongs to
others goes past it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from clairai.stream.chunk import Chunk, read_chunk
from clairai.stream.sheet import Sheet
from clairai.stream.sse import DONE, data_of

Item = TypeVar("Item")


class Arrival(NamedTuple):
    """A frame; for a chunk with choices also what it holds, and where its tokens begin."""

    frame: bytes
    data: bytes
    chunk: Chunk | None
    starts: dict[int, int]  # choice: index of the first generated token in this chunk
    deadline_s: float | None  # it ends a choice: wait this long for the rows

    @property
    def choices(self) -> frozenset[int]:
        return frozenset(self.starts)


class Voice(Protocol[Item]):
    """How a stream is told to its client."""

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[Item]:
        """A chunk with choices; takes their scores from the sheet."""

    def other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[Item]:
        """Usage, an error, the end; or a comment, which has no data."""

    @property
    def is_listening(self) -> bool:
        """Whether rows that come between chunks are to be told at once."""

    def late(self) -> list[Item]:
        """What can be told of such rows."""


class Merger(Generic[Item]):
    """One stream."""

    def __init__(
        self, sheet: Sheet, voice: Voice[Item], *, patience_s: float, clock: Callable[[], float]
    ) -> None:
        self.is_done = False  # upstream said so
        self._sheet = sheet
        self._voice = voice
        self._patience_s = patience_s
        self._clock = clock
        self._waiting: list[Arrival] = []

    @property
    def is_over(self) -> bool:
        """Whether all has been said, the end too."""
        return self.is_done and not self._waiting

    @property
    def deadline_s(self) -> float | None:
        """When to call `release` at the latest, if anything waits."""
        deadlines = [a.deadline_s for a in self._waiting if a.deadline_s is not None]
        return min(deadlines, default=None)

    def feed(self, frame: bytes) -> list[Item]:
        """What can be said now that this frame has come."""
        data = data_of(frame)
        if data is None:
            return self._voice.other(frame, None, None)
        self.is_done |= data == DONE
        arrival = self._read(frame, data)
        if self._must_wait(arrival, self._waiting):
            self._waiting.append(arrival)
            return []
        return self._say(arrival)

    @property
    def is_listening(self) -> bool:
        """Whether rows are waited for, with or without a deadline."""
        return bool(self._waiting) or self._voice.is_listening

    def release(self) -> list[Item]:
        """What need not wait any longer: its rows have come, or it has waited long enough."""
        said = self._voice.late()
        still: list[Arrival] = []
        for arrival in self._waiting:
            if self._must_wait(arrival, still):
                still.append(arrival)
            else:
                said += self._say(arrival)
        self._waiting = still
        return said

    def _read(self, frame: bytes, data: bytes) -> Arrival:
        chunk = None if data == DONE else read_chunk(frame, data)
        if chunk is None:
            return Arrival(frame, data, None, {}, None)
        self._sheet.read_head(chunk.view)
        starts = {choice.index: self._sheet.read_choice(choice) for choice in chunk.view.choices}
        has_ended = any(choice.finish_reason is not None for choice in chunk.view.choices)
        deadline_s = self._clock() + self._patience_s if has_ended else None
        return Arrival(frame, data, chunk, starts, deadline_s)

    def _must_wait(self, arrival: Arrival, earlier: list[Arrival]) -> bool:
        if any(_is_bound(arrival, to=one) for one in earlier):
            return True
        if arrival.deadline_s is None or self._clock() >= arrival.deadline_s:
            return False
        return not all(self._sheet.is_complete(choice) for choice in arrival.choices)

    def _say(self, arrival: Arrival) -> list[Item]:
        chunk = arrival.chunk
        if chunk is None or not arrival.starts:
            return self._voice.other(arrival.frame, arrival.data, chunk)
        return self._voice.chunk(chunk, arrival.starts)


def _is_bound(later: Arrival, *, to: Arrival) -> bool:
    """Whether it may not be said first: same choice, or one is usage, an error or the end."""
    return not to.choices or not later.choices or bool(to.choices & later.choices)
