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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import IO, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from clairai.errors import PointError, StoreDamagedError
from clairai.points import Point
from clairai.store.disk import Buffer, ByteSource, ReadableDisk
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
MAX_GAP_NBYTES: Final = 1 << 14  # rows that lie closer are read at once, with what is between them
READ_NBYTES: Final = 1 << 20
MAX_NPZ_ARRAYS: Final = 64
_STREAM: Final = re.compile("[0-9a-f]{16}")
_PREFIX_NBYTES: Final = 8  # the header's length, little-endian
# As numpy writes it. Its own reader evaluates a header, and raises what the tokenizer raises.
_NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"
_NPY_HEADER: Final = re.compile(
    rb"\{'descr': '([<|][fiu][1248])', 'fortran_order': False, 'shape': "
    rb"\(((?:\d{1,19}, ?){0,8}(?:\d{1,19})?)\), \} *\n"
)
# Of zipfile: NotImplementedError for a version that it does not know, RuntimeError for a password.
_BAD_NPZ: Final = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error, OSError),
    *(msgspec.DecodeError, LookupError, ValueError, EOFError),
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
    seal_offset: int = 0  # of the seal in the start

    @property
    def start_digest(self) -> str:
        return start_digest(self.start)

    def entry(self) -> ShardEntry:
        """The shard's entry in the manifest."""
        return make_entry(
            self.head,
            name=self.name,
            nbytes=self.nbytes,
            head_nbytes=len(self.start),
            head_digest=self.start_digest,
        )


def make_entry(
    head: ShardHead, *, name: str, nbytes: int, head_nbytes: int, head_digest: str
) -> ShardEntry:
    streams = [span.stream for span in head.spans] or ["0" * 16]
    return ShardEntry(
        name=name,
        nbytes=nbytes,
        head_nbytes=head_nbytes,
        head_digest=head_digest,
        rows=head.rows,
        requests=len(set(streams)) if head.spans else 0,
        first_stream=min(streams),
        last_stream=max(streams),
        points=head.points,
        origin=head.origin,
    )


@dataclass(frozen=True)
class CommitSeal:
    """What a shard's file says about its commit, for whoever has lost the manifest.

    As text it has a fixed length: version, sequence, shards and time in hex, then the SHA-256 of
    the file up to its first tensor (of all of an .npz), with zeros in its own place.
    """

    sequence: int  # of the commit in the manifest
    shards: int  # of the commit
    time_ns: int  # when it was sealed

    def text(self, digest: str = "0" * 64) -> str:
        return f"1 {self.sequence:016x} {self.shards:08x} {self.time_ns:016x} {digest}"


NO_SEAL: Final = CommitSeal(0, 0, 0).text()
_SEAL_START: Final = b'{"__metadata__":{"clairai_seal":"'
_SEAL_OFFSET: Final = _PREFIX_NBYTES + len(_SEAL_START)
_SEAL: Final = re.compile(rb"1 ([0-9a-f]{16}) ([0-9a-f]{8}) ([0-9a-f]{16}) ([0-9a-f]{64})")


def put_seal(shard: SealedShard, seal: CommitSeal) -> SealedShard:
    """The same shard, which says what it was committed with."""
    return replace(shard, start=_with_seal(shard.start, shard.seal_offset, seal))


def _with_seal(start: bytes, offset: int, seal: CommitSeal) -> bytes:
    before, behind = start[:offset], start[offset + len(NO_SEAL) :]
    digest = start_digest(before + seal.text().encode() + behind)
    return before + seal.text(digest).encode() + behind


@dataclass(frozen=True)
class NewSeal:
    """The bytes that seal a shard anew, and the digest that its start then has."""

    offset: int
    text: bytes
    start_digest: str


def renew_seal(start: bytes, seal: CommitSeal) -> NewSeal:
    """For a shard that becomes part of another commit. ValueError if the start has no seal."""
    if start[_PREFIX_NBYTES:_SEAL_OFFSET] != _SEAL_START:
        raise ValueError("it has no seal")
    sealed = _with_seal(start, _SEAL_OFFSET, seal)
    text = sealed[_SEAL_OFFSET : _SEAL_OFFSET + len(NO_SEAL)]
    return NewSeal(_SEAL_OFFSET, text, start_digest(sealed))


def read_seal(data: ByteSource, head_nbytes: int) -> CommitSeal | None:
    """The seal of a shard, or None if it has none, as those of clairai 0.1.

    Raises ValueError if one bit of what it covers was changed.
    """
    is_npz = head_nbytes == len(data)
    first = len(data) - len(NO_SEAL) if is_npz else _SEAL_OFFSET
    if not is_npz and bytes(data[_PREFIX_NBYTES:_SEAL_OFFSET]) != _SEAL_START:
        return None
    found = _SEAL.fullmatch(bytes(data[max(first, 0) : first + len(NO_SEAL)]))
    if found is None:
        if is_npz:
            return None
        raise ValueError("its seal is not one")
    digest, digest_at = hashlib.sha256(), first + found.start(4)
    for low, high in ((0, digest_at), (digest_at, digest_at + 64), (digest_at + 64, head_nbytes)):
        digest.update(b"0" * 64 if low == digest_at else data[low:high])
    if digest.hexdigest() != found[4].decode():
        raise ValueError("the checksum of its start is wrong")
    return CommitSeal(*(int(part, 16) for part in found.groups()[:3]))


def start_digest(start: bytes) -> str:
    return hashlib.sha256(start).hexdigest()


def stream_hex(stream: int) -> str:
    """A stream as names and JSON have it: not every reader knows 64-bit numbers."""
    return f"{stream:016x}"


# Sealing


def seal_safetensors(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    """Seal blocks of one kind as a safetensors file."""
    return seal_contents(*shard_contents(blocks, notes))


def seal_contents(head: ShardHead, tensors: Mapping[str, list[NDArray[Any]]]) -> SealedShard:
    shapes = {
        name: (arrays[0].dtype, (sum(map(len, arrays)), *arrays[0].shape[1:]))
        for name, arrays in tensors.items()
    }
    start = file_start(head, shapes, seal=NO_SEAL)
    pieces = [piece for arrays in tensors.values() for piece in _pieces(arrays)]
    nbytes = len(start) + sum(map(len, pieces))
    return SealedShard(start, pieces, nbytes, head, seal_offset=_SEAL_OFFSET)


def seal_npz(blocks: Sequence[RowBlock], notes: Mapping[int, RequestNote]) -> SealedShard:
    """Seal blocks of one kind as an .npz file."""
    head, tensors = shard_contents(blocks, notes)
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in tensors.items()}
    arrays[NPZ_HEAD] = np.frombuffer(msgspec.json.encode(head), np.uint8)
    target = io.BytesIO()
    np.savez(target, **arrays)
    # The seal is the comment of the zip file, whose length is its last two bytes.
    plain = target.getvalue()
    data = plain[:-2] + len(NO_SEAL).to_bytes(2, "little") + NO_SEAL.encode()
    return SealedShard(data, (), len(data), head, seal_offset=len(plain))


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
        spans=find_spans(rows_N, point_N, points),
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
    dtypes = {name: arrays[0].dtype for name, arrays in tensors.items()}
    return {name: tensors[name] for name in tensor_order(dtypes)}


def tensor_order(dtypes: Mapping[str, np.dtype[Any]]) -> list[str]:
    return sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))


def _join_small(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Join arrays that are small on average: copying them is faster than writing each by itself."""
    is_small = sum(array.nbytes for array in arrays) < SMALL_NBYTES * len(arrays)
    return [np.concatenate(arrays)] if is_small else arrays


def find_spans(
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


def file_start(
    head: ShardHead, shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], *, seal: str = ""
) -> bytes:
    """The safetensors file up to its first tensor, padded with spaces to 8 bytes."""
    metadata = {"clairai_seal": seal} if seal else {}
    metadata["clairai"] = msgspec.json.encode(head).decode()
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = TensorInfo(DTYPES[dtype], shape, (offset, end))
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


def digest_range(data: ByteSource, first: int, end: int) -> str:
    """The digest of a tensor in a file, of which a chunk for each thread is held at once."""

    def digest_at(offset: int) -> bytes:
        return hashlib.sha256(data[offset : min(offset + CHUNK_NBYTES, end)]).digest()

    offsets = range(first, end, CHUNK_NBYTES)
    num_threads = min(len(offsets), MAX_DIGEST_THREADS, os.cpu_count() or 1)
    if num_threads < 2:
        return _digest_of_digests(map(digest_at, offsets))
    with ThreadPoolExecutor(num_threads) as pool:
        return _digest_of_digests(pool.map(digest_at, offsets))


def plain_digest(data: ByteSource) -> str:
    """The SHA-256 of all bytes, in hex."""
    digest = hashlib.sha256()
    for offset in range(0, len(data), CHUNK_NBYTES):
        digest.update(data[offset : offset + CHUNK_NBYTES])
    return digest.hexdigest()


class RunningDigest:
    """The digest of a tensor whose bytes come one piece after the other."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._chunk, self._room = hashlib.sha256(), CHUNK_NBYTES

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        while len(view):
            part = view[: self._room]
            self._chunk.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if not self._room:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk, self._room = hashlib.sha256(), CHUNK_NBYTES

    def hexdigest(self) -> str:
        """Call it once, at the end."""
        if self._room < CHUNK_NBYTES:
            self._end_chunk()
        return _digest_of_digests(iter(self._digests))


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
class ShardTensors:
    """The tensors of a shard in its file; each is checked the first time it is read."""

    name: str  # of the shard
    infos: Mapping[str, TensorInfo]
    starts: Mapping[str, int]  # where each begins in the file
    digests: Mapping[str, str]
    data: ByteSource
    checked: set[str] = field(default_factory=set)

    def array(self, name: str) -> NDArray[Any]:
        """A whole tensor. Raises StoreDamagedError if one bit differs from the commit."""
        info, start = self.infos[name], self.starts[name]
        self.check(name)
        with self._reading():
            raw = self.data[start : start + _nbytes(info)]
        flat: NDArray[Any] = np.frombuffer(raw, self.dtype(name))
        return flat.reshape(info.shape)

    def rows(self, name: str, index_N: NDArray[np.intp]) -> NDArray[Any]:
        """These rows of a tensor, of which no more is held than they and what lies between them."""
        self.check(name)
        shape, row_nbytes = (len(index_N), *self.infos[name].shape[1:]), self.row_nbytes(name)
        if not row_nbytes or not len(index_N):
            return np.empty(shape, self.dtype(name))
        with self._reading():
            raw_NB = _gather(self.data, self.starts[name], row_nbytes, index_N)
        return raw_NB.view(self.dtype(name)).reshape(shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        return _DTYPE_BY_NAME[self.infos[name].dtype]

    def row_nbytes(self, name: str) -> int:
        return math.prod(self.infos[name].shape[1:]) * self.dtype(name).itemsize

    def check(self, name: str) -> None:
        """Raise StoreDamagedError if one bit of a tensor differs from the commit."""
        if name in self.checked:
            return
        start = self.starts[name]
        with self._reading():
            digest = digest_range(self.data, start, start + _nbytes(self.infos[name]))
        if digest != self.digests[name]:
            raise damage_error(self.name, f"checksum of its tensor {name} is wrong")
        self.checked.add(name)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise damage_error(self.name, f"it cannot be read ({error.strerror})") from None


def _gather(
    data: ByteSource, start: int, row_nbytes: int, index_N: NDArray[np.intp]
) -> NDArray[np.uint8]:
    """Read rows near each other at once: a pass over the file, in parts of READ_NBYTES or a row."""
    order_N = np.argsort(index_N, kind="stable")
    sorted_N = index_N[order_N]
    found_NB = np.empty((len(index_N), row_nbytes), np.uint8)
    for first, end in _extents(sorted_N, row_nbytes):
        low, high = int(sorted_N[first]), int(sorted_N[end - 1]) + 1
        raw = data[start + low * row_nbytes : start + high * row_nbytes]
        read_RB = np.frombuffer(raw, np.uint8).reshape(-1, row_nbytes)
        found_NB[order_N[first:end]] = read_RB[sorted_N[first:end] - low]
    return found_NB


def _extents(sorted_N: NDArray[np.intp], row_nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut sorted row numbers where they lie far apart, and so that each part is small."""
    gaps = np.flatnonzero(np.diff(sorted_N) * row_nbytes > MAX_GAP_NBYTES) + 1
    for first, end in pairwise([0, *gaps.tolist(), len(sorted_N)]):
        while first < end:
            limit = int(sorted_N[first]) + max(READ_NBYTES // row_nbytes, 1)
            cut = first + int(np.searchsorted(sorted_N[first:end], limit))
            yield first, cut
            first = cut


@dataclass(frozen=True)
class OpenShard:
    """A shard whose start is checked."""

    name: str
    head: ShardHead
    tensors: ShardTensors

    def array(self, name: str) -> NDArray[Any]:
        return self.tensors.array(name)


def open_shard(disk: ReadableDisk, entry: ShardEntry) -> OpenShard:
    """Open the file of a manifest entry, and check its start.

    Raises StoreDamagedError if it is not what was committed.
    """
    try:
        shard = _open_entry(disk, entry)
    except OSError as error:
        raise damage_error(entry.name, f"it cannot be read ({error.strerror})") from None
    head = shard.head
    if (head.rows, head.origin, head.points) != (entry.rows, entry.origin, entry.points):
        raise damage_error(entry.name, "it is not what the manifest says")
    return shard


def _open_entry(disk: ReadableDisk, entry: ShardEntry) -> OpenShard:
    data = disk.view(entry.name)
    if entry.name.endswith(".npz"):
        return open_npz(entry.name, data, digest=entry.head_digest, nbytes=entry.nbytes)
    return open_safetensors(
        entry.name,
        data,
        head_nbytes=entry.head_nbytes,
        start_digest=entry.head_digest,
        nbytes=entry.nbytes,
    )


def open_safetensors(
    name: str, data: ByteSource, *, head_nbytes: int, start_digest: str, nbytes: int
) -> OpenShard:
    """Open a shard in these bytes, given what its manifest entry says about them."""
    if len(data) != nbytes:
        raise damage_error(name, f"it has {len(data)} bytes of {nbytes}")
    if head_nbytes > MAX_HEAD_NBYTES:
        raise damage_error(name, "its start is not that of a safetensors file")
    start = bytes(data[:head_nbytes])
    if hashlib.sha256(start).hexdigest() != start_digest:
        raise damage_error(name, "checksum of its start is wrong")
    return parse_start(name, start, data)


def parse_start(name: str, start: bytes, data: ByteSource) -> OpenShard:
    """Open a shard by the start of its file alone, whose checksum the caller has checked."""
    if int.from_bytes(start[:_PREFIX_NBYTES], "little") + _PREFIX_NBYTES != len(start):
        raise damage_error(name, "its start is not that of a safetensors file")
    try:
        parts = msgspec.json.decode(start[_PREFIX_NBYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__"), type=dict[str, str])
        head = msgspec.json.decode(metadata["clairai"], type=ShardHead)
        infos = {key: msgspec.json.decode(raw, type=TensorInfo) for key, raw in parts.items()}
    except (msgspec.DecodeError, KeyError, ValueError, RecursionError):
        raise damage_error(name, "the content of its start is invalid") from None
    _check_layout(name, head, infos, len(data) - len(start))
    starts = {key: len(start) + info.data_offsets[0] for key, info in infos.items()}
    return OpenShard(name, head, ShardTensors(name, infos, starts, head.digests, data))


def open_npz(name: str, data: ByteSource, *, digest: str, nbytes: int) -> OpenShard:
    """Open an .npz shard in these bytes, given what its manifest entry says about them."""
    if len(data) != nbytes or plain_digest(data) != digest:
        raise damage_error(name, "its checksum is wrong")
    return parse_npz(name, data)


def parse_npz(name: str, data: ByteSource) -> OpenShard:
    """Find the arrays of an .npz in its file; nothing but the head is read."""
    infos: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    end = 0
    try:
        arrays = _find_npz_arrays(data)
        head_dtype, (head_nbytes,), head_start = arrays.pop(NPZ_HEAD)
        if head_dtype != np.uint8 or head_nbytes > MAX_HEAD_NBYTES:
            raise ValueError("not a head of ours")
        raw_head = bytes(data[head_start : head_start + head_nbytes])
        head = msgspec.json.decode(raw_head, type=ShardHead)
        for key, (dtype, shape, start) in arrays.items():
            first, end = end, end + math.prod(shape) * dtype.itemsize
            infos[key], starts[key] = TensorInfo(DTYPES[dtype], shape, (first, end)), start
    except _BAD_NPZ:
        raise damage_error(name, "its content is invalid") from None
    _check_layout(name, head, infos, end)
    return OpenShard(name, head, ShardTensors(name, infos, starts, head.digests, data))


_NpzArray = tuple[np.dtype[Any], tuple[int, ...], int]  # and where it begins in the file


def _find_npz_arrays(data: ByteSource) -> dict[str, _NpzArray]:
    arrays: dict[str, _NpzArray] = {}
    with io.BufferedReader(_SourceFile(data)) as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist()[: MAX_NPZ_ARRAYS + 1]:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError("shards are never compressed")
            arrays[info.filename.removesuffix(".npy")] = _find_npz_array(file, info, len(data))
        if len(arrays) != len(archive.infolist()):
            raise ValueError("too many arrays, or two of one name")
    return arrays


def _find_npz_array(file: IO[bytes], info: zipfile.ZipInfo, nbytes: int) -> _NpzArray:
    """As zipfile and numpy find it: local header, then numpy's own, then the numbers."""
    file.seek(info.header_offset)
    *_, name_nbytes, extra_nbytes = struct.unpack("<4s5H3I2H", file.read(30))
    first = info.header_offset + 30 + name_nbytes + extra_nbytes
    file.seek(first)
    magic, header_nbytes = struct.unpack("<8sH", file.read(10))
    header = _NPY_HEADER.fullmatch(file.read(header_nbytes))
    if magic != _NPY_MAGIC or header is None:
        raise ValueError("not an array of ours")
    dtype = np.dtype(header[1].decode())
    shape = tuple(map(int, re.findall(rb"\d+", header[2])))
    start = file.tell()
    end = start + math.prod(shape) * dtype.itemsize
    if dtype not in DTYPES or not shape:
        raise ValueError("not an array of ours")
    if end != first + info.file_size or end > nbytes:
        raise ValueError("an array has another size than its file")
    return dtype, shape, start


class _SourceFile(io.RawIOBase):
    """A source of bytes as a file."""

    def __init__(self, data: ByteSource) -> None:
        self._data, self._offset = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError("before the start of a file")
        self._offset = base + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        part = self._data[self._offset : self._offset + len(room)]
        room[: len(part)] = part
        self._offset += len(part)
        return len(part)


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
