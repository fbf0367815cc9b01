"""Numbers of a folder that cannot be are refused before anything is done with them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.errors import StoreError
from clairai.store import bundle as bundles
from clairai.store.bundle import bundle
from clairai.store.disk import UnmappedDisk
from clairai.store.read import Store
from clairai.store.shard_manifest import (
    FIRST_CHAIN,
    MANIFEST_VERSION,
    CommitLine,
    dump_commit,
    parse_manifest,
)
from clairai.store.write import Writer
from tests.support.row_blocks import block, origin

GOOD: dict[str, Any] = {
    "name": "0123456789abcdef-00000001.safetensors",
    "nbytes": 1000,
    "head_nbytes": 100,
    "head_digest": "0" * 64,
    "rows": 10,
    "requests": 1,
    "first_stream": "0" * 16,
    "last_stream": "f" * 16,
    "points": ["post_block.0"],
    "origin": msgspec.to_builtins(origin()),
}


def _parse(body: bytes) -> str:
    """What is wrong with a second line of this body, whose checksum is right."""
    line, chain = dump_commit(CommitLine(MANIFEST_VERSION, 0, 1), FIRST_CHAIN)
    length = b"%08x" % len(body)
    checksum = hashlib.sha256(chain.encode() + length + body).hexdigest().encode()
    return parse_manifest(line + b"%s %s %s\n" % (length, checksum, body)).damage


def _line(**change: object) -> bytes:
    commit = {"version": 1, "sequence": 1, "time_ns": 1, "shards": [{**GOOD, **change}]}
    return msgspec.json.encode(commit)


def test_a_line_whose_numbers_can_be_is_read() -> None:
    assert _parse(_line()) == ""


@pytest.mark.attack(540)
@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 62},
        {"head_nbytes": 0},
        {"head_nbytes": 1001},
        {"rows": -1},
        {"rows": 1 << 60},
        {"requests": 11},
        {"requests": -1},
        {"first_stream": "../../etc/passwd"},
        {"last_stream": "g" * 16},
        {"first_stream": "0" * 1_000_000},
        {"head_digest": "short"},
    ],
    ids=lambda change: "-".join(f"{key} {str(value)[:20]}" for key, value in change.items()),
)
def test_a_line_whose_numbers_cannot_be_is_refused_though_its_checksum_is_right(
    change: dict[str, Any],
) -> None:
    assert _parse(_line(**change)) == "its content is invalid"


@pytest.mark.attack(541)
@pytest.mark.parametrize("key", ["shards", "version", "unknown"])
def test_a_line_that_is_nested_without_end_is_refused(key: str) -> None:
    deep = b"[" * 500_000 + b"]" * 500_000
    assert _parse(b'{"%s":%s}' % (key.encode(), deep)) == "its content is invalid"


@pytest.mark.attack(542)
def test_a_shard_with_more_rows_than_an_index_can_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    monkeypatch.setattr(bundles, "MAX_SHARD_ROWS", 2)
    with pytest.raises(StoreError, match="in a shard of over 2 rows"):
        bundle(Store(UnmappedDisk(tmp_path / "s")), 1)


@pytest.mark.attack(543)
def test_a_file_is_read_whole_however_little_the_kernel_reads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads no more than 2 GiB at once; a tensor may be larger."""
    real = os.pread
    (tmp_path / "x").write_bytes(data := os.urandom(1000))

    def read_some(descriptor: int, nbytes: int, offset: int) -> bytes:
        return real(descriptor, min(nbytes, 7), offset)

    monkeypatch.setattr("os.pread", read_some)
    assert bytes(UnmappedDisk(tmp_path).view("x")[3:900]) == data[3:900]
