"""The bounded queue of blocks between whoever captures rows and the thread that stores them.

With no room left, `put` waits, drops the block or spills it to a file, as the policy says. At every
moment `accepted + dropped == offered`, counted in rows.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np

from clairai.errors import StoreError, describe_os_error, quote
from clairai.store.row_block import Origin, RequestNote, RowBlock, count_rows
from clairai.wire.ring_messages import ROW

Policy = Literal["block", "drop", "spill"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
BATCH_NBYTES: Final = 1 << 20  # `get` returns about this much at once, if it arrives
LINGER_S: Final = 0.002  # within this time
_log: Final = logging.getLogger("clairai.capture")
MAX_NAMED_LOSSES: Final = 65_536  # requests whose losses are counted one by one; the sum always is


@dataclass(frozen=True)
class RowCounts:
    """What became of the rows offered so far."""

    offered: int = 0
    accepted: int = 0
    dropped: int = 0
    committed: int = 0
    lost: int = 0  # accepted, then given up; the writer's state has the reason

    @property
    def pending(self) -> int:
        return self.accepted - self.committed - self.lost


@dataclass(frozen=True)
class QueuedBlock:
    """A block, with the notes of the requests in it as they were when it was offered."""

    block: RowBlock
    notes: Mapping[int, RequestNote] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + sum(note.nbytes for note in self.notes.values())


class BlockQueue:
    """A queue of blocks and markers, first in, first out. Many threads may put, one gets."""

    def __init__(self, policy: str, nbytes: int, spill: SpillFile | None = None) -> None:
        if policy not in POLICIES:
            raise StoreError(
                f"no policy is named {quote(policy)}; give one of {', '.join(POLICIES)}"
            )
        if (policy == "spill") != (spill is not None):
            raise StoreError("policy spill needs a folder to spill to, and only it has one")
        self._policy, self._limit, self._spill = policy, nbytes, spill
        self._notes: dict[int, RequestNote] = {}  # of the requests that are running
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

    def begin(self, stream: int, note: RequestNote) -> None:
        """Attach this note to the request's blocks from now on, until `end`."""
        self._notes[stream] = note

    def end(self, stream: int) -> None:
        self._notes.pop(stream, None)

    def put(self, block: RowBlock) -> bool:
        """Return whether the block was accepted. Waits for room only under the policy `block`."""
        item = QueuedBlock(block, self._notes_of(block))
        with self._changed:
            while self._policy == "block" and self._is_open and not self._has_room(item):
                self._changed.wait()
            is_accepted = self._is_open and self._accept(item)
            self._offered += block.num_rows
            if not is_accepted:
                self._dropped += block.num_rows
                self._add_losses(count_rows(block))
            elif len(self._waiting) <= 1 or self._nbytes >= BATCH_NBYTES:
                self._changed.notify_all()
            return is_accepted

    def _notes_of(self, block: RowBlock) -> dict[int, RequestNote]:
        if not self._notes:
            return {}
        streams = np.unique(block.rows_N["stream"]).tolist()
        return {stream: self._notes[stream] for stream in streams if stream in self._notes}

    def _has_room(self, item: QueuedBlock) -> bool:
        # A block larger than the bound is accepted when nothing else waits.
        return self._nbytes + item.nbytes <= self._limit or not self._nbytes

    def _accept(self, item: QueuedBlock) -> bool:
        is_spilling = self._spill is not None and len(self._spill) > 0
        if not is_spilling and self._has_room(item):
            self._waiting.append(item)
            self._nbytes += item.nbytes
            return True
        return self._spill is not None and self._spill.put(item)

    def _add_losses(self, num_rows: Mapping[int, int]) -> None:
        for stream, count in num_rows.items():
            if stream in self._losses or len(self._losses) < MAX_NAMED_LOSSES:
                self._losses[stream] = self._losses.get(stream, 0) + count

    def put_marker(self, marker: object) -> None:
        """Queue something that takes no room, in order with the blocks."""
        with self._changed:
            if self._spill is not None and len(self._spill):
                self._spill.put_marker(marker)
            else:
                self._waiting.append(marker)
            self._changed.notify_all()

    def get(self, deadline_s: float | None) -> list[object]:
        """Return the next blocks and markers, or nothing if none came by `deadline_s`.

        The deadline is of `time.monotonic`; None waits for ever.
        """
        with self._changed:
            while not self._waiting and not (self._spill is not None and len(self._spill)):
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return []
                self._changed.wait(left_s)
            if not self._waiting:
                return self._get_spilled()
            if self._nbytes < BATCH_NBYTES and isinstance(self._waiting[-1], QueuedBlock):
                self._changed.wait(LINGER_S)  # wake once for many small blocks
            return self._take_batch()

    def _get_spilled(self) -> list[object]:
        """The oldest spilled item; nothing if its file cannot be read, and its rows are lost."""
        assert self._spill is not None
        try:
            return [self._spill.get()]
        except SpillError as error:
            self._lost += sum(error.rows.values())
            self._add_losses(error.rows)
            _log.error("%d spilled rows are lost: %s", sum(error.rows.values()), error)
            return []

    def _take_batch(self) -> list[object]:
        batch: list[object] = []
        nbytes = 0
        while self._waiting and nbytes < BATCH_NBYTES:
            item = self._waiting.popleft()
            nbytes += item.nbytes if isinstance(item, QueuedBlock) else 0
            batch.append(item)
        self._nbytes -= nbytes
        self._changed.notify_all()
        return batch

    def count_committed(self, num_rows: int) -> None:
        with self._changed:
            self._committed += num_rows

    def count_lost(self, num_rows: Mapping[int, int]) -> None:
        """Count accepted rows that cannot be committed, by stream."""
        with self._changed:
            self._lost += sum(num_rows.values())
            self._add_losses(num_rows)

    def losses(self, stream: int) -> int:
        """Return how many rows of a request were dropped or lost, and forget the number."""
        with self._changed:
            return self._losses.pop(stream, 0)

    def close(self) -> None:
        """Drop, and count, whatever is put from now on."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()


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
    rows: Mapping[int, int]  # by stream


class SpillError(Exception):
    """A spilled block cannot be read again."""

    def __init__(self, rows: Mapping[int, int], reason: str) -> None:
        super().__init__(reason)
        self.rows = rows


class SpillFile:
    """A bounded file that continues a queue when memory has no room left.

    The file has no name, so nothing of it remains when the process ends: spilled rows are accepted,
    not committed. Put it on another disk than the captures, or in /dev/shm.
    """

    def __init__(self, folder: str | Path, nbytes: int) -> None:
        try:
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{quote(str(folder), 200)} cannot hold what is spilled, "
                f"{describe_os_error(error)}; give a folder of yours"
            ) from None
        self._limit = nbytes
        self._end = self._num_blocks = 0
        self._waiting: deque[_FileRange | object] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put_marker(self, marker: object) -> None:
        self._waiting.append(marker)

    def put(self, item: QueuedBlock) -> bool:
        """Return False, and change nothing, if there is no room for the block."""
        data = _dump_block(item)
        if self._end + len(data) > self._limit:
            return False
        try:
            self._file.seek(self._end)
            num_written = self._file.write(data)
        except OSError:
            return False  # a full disk is a bound too
        if num_written != len(data):
            return False
        self._waiting.append(_FileRange(self._end, len(data), count_rows(item.block)))
        self._end += len(data)
        self._num_blocks += 1
        return True

    def get(self) -> object:
        """Return the oldest block or marker. When no block is left, the file starts over.

        Raises SpillError if the block cannot be read; it is removed too.
        """
        oldest = self._waiting.popleft()
        if not isinstance(oldest, _FileRange):
            return oldest
        try:
            self._file.seek(oldest.offset)
            return _load_block(self._file.read(oldest.nbytes))
        except (OSError, ValueError, TypeError) as error:  # msgspec's errors are ValueErrors
            raise SpillError(oldest.rows, f"{type(error).__name__}: {error}") from None
        finally:
            self._remove_block()

    def _remove_block(self) -> None:
        self._num_blocks -= 1
        if not self._num_blocks:
            self._end = 0
            with contextlib.suppress(OSError):  # then it is written over
                self._file.truncate(0)

    def close(self) -> None:
        self._file.close()


def _dump_block(item: QueuedBlock) -> bytes:
    block = item.block
    arrays = tuple(
        _SpilledArray(name, array.dtype.str, array.shape, array.tobytes())
        for name, array in block.arrays.items()
    )
    fidelity = {name: float(value) for name, value in block.fidelity.items()}
    return msgspec.msgpack.encode(
        _SpilledBlock(
            block.origin, block.point, block.rows_N.tobytes(), arrays, fidelity, dict(item.notes)
        )
    )


def _load_block(data: bytes) -> QueuedBlock:
    read = msgspec.msgpack.decode(data, type=_SpilledBlock)
    arrays = {
        one.name: np.frombuffer(one.data, one.dtype).reshape(one.shape) for one in read.arrays
    }
    rows_N = np.frombuffer(read.rows, ROW)
    return QueuedBlock(RowBlock(read.origin, read.point, rows_N, arrays, read.fidelity), read.notes)
