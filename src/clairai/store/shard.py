"""Takes blocks of one kind; gives the bytes of a sealed shard, and reads such bytes back checked.

A shard is a safetensors file. Its metadata has one key, `clairai`: the JSON of a `Head`, with the
digest of every tensor. The manifest has the SHA-256 of the file up to its first tensor, so every
byte is covered, and what is read can be checked without reading the rest.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import PointError, StoreDamagedError
from clairai.points import Point
from clairai.store.digest import digest
from clairai.store.disk import Buffer
from clairai.store.rows import DTYPES, Block, Note, Origin
from clairai.wire import ROW

VERSION: Final = 1
COLUMNS: Final = ("stream", "position", "token_id", "choice", "phase", "flags")
POINT: Final = "point"
ROWS: Final = "rows."  # begins the names of the encoder's arrays
SMALL_NBYTES: Final = 1 << 18
MAX_HEAD_NBYTES: Final = 100_000_000  # safetensors' own bound
_STREAM: Final = re.compile("[0-9a-f]{16}")
_PREFIX_NBYTES: Final = 8  # the header's length, little-endian
_BY_NAME: Final[Mapping[str, np.dtype[Any]]] = {name: dtype for dtype, name in DTYPES.items()}


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one choice of one request at one point: how many, and their positions' ends."""

    stream: str
    choice: int
    point: str
    rows: int
    first: int
    last: int


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a shard says of itself."""

    version: int
    rows: int
    origin: Origin
    points: tuple[str, ...]
    spans: tuple[Span, ...]
    notes: dict[str, Note]  # by stream
    fidelity: dict[str, tuple[float, float]]  # lowest and highest of each measure
    digests: dict[str, str]  # by tensor


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Safetensors' description of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Sealed:
    """A shard's bytes, in pieces, and what the manifest is told of it."""

    start: bytes
    pieces: Sequence[Buffer]
    nbytes: int
    head: Head

    @property
    def start_digest(self) -> str:
        return hashlib.sha256(self.start).hexdigest()


def seal(blocks: Sequence[Block], notes: Mapping[int, Note]) -> Sealed:
    """The shard of these blocks, all of one kind."""
    return sealed(*parts(blocks, notes))


def sealed(head: Head, tensors: Mapping[str, list[NDArray[Any]]]) -> Sealed:
    start = _start(head, tensors)
    pieces = [piece for arrays in tensors.values() for piece in _pieces(arrays)]
    return Sealed(start, pieces, len(start) + sum(map(len, pieces)), head)


def parts(
    blocks: Sequence[Block], notes: Mapping[int, Note]
) -> tuple[Head, dict[str, list[NDArray[Any]]]]:
    """What a file of these blocks says of itself, and each tensor as the arrays it is made of."""
    points = tuple(sorted({block.point for block in blocks}))
    # As bytes: numpy would compare the types of all blocks, field by field.
    rows_N = np.frombuffer(b"".join(block.rows_N.tobytes() for block in blocks), ROW)
    point_N = np.repeat(
        np.array([points.index(block.point) for block in blocks], "<u2"),
        [block.num_rows for block in blocks],
    )
    tensors = _tensors(blocks, rows_N, point_N)
    head = Head(
        version=VERSION,
        rows=len(rows_N),
        origin=blocks[0].origin,
        points=points,
        spans=_spans(rows_N, point_N, points),
        notes=_noted(rows_N, notes),
        fidelity=_fidelity(blocks),
        digests={name: digest(_pieces(arrays)) for name, arrays in tensors.items()},
    )
    return head, tensors


def _tensors(
    blocks: Sequence[Block], rows_N: NDArray[np.void], point_N: NDArray[np.uint16]
) -> dict[str, list[NDArray[Any]]]:
    """The widest types come first, so that all are aligned."""
    found = {name: [np.ascontiguousarray(rows_N[name])] for name in COLUMNS}
    found[POINT] = [point_N]
    for name in blocks[0].arrays:
        found[ROWS + name] = _fewer([block.arrays[name] for block in blocks])
    order = sorted(found, key=lambda name: (-found[name][0].dtype.itemsize, name))
    return {name: found[name] for name in order}


def _fewer(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Small ones are put together: to hand each on by itself takes longer than to copy it."""
    is_small = sum(array.nbytes for array in arrays) < SMALL_NBYTES * len(arrays)
    return [np.concatenate(arrays)] if is_small else arrays


def _spans(
    rows_N: NDArray[np.void], point_N: NDArray[np.uint16], points: tuple[str, ...]
) -> tuple[Span, ...]:
    order = np.lexsort((rows_N["position"], point_N, rows_N["choice"], rows_N["stream"]))
    sorted_N, sorted_point_N = rows_N[order], point_N[order]
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for column_N in (sorted_N["stream"], sorted_N["choice"], sorted_point_N):
        is_new[1:] |= column_N[1:] != column_N[:-1]
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(order))
    return tuple(
        Span(
            stream=named(int(sorted_N["stream"][start])),
            choice=int(sorted_N["choice"][start]),
            point=points[int(sorted_point_N[start])],
            rows=int(end - start),
            first=int(sorted_N["position"][start]),
            last=int(sorted_N["position"][end - 1]),
        )
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def _noted(rows_N: NDArray[np.void], notes: Mapping[int, Note]) -> dict[str, Note]:
    streams = np.unique(rows_N["stream"]).tolist()
    return {named(stream): notes[stream] for stream in streams if stream in notes}


def _fidelity(blocks: Sequence[Block]) -> dict[str, tuple[float, float]]:
    names = {name for block in blocks for name in block.fidelity}
    found = {n: [float(b.fidelity[n]) for b in blocks if n in b.fidelity] for n in sorted(names)}
    return {name: (min(values), max(values)) for name, values in found.items()}


def _pieces(arrays: Sequence[NDArray[Any]]) -> list[memoryview]:
    return [array.data.cast("B") for array in arrays if array.size]


def _start(head: Head, tensors: Mapping[str, list[NDArray[Any]]]) -> bytes:
    """The file up to its first tensor, as safetensors wants it: padded with spaces to 8 bytes."""
    said: dict[str, object] = {"__metadata__": {"clairai": msgspec.json.encode(head).decode()}}
    offset = 0
    for name, arrays in tensors.items():
        end = offset + sum(array.nbytes for array in arrays)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        said[name] = Tensor(DTYPES[arrays[0].dtype], shape, (offset, end))
        offset = end
    body = msgspec.json.encode(said)
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(_PREFIX_NBYTES, "little") + body


def named(stream: int) -> str:
    """A stream as it is written in names and in JSON, whose readers may not know 64-bit numbers."""
    return f"{stream:016x}"


@dataclass(frozen=True)
class Opened:
    """A shard whose start is checked; its tensors are checked when they are asked for."""

    name: str
    head: Head
    tensors: Mapping[str, Tensor]
    data: memoryview  # from the first tensor on
    checked: set[str] = field(default_factory=set)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor, in place; StoreDamagedError if one bit of it is not as committed."""
        about = self.tensors[name]
        raw = self.data[slice(*about.data_offsets)]
        if name not in self.checked:
            if digest([raw]) != self.head.digests[name]:
                raise damaged(self.name, f"checksum of its tensor {name} is wrong")
            self.checked.add(name)
        flat: NDArray[Any] = np.frombuffer(raw, _BY_NAME[about.dtype])
        return flat.reshape(about.shape)


def opened(
    name: str, data: memoryview, *, head_nbytes: int, start_digest: str, nbytes: int
) -> Opened:
    """The shard in these bytes, as its line in the manifest says it must be."""
    if len(data) != nbytes:
        raise damaged(name, f"it has {len(data)} bytes of {nbytes}")
    start = bytes(data[:head_nbytes])
    if hashlib.sha256(start).hexdigest() != start_digest:
        raise damaged(name, "checksum of its start is wrong")
    if head_nbytes > MAX_HEAD_NBYTES or int.from_bytes(start[:8], "little") + 8 != head_nbytes:
        raise damaged(name, "its start is not safetensors'")
    try:
        parts = msgspec.json.decode(start[_PREFIX_NBYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__"), type=dict[str, str])
        head = msgspec.json.decode(metadata["clairai"], type=Head)
        tensors = {key: msgspec.json.decode(raw, type=Tensor) for key, raw in parts.items()}
    except (msgspec.DecodeError, KeyError, ValueError):
        raise damaged(name, "its start says what we never write") from None
    check(name, head, tensors, nbytes - head_nbytes)
    return Opened(name, head, tensors, data[head_nbytes:])


def check(name: str, head: Head, tensors: Mapping[str, Tensor], nbytes: int) -> None:
    """Everything that indexing relies on, as safetensors' own reader checks it."""
    needed = {*COLUMNS, POINT}
    is_good = needed < tensors.keys() == head.digests.keys() and _is_sound(head)
    end = 0
    for key, about in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        is_good &= _is_column(key, about) if key in needed else key.startswith(ROWS)
        is_good &= about.shape[:1] == (head.rows,)
        is_good &= about.data_offsets == (end, end + _nbytes(about))
        end = about.data_offsets[1]
    if not is_good or end != nbytes:
        raise damaged(name, "its tensors do not lie as they must")


def _is_sound(head: Head) -> bool:
    """Whether names in it are names: a shard may be made by others, with good checksums."""
    try:
        known = {str(Point.parse(point)) for point in head.points}
    except PointError:
        return False
    streams = {span.stream for span in head.spans} | head.notes.keys()
    is_named = all(_STREAM.fullmatch(stream) for stream in streams)
    return is_named and known >= {span.point for span in head.spans} and head.version == VERSION


def _nbytes(about: Tensor) -> int:
    """Of a type and shape that can be; -1 of any other."""
    dtype = _BY_NAME.get(about.dtype)
    if dtype is None or min(about.shape, default=-1) < 0:
        return -1
    return math.prod(about.shape) * dtype.itemsize


def _is_column(key: str, about: Tensor) -> bool:
    dtype = np.dtype("<u2") if key == POINT else ROW[key]
    return len(about.shape) == 1 and about.dtype == DTYPES[dtype]


def damaged(name: str, why: str) -> StoreDamagedError:
    return StoreDamagedError(f"shard {name} is damaged, {why}; bring it back from a copy")
