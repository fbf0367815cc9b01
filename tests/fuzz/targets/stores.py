"""A folder of captures as somebody else may have written it: manifest, shards, encoded blocks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from clairai.errors import EncodingError, StoreError
from clairai.store import shard as shards
from clairai.store.bundle import bundle
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.registry import ENCODERS, named
from clairai.store.read import Store
from clairai.store.row_block import RequestNote
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    CommitLine,
    dump_commit,
    parse_manifest,
)
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target, grow_prefix
from tests.support.row_blocks import block

NAME = "00000000000000aa-00000001"
STREAM = 5


def targets() -> list[Target]:
    shared: dict[str, Any] = {"find_spans": json_spans, "values": JSON_VALUES}
    framed = shared | {"repair": grow_prefix(8)}
    return [
        Target("store_manifest", parse_manifest_bytes, [_manifest()], (StoreError,), share=2.0),
        Target("store_commits", parse_commits, _commits(), (StoreError,), share=2.0, **shared),
        Target("store_shard", parse_shard, _shards(), (StoreError,), share=0.6, **framed),
        Target("store_npz", parse_npz, _npz_shards(), (StoreError,), share=0.5),
        Target("store_folder", parse_folder, _shards(), _FOLDER_REFUSALS, share=0.2, **framed),
        Target("encoded_rows", parse_encoded, _encoded(), (EncodingError,), share=1.5),
    ]


_FOLDER_REFUSALS = (StoreError, EncodingError)


def _sealed(layout: str = "safetensors", encoder: str = "raw") -> shards.SealedShard:
    blocks = [
        block(STREAM, 2, point="post_block.3", encoder=encoder),
        block(STREAM + 1, 2, start=1, point="pre_attn.0", encoder=encoder),
    ]
    notes = {STREAM: RequestNote.of({"run": 1}, {"entries": []})}
    seal = shards.seal_npz if layout == "npz" else shards.seal_safetensors
    return seal(blocks, notes)


def _file(sealed: shards.SealedShard) -> bytes:
    return sealed.start + b"".join(map(bytes, sealed.pieces))


def _shards() -> list[bytes]:
    return [_file(_sealed(encoder=name)) for name in ENCODERS]


def _npz_shards() -> list[bytes]:
    return [_file(_sealed("npz")), _file(_sealed("npz", "int4"))]


def _commit_lines() -> list[CommitLine]:
    entry = replace(_sealed(), name=f"{NAME}.safetensors").entry()
    return [CommitLine(1, 0, 3), CommitLine(1, 1, 4, (entry,)), CommitLine(1, 2, 5, (entry, entry))]


def _manifest() -> bytes:
    return seal_lines([msgspec.json.encode(line) for line in _commit_lines()])


def _commits() -> list[bytes]:
    return [b"\n".join(msgspec.json.encode(line) for line in _commit_lines())]


def seal_lines(bodies: list[bytes]) -> bytes:
    """A manifest of these lines, with right lengths and checksums."""
    chain, lines = FIRST_CHAIN, []
    for body in bodies:
        length = b"%08x" % len(body)
        chain = hashlib.sha256(chain.encode() + length + body).hexdigest()
        lines.append(b"%s %s %s\n" % (length, chain.encode(), body))
    return b"".join(lines)


def parse_manifest_bytes(data: bytes) -> None:
    """The valid lines are the same when they are written again; the rest is accounted for."""
    found = parse_manifest(data)
    kept = data[: found.nbytes]
    if not found.damage:
        assert found.nbytes + found.torn_nbytes == len(data)
    again = parse_manifest(kept) if kept else found
    assert again.commits[: len(found.commits)] == found.commits
    chain, written = FIRST_CHAIN, b""
    for commit in found.commits:
        line, chain = dump_commit(commit, chain)
        written += line
    assert parse_manifest(written).commits == found.commits if written else True
    found.require_undamaged()


def parse_commits(data: bytes) -> None:
    """Lines that anybody can write with right checksums."""
    parse_manifest_bytes(seal_lines(data.split(b"\n")))


def parse_shard(data: bytes) -> None:
    """A shard with a right checksum of its start, as whoever wrote it can give it."""
    head_nbytes = 8 + int.from_bytes(data[:8], "little")
    start = data[: min(head_nbytes, len(data))]
    found = shards.open_safetensors(
        "x",
        memoryview(data),
        head_nbytes=head_nbytes,
        start_digest=hashlib.sha256(start).hexdigest(),
        nbytes=len(data),
    )
    _check_arrays(found)


def parse_npz(data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    _check_arrays(shards.open_npz("x", memoryview(data), digest=digest, nbytes=len(data)))


def _check_arrays(found: shards.OpenShard) -> None:
    assert all(len(found.array(name)) == found.head.rows for name in found.tensors.infos)


class OneShardDisk:
    """A folder with one shard and the manifest that fits it."""

    def __init__(self, data: bytes, sealed: shards.SealedShard) -> None:
        entry = replace(sealed, name=f"{NAME}.safetensors").entry()
        commits = [CommitLine(1, 0, 3), CommitLine(1, 1, 4, (entry,))]
        manifest = seal_lines([msgspec.json.encode(line) for line in commits])
        self._files = {"manifest": manifest, entry.name: data}

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        return self._files[name]

    def view(self, name: str) -> memoryview:
        return memoryview(self._files[name])

    def inode(self, _name: str) -> int:
        return 1

    def nbytes(self, name: str) -> int:
        return len(self._files[name])

    def core_names(self) -> list[str]:
        return []

    def core_disk(self, name: str) -> OneShardDisk:
        raise FileNotFoundError(name)


def parse_folder(data: bytes) -> None:
    """Read a folder as users do, where checksums fit whatever the shard says of itself."""
    start = data[: 8 + int.from_bytes(data[:8], "little")]
    head = _shard_head(start)
    tensors = data[len(start) :]
    sealed = shards.SealedShard(start, (tensors,), len(data), head)
    try:
        disk = OneShardDisk(data, sealed)
    except ValueError as error:
        raise StoreError("no manifest has an entry like that") from error
    store = Store(disk)
    for request in store.requests():
        rows = store.rows(request.stream)
        decoded = np.asarray(rows)
        assert decoded.dtype == np.float32
        assert len(decoded) == len(rows)
        made = bundle(store, request.stream)
        assert sum(map(len, made.part(0, made.nbytes))) == made.nbytes


def _shard_head(start: bytes) -> shards.ShardHead:
    try:
        header = msgspec.json.decode(start[8:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
        return msgspec.json.decode(metadata["clairai"], type=shards.ShardHead)
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return _sealed_head()


@cache
def _sealed_head() -> shards.ShardHead:
    return _sealed().head


@cache
def _encoders() -> tuple[Encoder, ...]:
    small: dict[str, dict[str, Any]] = {"topk8": {"k": 5}, "rp8": {"k": 16}, "int4": {"group": 6}}
    dtypes = [named("raw", {"dtype": dtype}) for dtype in ("float32", "float16", "bfloat16")]
    others = [named(name, small.get(name, {})) for name in ENCODERS if name != "raw"]
    return (*dtypes, *others)


def _encoded() -> list[bytes]:
    values = [[0, 1, -2.5, np.inf, 4, 5, np.nan], [1024, -0.5, 0, 0, 0, 0, 1]]
    rows_ND = np.array(values, np.float32)
    seeds = []
    for index, encoder in enumerate(_encoders()):
        arrays = encoder.encode(rows_ND)
        seeds.append(bytes((index, 7)) + b"".join(array.tobytes() for array in arrays.values()))
    return seeds


def parse_encoded(data: bytes) -> None:
    """Encoder and width by the first two bytes, its arrays from the rest, as many rows as fit."""
    encoders = _encoders()
    encoder = encoders[(data[0] if data else 0) % len(encoders)]
    width = 1 + (data[1] if len(data) > 1 else 0) % 64
    layout = encoder.layout(width)
    num_rows = min((len(data) - 2) // encoder.nbytes_per_row(width), 64)
    if num_rows < 1:
        return
    arrays, at = {}, 2
    for name, column in layout.items():
        flat = np.frombuffer(data, column.dtype, num_rows * column.size, at)
        arrays[name] = flat.reshape(num_rows, column.size)
        at += flat.nbytes
    decoded = encoder.decode(arrays, width=width)
    assert decoded.shape == (num_rows, encoder.decoded_width(width))
    assert decoded.dtype == np.float32
