"""Takes blocks of one kind; gives the bytes of a sealed shard, and reads such bytes back checked.

A shard is a safetensors file. Its metadata has one key, `clairai`: the JSON of a `Head`, with the
digest of every tensor. The manifest has the SHA-256 of the file up to its first tensor, so every
byte is covered, and what is read can be checked without reading the rest.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from clairai.errors import PointError, StoreDamagedError
from clairai.points import Point
from clairai.store.disk import Buffer, Disk
from clairai.store.row_block import DTYPES, Origin, RequestNote, RowBlock
from clairai.store.shard_manifest import ShardEntry
from clairai.wire.ring_messages import ROW

SHARD_VERSION: Final = 1
COLUMNS: Final = ("stream", "position", "token_id", "choice", "phase", "flags")
POINT: Final = "point"
ROWS: Final = "rows."  # begins the names of the encoder's arrays
SMALL_NBYTES: Final = 1 << 18
MAX_HEAD_NBYTES: Final = 100_000_000  # safetensors' own bound
_STREAM: Final = re.compile("[0-9a-f]{16}")
_PREFIX_NBYTES: Final = 8  # the header's length, little-endian
_DTYPE_BY_NAME: Final[Mapping[str, np.dtype[Any]]] = {name: dtype for dtype, name in DTYPES.items()}


class ShardSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one choice of one request at one point: how many, and their positions' ends."""

    stream: str
    choice: int
    point: str
    rows: int
    first: int
    last: int


class ShardHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a shard says of itself."""

    version: int
    rows: int
    origin: Origin
    points: tuple[str, ...]
    spans: tuple[ShardSpan, ...]
    notes: dict[str, RequestNote]  # by stream
    fidelity: dict[str, tuple[float, float]]  # lowest and highest of each measure
    digests: dict[str, str]  # by tensor


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Safetensors' description of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class SealedShard:
    """A shard's bytes, in pieces, and what the manifest is told of it."""

    start: bytes
    pieces: Sequence[Buffer]
    nbytes: int
    head: ShardHead

    @property
    def start_digest(self) -> str:
        return hashlib.sha256(self.start).hexdigest()


def seal_safetensors(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    """The shard of these blocks, all of one kind."""
    return seal_contents(*shard_contents(blocks, notes))


def seal_contents(head: ShardHead, tensors: Mapping[str, list[NDArray[Any]]]) -> SealedShard:
    start = _file_start(head, tensors)
    pieces = [piece for arrays in tensors.values() for piece in _pieces(arrays)]
    return SealedShard(start, pieces, len(start) + sum(map(len, pieces)), head)


def shard_contents(
    blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]
) -> tuple[ShardHead, dict[str, list[NDArray[Any]]]]:
    """What a file of these blocks says of itself, and each tensor as the arrays it is made of."""
    points = tuple(sorted({block.point for block in blocks}))
    # As bytes: numpy would compare the types of all blocks, field by field.
    rows_N = np.frombuffer(b"".join(block.rows_N.tobytes() for block in blocks), ROW)
    point_N = np.repeat(
        np.array([points.index(block.point) for block in blocks], "<u2"),
        [block.num_rows for block in blocks],
    )
    tensors = _tensors(blocks, rows_N, point_N)
    head = ShardHead(
        version=SHARD_VERSION,
        rows=len(rows_N),
        origin=blocks[0].origin,
        points=points,
        spans=_spans(rows_N, point_N, points),
        notes=_notes_of_rows(rows_N, notes),
        fidelity=_fidelity(blocks),
        digests={name: chunked_digest(_pieces(arrays)) for name, arrays in tensors.items()},
    )
    return head, tensors


def _tensors(
    blocks: Sequence[RowBlock], rows_N: NDArray[np.void], point_N: NDArray[np.uint16]
) -> dict[str, list[NDArray[Any]]]:
    """The widest types come first, so that all are aligned."""
    found = {name: [np.ascontiguousarray(rows_N[name])] for name in COLUMNS}
    found[POINT] = [point_N]
    for name in blocks[0].arrays:
        found[ROWS + name] = _join_small([block.arrays[name] for block in blocks])
    order = sorted(found, key=lambda name: (-found[name][0].dtype.itemsize, name))
    return {name: found[name] for name in order}


def _join_small(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Small ones are put together: to hand each on by itself takes longer than to copy it."""
    is_small = sum(array.nbytes for array in arrays) < SMALL_NBYTES * len(arrays)
    return [np.concatenate(arrays)] if is_small else arrays


def _spans(
    rows_N: NDArray[np.void], point_N: NDArray[np.uint16], points: tuple[str, ...]
) -> tuple[ShardSpan, ...]:
    order = np.lexsort((rows_N["position"], point_N, rows_N["choice"], rows_N["stream"]))
    sorted_N, sorted_point_N = rows_N[order], point_N[order]
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for column_N in (sorted_N["stream"], sorted_N["choice"], sorted_point_N):
        is_new[1:] |= column_N[1:] != column_N[:-1]
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(order))
    return tuple(
        ShardSpan(
            stream=stream_hex(int(sorted_N["stream"][start])),
            choice=int(sorted_N["choice"][start]),
            point=points[int(sorted_point_N[start])],
            rows=int(end - start),
            first=int(sorted_N["position"][start]),
            last=int(sorted_N["position"][end - 1]),
        )
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def _notes_of_rows(
    rows_N: NDArray[np.void], notes: Mapping[int, RequestNote]
) -> dict[str, RequestNote]:
    streams = np.unique(rows_N["stream"]).tolist()
    return {stream_hex(stream): notes[stream] for stream in streams if stream in notes}


def _fidelity(blocks: Sequence[RowBlock]) -> dict[str, tuple[float, float]]:
    names = {name for block in blocks for name in block.fidelity}
    found = {n: [float(b.fidelity[n]) for b in blocks if n in b.fidelity] for n in sorted(names)}
    return {name: (min(values), max(values)) for name, values in found.items()}


def _pieces(arrays: Sequence[NDArray[Any]]) -> list[memoryview]:
    return [array.data.cast("B") for array in arrays if array.size]


def _file_start(head: ShardHead, tensors: Mapping[str, list[NDArray[Any]]]) -> bytes:
    """The file up to its first tensor, as safetensors wants it: padded with spaces to 8 bytes."""
    said: dict[str, object] = {"__metadata__": {"clairai": msgspec.json.encode(head).decode()}}
    offset = 0
    for name, arrays in tensors.items():
        end = offset + sum(array.nbytes for array in arrays)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        said[name] = TensorInfo(DTYPES[arrays[0].dtype], shape, (offset, end))
        offset = end
    body = msgspec.json.encode(said)
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(_PREFIX_NBYTES, "little") + body


def stream_hex(stream: int) -> str:
    """A stream as it is written in names and in JSON, whose readers may not know 64-bit numbers."""
    return f"{stream:016x}"


@dataclass(frozen=True)
class OpenShard:
    """A shard whose start is checked; its tensors are checked when they are asked for."""

    name: str
    head: ShardHead
    tensors: Mapping[str, TensorInfo]
    data: memoryview  # from the first tensor on
    checked: set[str] = field(default_factory=set)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor, in place; StoreDamagedError if one bit of it is not as committed."""
        about = self.tensors[name]
        raw = self.data[slice(*about.data_offsets)]
        if name not in self.checked:
            if chunked_digest([raw]) != self.head.digests[name]:
                raise damage_error(self.name, f"checksum of its tensor {name} is wrong")
            self.checked.add(name)
        flat: NDArray[Any] = np.frombuffer(raw, _DTYPE_BY_NAME[about.dtype])
        return flat.reshape(about.shape)


def open_safetensors(
    name: str, data: memoryview, *, head_nbytes: int, start_digest: str, nbytes: int
) -> OpenShard:
    """The shard in these bytes, as its line in the manifest says it must be."""
    if len(data) != nbytes:
        raise damage_error(name, f"it has {len(data)} bytes of {nbytes}")
    start = bytes(data[:head_nbytes])
    if hashlib.sha256(start).hexdigest() != start_digest:
        raise damage_error(name, "checksum of its start is wrong")
    if head_nbytes > MAX_HEAD_NBYTES or int.from_bytes(start[:8], "little") + 8 != head_nbytes:
        raise damage_error(name, "its start is not safetensors'")
    try:
        parts = msgspec.json.decode(start[_PREFIX_NBYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__"), type=dict[str, str])
        head = msgspec.json.decode(metadata["clairai"], type=ShardHead)
        tensors = {key: msgspec.json.decode(raw, type=TensorInfo) for key, raw in parts.items()}
    except (msgspec.DecodeError, KeyError, ValueError):
        raise damage_error(name, "its start says what we never write") from None
    check_layout(name, head, tensors, nbytes - head_nbytes)
    return OpenShard(name, head, tensors, data[head_nbytes:])


def check_layout(
    name: str, head: ShardHead, tensors: Mapping[str, TensorInfo], nbytes: int
) -> None:
    """Everything that indexing relies on, as safetensors' own reader checks it."""
    needed = {*COLUMNS, POINT}
    is_good = needed < tensors.keys() == head.digests.keys() and _has_valid_names(head)
    end = 0
    for key, about in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        is_good &= _is_column(key, about) if key in needed else key.startswith(ROWS)
        is_good &= about.shape[:1] == (head.rows,)
        is_good &= about.data_offsets == (end, end + _nbytes(about))
        end = about.data_offsets[1]
    if not is_good or end != nbytes:
        raise damage_error(name, "its tensors do not lie as they must")


def _has_valid_names(head: ShardHead) -> bool:
    """Whether names in it are names: a shard may be made by others, with good checksums."""
    try:
        known = {str(Point.parse(point)) for point in head.points}
    except PointError:
        return False
    streams = {span.stream for span in head.spans} | head.notes.keys()
    is_named = all(_STREAM.fullmatch(stream) for stream in streams)
    return (
        is_named and known >= {span.point for span in head.spans} and head.version == SHARD_VERSION
    )


def _nbytes(about: TensorInfo) -> int:
    """Of a type and shape that can be; -1 of any other."""
    dtype = _DTYPE_BY_NAME.get(about.dtype)
    if dtype is None or min(about.shape, default=-1) < 0:
        return -1
    return math.prod(about.shape) * dtype.itemsize


def _is_column(key: str, about: TensorInfo) -> bool:
    dtype = np.dtype("<u2") if key == POINT else ROW[key]
    return len(about.shape) == 1 and about.dtype == DTYPES[dtype]


def damage_error(name: str, why: str) -> StoreDamagedError:
    return StoreDamagedError(f"shard {name} is damaged, {why}; bring it back from a copy")


# MERGED
# Takes blocks of one request at one point; gives the bytes of one .npz file, and back.
#
# The same arrays as in a shard, and `clairai`: the bytes of the JSON of its `Head`. Numpy alone
# reads
# it. It is checked whole: its one checksum is in the manifest.


NPZ_HEAD: Final = "clairai"


def seal_npz(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    head, tensors = shard_contents(blocks, notes)
    arrays: dict[str, Any] = {name: np.concatenate(found) for name, found in tensors.items()}
    arrays[NPZ_HEAD] = np.frombuffer(msgspec.json.encode(head), np.uint8)
    target = io.BytesIO()
    np.savez(target, **arrays)
    data = target.getvalue()
    return SealedShard(data, (), len(data), head)


def open_npz(name: str, data: memoryview, *, digest: str, nbytes: int) -> OpenShard:
    """As `shard.opened`, for the other kind of file."""
    if len(data) != nbytes or hashlib.sha256(data).hexdigest() != digest:
        raise damage_error(name, "its checksum is wrong")
    try:
        arrays = _read_npz_arrays(bytes(data))
        head = msgspec.json.decode(arrays.pop(NPZ_HEAD).tobytes(), type=ShardHead)
    except (zipfile.BadZipFile, msgspec.DecodeError, KeyError, ValueError, EOFError):
        raise damage_error(name, "it says what we never write") from None
    tensors, pieces, offset = {}, [], 0
    for key, array in arrays.items():
        end = offset + array.nbytes
        tensors[key] = TensorInfo(DTYPES.get(array.dtype, ""), array.shape, (offset, end))
        pieces.append(array.tobytes())
        offset = end
    check_layout(name, head, tensors, offset)
    return OpenShard(name, head, tensors, memoryview(b"".join(pieces)))


def _read_npz_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise ValueError("we store and do not compress")
            found[info.filename.removesuffix(".npy")] = npy.read_array(io.BytesIO(file.read(info)))
    return found


# MERGED
# Takes an entry of the manifest; gives the file it names, opened and checked.


def open_shard(disk: Disk, entry: ShardEntry) -> OpenShard:
    """Its start is checked; StoreDamagedError if it is not what was committed."""
    try:
        data = disk.view(entry.name)
    except OSError as error:
        raise damage_error(entry.name, f"it cannot be read ({error.strerror})") from None
    if entry.name.endswith(".npz"):
        found = open_npz(entry.name, data, digest=entry.head_digest, nbytes=entry.nbytes)
    else:
        found = open_safetensors(
            entry.name,
            data,
            head_nbytes=entry.head_nbytes,
            start_digest=entry.head_digest,
            nbytes=entry.nbytes,
        )
    head = found.head
    if (head.rows, head.origin, head.points) != (entry.rows, entry.origin, entry.points):
        raise damage_error(entry.name, "it is not what the manifest says")
    return found


# MERGED
# Takes the bytes of a tensor, in pieces; gives their digest, computed by several threads at once.
#
# The digest is the SHA-256, in hex, of the SHA-256s (32 bytes each) of every 4 MiB: one thread
# alone
# computes SHA-256 more slowly than good disks write.


CHUNK_NBYTES: Final = 4 << 20
MAX_THREADS: Final = 4

Chunk = list[memoryview]


def chunked_digest(pieces: Sequence[memoryview]) -> str:
    """However the bytes are cut into pieces, the digest is the same."""
    chunks = list(_chunks(pieces))
    num_threads = min(len(chunks), MAX_THREADS, os.cpu_count() or 1)
    if num_threads < 2:
        return _digest_of_digests(map(_chunk_digest, chunks))
    with ThreadPoolExecutor(num_threads) as pool:
        return _digest_of_digests(pool.map(_chunk_digest, chunks))


def _digest_of_digests(digests: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunks(pieces: Sequence[memoryview]) -> Iterator[Chunk]:
    chunk: Chunk = []
    room = CHUNK_NBYTES
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            part = piece[offset : offset + room]
            chunk.append(part)
            offset, room = offset + len(part), room - len(part)
            if not room:
                yield chunk
                chunk, room = [], CHUNK_NBYTES
    if chunk:
        yield chunk


def _chunk_digest(chunk: Chunk) -> bytes:
    found = hashlib.sha256()
    for part in chunk:
        found.update(part)
    return found.digest()
