"""Takes blocks that memory has no room for; gives them back in order, from a bounded file.

The file has no name, so nothing is left of it when the process ends: what is spilled is accepted,
not committed. Put it on another disk than the captures, or in /dev/shm.
"""

from __future__ import annotations

import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clairai.errors import StoreError
from clairai.points import quote
from clairai.store.disk import cause
from clairai.store.rows import Block, Given, Note, Origin
from clairai.wire import ROW


class _Array(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Spilled(msgspec.Struct, frozen=True):
    origin: Origin
    point: str
    rows: bytes
    arrays: tuple[_Array, ...]
    fidelity: dict[str, float]
    notes: dict[int, Note]


@dataclass(frozen=True)
class _Place:
    offset: int
    nbytes: int


class Spill:
    """First in, first out; `other` things, which take no room, keep their place among blocks."""

    def __init__(self, folder: str | Path, nbytes: int) -> None:
        try:
            self._file: Any = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{quote(str(folder), 200)} cannot hold what is spilled, {cause(error)}; "
                "give a folder of yours"
            ) from None
        self._limit = nbytes
        self._end = self._num_blocks = 0
        self._waiting: deque[_Place | object] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put_other(self, other: object) -> None:
        self._waiting.append(other)

    def put(self, given: Given) -> bool:
        """False if there is no room for it, and nothing has changed."""
        data = _dumps(given)
        if self._end + len(data) > self._limit:
            return False
        try:
            self._file.seek(self._end)
            done = self._file.write(data)
        except OSError:
            return False  # this disk is full too: as good as the bound
        if done != len(data):
            return False
        self._waiting.append(_Place(self._end, len(data)))
        self._end += len(data)
        self._num_blocks += 1
        return True

    def get(self) -> object:
        """The oldest: a block, or another thing; the file is used anew when nothing is left."""
        first = self._waiting.popleft()
        if not isinstance(first, _Place):
            return first
        self._file.seek(first.offset)
        given = _loads(self._file.read(first.nbytes))
        self._num_blocks -= 1
        if not self._num_blocks:
            self._end = 0
            self._file.truncate(0)
        return given

    def close(self) -> None:
        self._file.close()


def _dumps(given: Given) -> bytes:
    block = given.block
    arrays = tuple(
        _Array(name, array.dtype.str, array.shape, array.tobytes())
        for name, array in block.arrays.items()
    )
    fidelity = {name: float(value) for name, value in block.fidelity.items()}
    return msgspec.msgpack.encode(
        _Spilled(
            block.origin, block.point, block.rows_N.tobytes(), arrays, fidelity, dict(given.notes)
        )
    )


def _loads(data: bytes) -> Given:
    read = msgspec.msgpack.decode(data, type=_Spilled)
    arrays = {
        one.name: np.frombuffer(one.data, one.dtype).reshape(one.shape) for one in read.arrays
    }
    rows_N = np.frombuffer(read.rows, ROW)
    return Given(Block(read.origin, read.point, rows_N, arrays, read.fidelity), read.notes)
