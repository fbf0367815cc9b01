"""Takes blocks from whoever captures; gives them to the writer in order, and counts the refused.

Bounded: with no room left it waits, drops or spills, as was chosen. At every moment
accepted + dropped == offered, in rows.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np

from clairai.errors import StoreError
from clairai.points import quote
from clairai.store.disk import describe_error
from clairai.store.row_block import NotedBlock, Origin, RequestNote, RowBlock
from clairai.wire.ring_messages import ROW

Policy = Literal["block", "drop", "spill"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
MIN_NBYTES: Final = 1 << 20  # of blocks that are handed on together, if they come
LINGER_S: Final = 0.002  # within this time
MAX_NAMED_LOSSES: Final = 65_536  # requests whose own losses are remembered; the sum always is


@dataclass(frozen=True)
class RowCounts:
    """Rows. What is accepted and neither committed nor lost is on its way."""

    offered: int = 0
    accepted: int = 0
    dropped: int = 0
    committed: int = 0
    lost: int = 0  # accepted, and given up: the reason is the writer's

    @property
    def pending(self) -> int:
        return self.accepted - self.committed - self.lost


class BlockQueue:
    """Many may put, one gets."""

    def __init__(self, policy: str, nbytes: int, spill: SpillFile | None = None) -> None:
        if policy not in POLICIES:
            raise StoreError(
                f"no policy is named {quote(policy)}; give one of {', '.join(POLICIES)}"
            )
        if (policy == "spill") != (spill is not None):
            raise StoreError("policy spill needs a folder to spill to, and only it has one")
        self._policy, self._limit, self._spill = policy, nbytes, spill
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._nbytes = 0
        self._offered = self._dropped = self._committed = self._lost = 0
        self._losses: dict[int, int] = {}
        self._is_open = True

    @property
    def counts(self) -> RowCounts:
        with self._changed:
            accepted = self._offered - self._dropped
            return RowCounts(self._offered, accepted, self._dropped, self._committed, self._lost)

    def put(self, given: NotedBlock) -> bool:
        """Whether it was accepted. Waits only under the policy `block`."""
        with self._changed:
            while self._policy == "block" and self._is_open and not self._has_room(given):
                self._changed.wait()
            is_taken = self._is_open and self._take(given)
            self._offered += given.num_rows
            if not is_taken:
                self._dropped += given.num_rows
                self._blame(given.streams())
            elif len(self._waiting) <= 1 or self._nbytes >= MIN_NBYTES:
                self._changed.notify_all()
            return is_taken

    def _has_room(self, given: NotedBlock) -> bool:
        # A block larger than the bound is let in when nothing else waits.
        return self._nbytes + given.nbytes <= self._limit or not self._nbytes

    def _take(self, given: NotedBlock) -> bool:
        is_spilling = self._spill is not None and len(self._spill) > 0
        if not is_spilling and self._has_room(given):
            self._waiting.append(given)
            self._nbytes += given.nbytes
            return True
        return self._spill is not None and self._spill.put(given)

    def _blame(self, streams: Mapping[int, int]) -> None:
        for stream, count in streams.items():
            if stream in self._losses or len(self._losses) < MAX_NAMED_LOSSES:
                self._losses[stream] = self._losses.get(stream, 0) + count

    def put_other(self, other: object) -> None:
        """Something that takes no room and keeps its place among the blocks."""
        with self._changed:
            if self._spill is not None and len(self._spill):
                self._spill.put_other(other)
            else:
                self._waiting.append(other)
            self._changed.notify_all()

    def get(self, deadline_s: float | None) -> list[object]:
        """The next things, waited for until then (of time.monotonic); nothing if there was none."""
        with self._changed:
            while not self._waiting and not (self._spill is not None and len(self._spill)):
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                self._changed.wait(left_s)
            if not self._waiting:
                assert self._spill is not None
                return [self._spill.get()]
            if self._nbytes < MIN_NBYTES and isinstance(self._waiting[-1], NotedBlock):
                self._changed.wait(LINGER_S)  # one waking for many small blocks
            return self._first()

    def _first(self) -> list[object]:
        taken: list[object] = []
        nbytes = 0
        while self._waiting and nbytes < MIN_NBYTES:
            one = self._waiting.popleft()
            nbytes += one.nbytes if isinstance(one, NotedBlock) else 0
            taken.append(one)
        self._nbytes -= nbytes
        self._changed.notify_all()
        return taken

    def committed(self, num_rows: int) -> None:
        with self._changed:
            self._committed += num_rows

    def lose(self, streams: Mapping[int, int]) -> None:
        """Rows that were accepted and cannot be committed, by request."""
        with self._changed:
            self._lost += sum(streams.values())
            self._blame(streams)

    def losses(self, stream: int) -> int:
        """Rows of this request that were dropped or lost; told once."""
        with self._changed:
            return self._losses.pop(stream, 0)

    def close(self) -> None:
        """What is put from now on is dropped, and counted."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()


# MERGED
# Takes blocks that memory has no room for; gives them back in order, from a bounded file.
#
# The file has no name, so nothing is left of it when the process ends: what is spilled is
# accepted,
# not committed. Put it on another disk than the captures, or in /dev/shm.


class _SpilledArray(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _SpilledBlock(msgspec.Struct, frozen=True):
    origin: Origin
    point: str
    rows: bytes
    arrays: tuple[_SpilledArray, ...]
    fidelity: dict[str, float]
    notes: dict[int, RequestNote]


@dataclass(frozen=True)
class _FileRange:
    offset: int
    nbytes: int


class SpillFile:
    """First in, first out; `other` things, which take no room, keep their place among blocks."""

    def __init__(self, folder: str | Path, nbytes: int) -> None:
        try:
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{quote(str(folder), 200)} cannot hold what is spilled, {describe_error(error)}; "
                "give a folder of yours"
            ) from None
        self._limit = nbytes
        self._end = self._num_blocks = 0
        self._waiting: deque[_FileRange | object] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put_other(self, other: object) -> None:
        self._waiting.append(other)

    def put(self, given: NotedBlock) -> bool:
        """False if there is no room for it, and nothing has changed."""
        data = _dump_block(given)
        if self._end + len(data) > self._limit:
            return False
        try:
            self._file.seek(self._end)
            done = self._file.write(data)
        except OSError:
            return False  # this disk is full too: as good as the bound
        if done != len(data):
            return False
        self._waiting.append(_FileRange(self._end, len(data)))
        self._end += len(data)
        self._num_blocks += 1
        return True

    def get(self) -> object:
        """The oldest: a block, or another thing; the file is used anew when nothing is left."""
        first = self._waiting.popleft()
        if not isinstance(first, _FileRange):
            return first
        self._file.seek(first.offset)
        given = _load_block(self._file.read(first.nbytes))
        self._num_blocks -= 1
        if not self._num_blocks:
            self._end = 0
            self._file.truncate(0)
        return given

    def close(self) -> None:
        self._file.close()


def _dump_block(given: NotedBlock) -> bytes:
    block = given.block
    arrays = tuple(
        _SpilledArray(name, array.dtype.str, array.shape, array.tobytes())
        for name, array in block.arrays.items()
    )
    fidelity = {name: float(value) for name, value in block.fidelity.items()}
    return msgspec.msgpack.encode(
        _SpilledBlock(
            block.origin, block.point, block.rows_N.tobytes(), arrays, fidelity, dict(given.notes)
        )
    )


def _load_block(data: bytes) -> NotedBlock:
    read = msgspec.msgpack.decode(data, type=_SpilledBlock)
    arrays = {
        one.name: np.frombuffer(one.data, one.dtype).reshape(one.shape) for one in read.arrays
    }
    rows_N = np.frombuffer(read.rows, ROW)
    return NotedBlock(RowBlock(read.origin, read.point, rows_N, arrays, read.fidelity), read.notes)
