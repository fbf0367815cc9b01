"""Manifests and shards that are forged, with right checksums, are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai.errors import StoreDamagedError
from clairai.store import read, shard
from clairai.store.read import ShardRows
from clairai.store.shard import ShardHead
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    MANIFEST_VERSION,
    CommitLine,
    dump_commit,
    parse_manifest,
)
from clairai.store.write import Writer
from tests.support.row_blocks import block, origin


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "manifest", "x", "a\0.npz"])
def test_a_manifest_that_names_another_file_is_refused_though_its_checksum_is_right(
    name: str,
) -> None:
    line, chain = dump_commit(CommitLine(MANIFEST_VERSION, 0, 1), FIRST_CHAIN)
    body = {"version": MANIFEST_VERSION, "sequence": 1, "time_ns": 1, "shards": [_entry(name)]}
    raw = msgspec.json.encode(body)
    length = b"%08x" % len(raw)
    checksum = hashlib.sha256(chain.encode() + length + raw).hexdigest().encode()
    parsed = parse_manifest(line + b"%s %s %s\n" % (length, checksum, raw))
    assert parsed.damage == "its content is invalid"
    assert parsed.entries == ()


def _entry(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "nbytes": 10,
        "head_nbytes": 8,
        "head_digest": "0" * 64,
        "rows": 1,
        "requests": 1,
        "first_stream": "0" * 16,
        "last_stream": "0" * 16,
        "points": ["post_block.0"],
        "origin": msgspec.to_builtins(origin()),
    }


def _crafted(change: dict[str, Any], head: dict[str, Any] | None = None) -> shard.OpenShard:
    """A shard with right checksums and a wrong header."""
    sealed = shard.seal_safetensors([block(1)], {})
    said = json.loads(sealed.start[8:])
    inner = json.loads(said["__metadata__"]["clairai"]) | (head or {})
    said["__metadata__"]["clairai"] = json.dumps(inner)
    for name, about in change.items():
        said[name] = said.get(name, {}) | about
    body = json.dumps(said).encode()
    start = len(body).to_bytes(8, "little") + body
    data = start + b"".join(bytes(piece) for piece in sealed.pieces)
    digest = hashlib.sha256(start).hexdigest()
    return shard.open_safetensors(
        "x", memoryview(data), head_nbytes=len(start), start_digest=digest, nbytes=len(data)
    )


def test_a_crafted_shard_that_changes_nothing_is_read() -> None:
    assert _crafted({}).array("position").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"position": {"data_offsets": [0, 1 << 62]}},
        {"position": {"data_offsets": [-8, 4]}},
        {"position": {"data_offsets": [4, 16]}},
        {"position": {"shape": [1 << 62, 1 << 62]}},
        {"position": {"shape": [-3]}},
        {"position": {"shape": []}},
        {"position": {"dtype": "F32"}},
        {"stream": {"dtype": "O"}},
        {"../rows": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
        {"rows.more": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
    ],
)
def test_a_shard_with_misplaced_tensors_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(StoreDamagedError):
        _crafted(change)


SPAN = {"stream": "0" * 16, "choice": 0, "point": "post_block.3", "rows": 3, "first": 0, "last": 2}
NAMES = [
    {"points": ["../post_block.3"]},
    {"spans": [SPAN | {"stream": "../up"}]},
    {"spans": [SPAN | {"stream": "G" * 16}]},
    {"spans": [SPAN | {"point": "post_block.4"}]},
    {"notes": {"x": {"tags": "{}", "steering": "{}"}}},
    {"notes": {"0" * 16: {"tags": "[]", "steering": "{}"}}},
]


@pytest.mark.parametrize(
    "head", [{"rows": 2}, {"rows": 1 << 60}, {"version": 9}, {"digests": {}}, {"more": 1}, *NAMES]
)
def test_a_shard_whose_head_contradicts_itself_is_refused(head: dict[str, Any]) -> None:
    with pytest.raises(StoreDamagedError):
        _crafted({}, head)


def test_a_header_longer_than_the_file_is_refused_before_it_is_allocated() -> None:
    data = (1 << 62).to_bytes(8, "little") + b"{}"
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreDamagedError, match="not that of a safetensors file"):
        shard.open_safetensors(
            "x", memoryview(data), head_nbytes=10, start_digest=digest, nbytes=10
        )


@pytest.mark.parametrize("kind", ["objects", "not a zip", "no head", "compressed"])
def test_an_npz_that_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    if kind == "objects":
        np.savez(file, a=np.array([{}], dtype=object))
    elif kind == "not a zip":
        file.write_bytes(b"PK\3\4 and so on")
    elif kind == "no head":
        np.savez(file, a=np.arange(3))
    else:
        np.savez_compressed(file, a=np.zeros(1 << 20))
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreDamagedError, match="content is invalid"):
        shard.open_npz("x", memoryview(data), digest=digest, nbytes=len(data))


def test_a_point_index_beyond_the_list_is_refused() -> None:
    found = _crafted({})
    head = ShardHead(**(msgspec.structs.asdict(found.head) | {"points": ()}))
    broken = shard.OpenShard("x", head, found.tensors)
    with pytest.raises(StoreDamagedError, match="names a point"):
        ShardRows.select(broken, 1, None, None, None)


def test_random_bytes_as_a_manifest_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    """Whatever the bytes are, they are refused with a message."""
    source = np.random.default_rng(0)
    (tmp_path / "s").mkdir(mode=0o700)
    for size in (0, 1, 7, 73, 74, 75, 500, 5000):
        for _ in range(20):
            (tmp_path / "s" / "manifest").write_bytes(source.bytes(size))
            with pytest.raises(StoreDamagedError):
                read.open(tmp_path / "s")
            with pytest.raises(StoreDamagedError):
                Writer(tmp_path / "s")
