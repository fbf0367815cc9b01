"""The shard file: how blocks become a sealed file, and how such a file is opened and checked.

A shard is a safetensors file. Its metadata has one key, `clairai`: the JSON of a `ShardHead`, with
the digest of every tensor. The manifest has the SHA-256 of the file up to its first tensor. So
every byte is covered by a checksum, and a part can be checked without reading the rest.

The layout `npz` stores the same arrays in an .npz file that numpy alone can read, with the head as
the bytes of the array `clairai`. Its one checksum, in the manifest, covers the whole file.

A tensor's digest is the SHA-256, in hex, of the SHA-256s (32 bytes each) of its chunks of 4 MiB:
with one SHA-256 over everything, a single thread would be slower than a good disk.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import struct
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
ROWS: Final = "rows."  # the prefix of the names of the encoder's arrays
NPZ_HEAD: Final = "clairai"
SMALL_NBYTES: Final = 1 << 18
MAX_HEAD_NBYTES: Final = 100_000_000  # safetensors' own bound
CHUNK_NBYTES: Final = 4 << 20
MAX_DIGEST_THREADS: Final = 4
_STREAM: Final = re.compile("[0-9a-f]{16}")
_PREFIX_NBYTES: Final = 8  # the header's length, little-endian
# Of zipfile: NotImplementedError for a version that it does not know, RuntimeError for a password.
_BAD_NPZ: Final = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error, OSError),
    *(msgspec.DecodeError, KeyError, ValueError, EOFError),
)
_DTYPE_BY_NAME: Final[Mapping[str, np.dtype[Any]]] = {name: dtype for dtype, name in DTYPES.items()}


class ShardSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one choice of one request at one point, and their lowest and highest position."""

    stream: str
    choice: int
    point: str
    rows: int
    first: int
    last: int


class ShardHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a shard says about itself."""

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
    """The bytes of a shard: a start, then the tensors in pieces that are not copied."""

    start: bytes
    pieces: Sequence[Buffer]
    nbytes: int
    head: ShardHead
    name: str = ""  # of the file, if it is one

    @property
    def start_digest(self) -> str:
        return hashlib.sha256(self.start).hexdigest()

    def entry(self) -> ShardEntry:
        """The shard's entry in the manifest."""
        head = self.head
        streams = [span.stream for span in head.spans] or ["0" * 16]
        return ShardEntry(
            name=self.name,
            nbytes=self.nbytes,
            head_nbytes=len(self.start),
            head_digest=self.start_digest,
            rows=head.rows,
            requests=len(set(streams)) if head.spans else 0,
            first_stream=min(streams),
            last_stream=max(streams),
            points=head.points,
            origin=head.origin,
        )


def stream_hex(stream: int) -> str:
    """A stream as names and JSON have it: not every reader knows 64-bit numbers."""
    return f"{stream:016x}"


# Sealing


def seal_safetensors(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    """Seal blocks of one kind as a safetensors file."""
    return seal_contents(*shard_contents(blocks, notes))


def seal_contents(head: ShardHead, tensors: Mapping[str, list[NDArray[Any]]]) -> SealedShard:
    start = _file_start(head, tensors)
    pieces = [piece for arrays in tensors.values() for piece in _pieces(arrays)]
    return SealedShard(start, pieces, len(start) + sum(map(len, pieces)), head)


def seal_npz(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    """Seal blocks of one kind as an .npz file."""
    head, tensors = shard_contents(blocks, notes)
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in tensors.items()}
    arrays[NPZ_HEAD] = np.frombuffer(msgspec.json.encode(head), np.uint8)
    target = io.BytesIO()
    np.savez(target, **arrays)
    data = target.getvalue()
    return SealedShard(data, (), len(data), head)


def shard_contents(
    blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]
) -> tuple[ShardHead, dict[str, list[NDArray[Any]]]]:
    """Return the head of a file of these blocks, and each tensor as the arrays it consists of."""
    points = tuple(sorted({block.point for block in blocks}))
    # Joined as bytes: np.concatenate would compare the structured types of all blocks.
    rows_N = np.frombuffer(b"".join(block.rows_N.tobytes() for block in blocks), ROW)
    point_N = np.repeat(
        np.array([points.index(block.point) for block in blocks], "<u2"),
        [block.num_rows for block in blocks],
    )
    tensors = _tensors(blocks, rows_N, point_N)
    streams = np.unique(rows_N["stream"]).tolist()
    head = ShardHead(
        version=SHARD_VERSION,
        rows=len(rows_N),
        origin=blocks[0].origin,
        points=points,
        spans=_spans(rows_N, point_N, points),
        notes={stream_hex(stream): notes[stream] for stream in streams if stream in notes},
        fidelity=_fidelity(blocks),
        digests={name: chunked_digest(_pieces(arrays)) for name, arrays in tensors.items()},
    )
    return head, tensors


def _tensors(
    blocks: Sequence[RowBlock], rows_N: NDArray[np.void], point_N: NDArray[np.uint16]
) -> dict[str, list[NDArray[Any]]]:
    """All tensors, those of the widest types first, so that every tensor is aligned."""
    tensors = {name: [np.ascontiguousarray(rows_N[name])] for name in COLUMNS}
    tensors[POINT] = [point_N]
    for name in blocks[0].arrays:
        tensors[ROWS + name] = _join_small([block.arrays[name] for block in blocks])
    order = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    return {name: tensors[name] for name in order}


def _join_small(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Join arrays that are small on average: copying them is faster than writing each by itself."""
    is_small = sum(array.nbytes for array in arrays) < SMALL_NBYTES * len(arrays)
    return [np.concatenate(arrays)] if is_small else arrays


def _spans(
    rows_N: NDArray[np.void], point_N: NDArray[np.uint16], points: tuple[str, ...]
) -> tuple[ShardSpan, ...]:
    order = np.lexsort((rows_N["position"], point_N, rows_N["choice"], rows_N["stream"]))
    sorted_N, sorted_point_N = rows_N[order], point_N[order]
    is_first_N = np.zeros(len(order), bool)
    is_first_N[:1] = True
    for column_N in (sorted_N["stream"], sorted_N["choice"], sorted_point_N):
        is_first_N[1:] |= column_N[1:] != column_N[:-1]
    starts = np.flatnonzero(is_first_N)
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


def _fidelity(blocks: Sequence[RowBlock]) -> dict[str, tuple[float, float]]:
    names = sorted({name for block in blocks for name in block.fidelity})
    measured = {n: [float(b.fidelity[n]) for b in blocks if n in b.fidelity] for n in names}
    return {name: (min(values), max(values)) for name, values in measured.items()}


def _pieces(arrays: Sequence[NDArray[Any]]) -> list[memoryview]:
    return [array.data.cast("B") for array in arrays if array.size]


def _file_start(head: ShardHead, tensors: Mapping[str, list[NDArray[Any]]]) -> bytes:
    """The safetensors file up to its first tensor, padded with spaces to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"clairai": msgspec.json.encode(head).decode()}}
    offset = 0
    for name, arrays in tensors.items():
        end = offset + sum(array.nbytes for array in arrays)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        header[name] = TensorInfo(DTYPES[arrays[0].dtype], shape, (offset, end))
        offset = end
    body = msgspec.json.encode(header)
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(_PREFIX_NBYTES, "little") + body


def chunked_digest(pieces: Sequence[memoryview]) -> str:
    """The digest of a tensor. It does not depend on how the bytes are cut into pieces."""
    chunks = list(_chunks(pieces))
    num_threads = min(len(chunks), MAX_DIGEST_THREADS, os.cpu_count() or 1)
    if num_threads < 2:
        return _digest_of_digests(map(_chunk_digest, chunks))
    with ThreadPoolExecutor(num_threads) as pool:
        return _digest_of_digests(pool.map(_chunk_digest, chunks))


def _digest_of_digests(digests: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunks(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the bytes into chunks of CHUNK_NBYTES, each a list of parts of the pieces."""
    chunk: list[memoryview] = []
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


def _chunk_digest(chunk: list[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in chunk:
        digest.update(part)
    return digest.digest()


# Opening


@dataclass(frozen=True)
class OpenShard:
    """A shard whose start is checked; each tensor is checked the first time it is read."""

    name: str
    head: ShardHead
    tensors: Mapping[str, TensorInfo]
    data: memoryview  # from the first tensor on
    checked: set[str] = field(default_factory=set)

    def array(self, name: str) -> NDArray[Any]:
        """A tensor, not copied. Raises StoreDamagedError if one bit differs from the commit."""
        tensor = self.tensors[name]
        raw = self.data[slice(*tensor.data_offsets)]
        if name not in self.checked:
            if chunked_digest([raw]) != self.head.digests[name]:
                raise damage_error(self.name, f"checksum of its tensor {name} is wrong")
            self.checked.add(name)
        flat: NDArray[Any] = np.frombuffer(raw, _DTYPE_BY_NAME[tensor.dtype])
        return flat.reshape(tensor.shape)


def open_shard(disk: Disk, entry: ShardEntry) -> OpenShard:
    """Open the file of a manifest entry, and check its start.

    Raises StoreDamagedError if it is not what was committed.
    """
    try:
        data = disk.view(entry.name)
    except OSError as error:
        raise damage_error(entry.name, f"it cannot be read ({error.strerror})") from None
    if entry.name.endswith(".npz"):
        shard = open_npz(entry.name, data, digest=entry.head_digest, nbytes=entry.nbytes)
    else:
        shard = open_safetensors(
            entry.name,
            data,
            head_nbytes=entry.head_nbytes,
            start_digest=entry.head_digest,
            nbytes=entry.nbytes,
        )
    head = shard.head
    if (head.rows, head.origin, head.points) != (entry.rows, entry.origin, entry.points):
        raise damage_error(entry.name, "it is not what the manifest says")
    return shard


def open_safetensors(
    name: str, data: memoryview, *, head_nbytes: int, start_digest: str, nbytes: int
) -> OpenShard:
    """Open a shard in these bytes, given what its manifest entry says about them."""
    if len(data) != nbytes:
        raise damage_error(name, f"it has {len(data)} bytes of {nbytes}")
    start = bytes(data[:head_nbytes])
    if hashlib.sha256(start).hexdigest() != start_digest:
        raise damage_error(name, "checksum of its start is wrong")
    if head_nbytes > MAX_HEAD_NBYTES or int.from_bytes(start[:8], "little") + 8 != head_nbytes:
        raise damage_error(name, "its start is not that of a safetensors file")
    try:
        parts = msgspec.json.decode(start[_PREFIX_NBYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__"), type=dict[str, str])
        head = msgspec.json.decode(metadata["clairai"], type=ShardHead)
        tensors = {key: msgspec.json.decode(raw, type=TensorInfo) for key, raw in parts.items()}
    except (msgspec.DecodeError, KeyError, ValueError):
        raise damage_error(name, "the content of its start is invalid") from None
    _check_layout(name, head, tensors, nbytes - head_nbytes)
    return OpenShard(name, head, tensors, data[head_nbytes:])


def open_npz(name: str, data: memoryview, *, digest: str, nbytes: int) -> OpenShard:
    """Open an .npz shard in these bytes, given what its manifest entry says about them."""
    if len(data) != nbytes or hashlib.sha256(data).hexdigest() != digest:
        raise damage_error(name, "its checksum is wrong")
    try:
        arrays = _read_npz_arrays(bytes(data))
        head = msgspec.json.decode(arrays.pop(NPZ_HEAD).tobytes(), type=ShardHead)
    except _BAD_NPZ:
        raise damage_error(name, "its content is invalid") from None
    tensors, pieces, offset = {}, [], 0
    for key, array in arrays.items():
        end = offset + array.nbytes
        tensors[key] = TensorInfo(DTYPES.get(array.dtype, ""), array.shape, (offset, end))
        pieces.append(array.tobytes())
        offset = end
    _check_layout(name, head, tensors, offset)
    return OpenShard(name, head, tensors, memoryview(b"".join(pieces)))


def _read_npz_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise ValueError("shards are never compressed")
            name = info.filename.removesuffix(".npy")
            arrays[name] = npy.read_array(io.BytesIO(file.read(info)))
    return arrays


def _check_layout(
    name: str, head: ShardHead, tensors: Mapping[str, TensorInfo], nbytes: int
) -> None:
    """Check everything that reading by index relies on, as safetensors' own reader does."""
    required = {*COLUMNS, POINT}
    is_valid = required < tensors.keys() == head.digests.keys() and _has_valid_names(head)
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        is_valid &= _is_column(key, tensor) if key in required else key.startswith(ROWS)
        is_valid &= tensor.shape[:1] == (head.rows,)
        is_valid &= tensor.data_offsets == (end, end + _nbytes(tensor))
        end = tensor.data_offsets[1]
    if not is_valid or end != nbytes:
        raise damage_error(name, "its tensors are misplaced")


def _has_valid_names(head: ShardHead) -> bool:
    """Whether points and streams are well-formed: others can make shards with right checksums."""
    try:
        points = {str(Point.parse(point)) for point in head.points}
    except PointError:
        return False
    streams = {span.stream for span in head.spans} | head.notes.keys()
    are_streams = all(_STREAM.fullmatch(stream) for stream in streams)
    has_points = points >= {span.point for span in head.spans}
    return are_streams and has_points and head.version == SHARD_VERSION


def _nbytes(tensor: TensorInfo) -> int:
    """The size of a tensor, or -1 if its type or shape is impossible."""
    dtype = _DTYPE_BY_NAME.get(tensor.dtype)
    if dtype is None or min(tensor.shape, default=-1) < 0:
        return -1
    return math.prod(tensor.shape) * dtype.itemsize


def _is_column(key: str, tensor: TensorInfo) -> bool:
    dtype = np.dtype("<u2") if key == POINT else ROW[key]
    return len(tensor.shape) == 1 and tensor.dtype == DTYPES[dtype]


def damage_error(name: str, why: str) -> StoreDamagedError:
    return StoreDamagedError(f"shard {name} is damaged, {why}; restore it from a copy")
