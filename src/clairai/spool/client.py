"""Reads a spool: where the rows of some records are, in files that are mapped when needed.

Runs in: the user's process.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import EngineGoneError, HandshakeError
from clairai.local.private_socket import Connection, MessageFormat, close_all, connect, socket_path
from clairai.spool.segment import SegmentView, map_segment
from clairai.wire.ring_messages import MAX_MESSAGE_BYTES, AskBank, Refusal
from clairai.wire.spool_messages import (
    DROPPED,
    SOCKET_KIND,
    AskRows,
    OpenSegment,
    SegmentFile,
    SegmentRows,
    SpoolAnswer,
    SpooledBank,
    SpooledRows,
    SpoolLosses,
    SpoolQuestion,
)

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 30.0
STALL_S: Final = 60.0  # without progress: the disk or the spool hangs
_ACCEPTED: Final = MessageFormat[SpoolAnswer](
    SpoolAnswer, max_bytes=MAX_MESSAGE_BYTES, error=HandshakeError
)
Segments = WeakValueDictionary[int, mmap.mmap]  # those that something still refers to
Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True, eq=False)
class FoundRows:
    """Rows of one segment that may belong to the requests asked for."""

    view: SegmentView
    first_row: int
    index: NDArray[np.void]  # SPOOLED_ROW, from `first_row` on


@dataclass(frozen=True, eq=False)
class SpoolContents:
    """What a spool has of some records, and what it lost of all."""

    found: tuple[FoundRows, ...]
    losses: SpoolLosses


class SpoolClient:
    """A connection to the spool of one engine."""

    def __init__(self, connection: Connection[SpoolAnswer], segments: Segments) -> None:
        self._connection = connection
        self._segments = segments

    @classmethod
    def connect(cls, folder: Path, epoch: int, segments: Segments) -> Self:
        """EngineGoneError if the engine has no spool; `segments` are those already mapped."""
        path = socket_path(folder, epoch, SOCKET_KIND)
        try:
            sock = connect(path, timeout_s=CONNECT_TIMEOUT_S, error=HandshakeError)
        except OSError as error:
            raise EngineGoneError(f"no spool of scores listens at {path} ({error})") from error
        return cls(Connection(sock, _ACCEPTED, max_fds=1), segments)

    def read(self, since: int, until: int) -> SpoolContents:
        """Wait until the records before `until` are on disk or lost; their rows from `since` on."""
        return self._open_all(self._wait(since, until))

    def try_read(self, since: int, until: int) -> SpoolContents | None:
        """As `read`, for a second at most; None if the spool has not come to record `until`."""
        answer = _expect(self._ask(AskRows(since, until))[0], SpooledRows)
        return self._open_all(answer) if answer.reached >= until else None

    def bank(self, version: int) -> SpooledBank:
        return _expect(self._ask(AskBank(version))[0], SpooledBank)

    @property
    def process(self) -> int:
        """The spool's process."""
        return self._connection.peer_pid

    def close(self) -> None:
        self._connection.close()

    def _wait(self, since: int, until: int) -> SpooledRows:
        reached, deadline_s = -1, time.monotonic() + STALL_S
        while True:
            answer = _expect(self._ask(AskRows(since, until))[0], SpooledRows)
            if answer.reached >= until:
                return answer
            now_s = time.monotonic()
            deadline_s = now_s + STALL_S if answer.reached > reached else deadline_s
            reached = answer.reached
            if now_s > deadline_s:
                raise HandshakeError(
                    f"the spool of scores has come to record {reached} of {until} and no further "
                    f"in {STALL_S:g} s; its disk hangs, or the process is stopped"
                )

    def _open_all(self, answer: SpooledRows) -> SpoolContents:
        found = [self._find(segment) for segment in answer.segments]
        return SpoolContents(tuple(one for one in found if one is not None), answer.losses)

    def _find(self, segment: SegmentRows) -> FoundRows | None:
        """None if the segment was dropped meanwhile."""
        mapping = self._segments.get(segment.number)
        if mapping is None:
            mapping = self._open(segment)
        if mapping is None:
            return None
        self._segments[segment.number] = mapping
        view = SegmentView.of(mapping, segment)
        return FoundRows(view, segment.first_row, view.index[segment.first_row : segment.num_rows])

    def _open(self, segment: SegmentRows) -> mmap.mmap | None:
        answer, fds = self._ask(OpenSegment(segment.number))
        if isinstance(answer, Refusal) and answer.code == DROPPED:
            return None
        _expect(answer, SegmentFile)
        if len(fds) != 1:
            raise HandshakeError("a segment of the spool came without its file; not ours")
        return map_segment(fds[0], segment)

    def _ask(self, question: SpoolQuestion) -> tuple[SpoolAnswer, list[int]]:
        """The answer, and its descriptors, which come with a SegmentFile alone."""
        try:
            self._connection.send(question)
            answer, fds = self._connection.receive(ANSWER_TIMEOUT_S)
        except OSError as error:
            raise EngineGoneError(f"the spool of scores has ended ({error})") from error
        if not isinstance(answer, SegmentFile):
            close_all(fds)
        return answer, fds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _expect(answer: SpoolAnswer, kind: type[Answer]) -> Answer:
    if isinstance(answer, Refusal):
        raise HandshakeError(f"the spool of scores refused ({answer.code}): {answer.reason}")
    if not isinstance(answer, kind):
        raise HandshakeError(f"the spool of scores sent a {type(answer).__name__}; not ours")
    return answer
