"""Hostile tags, ids, paths and folders are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.errors import PointError, StoreDamagedError, StoreError
from clairai.store import read
from clairai.store.disk import LocalDisk
from clairai.store.row_block import Origin, RequestNote, RowBlock
from clairai.store.write import Writer
from clairai.wire.ring_messages import CACHED, ROW
from tests.support.row_blocks import block

PATHS = ["../up", "/etc/passwd", "a\0b", "x" * 10_000, "..", "~", "a/b", "con\n", "\u202e", ""]


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "tags",
    [
        {"a": "x" * 5000},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": b"bytes"},
        {"a": object()},
        deep(100_000),
        ["not", "an", "object"],
        "text",
        7,
    ],
    ids=lambda tags: type(tags).__name__,
)
def test_tags_that_are_no_small_json_object_are_refused(tags: Any) -> None:
    with pytest.raises(StoreError):
        RequestNote.of(tags=tags)


@pytest.mark.parametrize("path", PATHS)
def test_a_tag_that_looks_like_a_path_is_data_and_no_file_has_its_name(
    path: str, tmp_path: Path
) -> None:
    with Writer(tmp_path / "s", layout="per_file") as writer:
        if len(path) < 4000:
            writer.begin(1, tags={"id": path, path: "key"})
        writer.offer(block(1))
    names = set(os.listdir(tmp_path / "s"))
    assert names - {"lock", "manifest"} == {read.open(tmp_path / "s").shards[0].name}
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("name", PATHS)
def test_a_point_or_an_array_or_a_model_that_is_a_path_is_refused(name: str) -> None:
    good = block(1)
    with pytest.raises(PointError):
        RowBlock(good.origin, name, good.rows_N, good.arrays)
    with pytest.raises(StoreError):
        RowBlock(good.origin, good.point, good.rows_N, {name: good.arrays["values"]})
    if not name.isprintable() or len(name) > 512 or not name:
        with pytest.raises(StoreError):
            Origin.of(model=name, weights="v", dtype="f", width=1, encoder="raw", parameters={})


@pytest.mark.parametrize("stream", [-1, 1 << 64, 1.0, "1", None, True])
def test_a_stream_that_is_no_64_bit_number_is_refused(stream: Any, tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        with pytest.raises(StoreError, match="stream must be"):
            writer.begin(stream)
        with pytest.raises(StoreError, match="stream must be"):
            writer.finish(stream)


def test_blocks_that_contradict_themselves_are_refused() -> None:
    good = block(1)
    rows_N, array = good.rows_N, good.arrays["values"]
    cached_N = rows_N.copy()
    cached_N["phase"] = CACHED
    hostile: list[tuple[Any, Any]] = [
        (rows_N, {"values": array[:-1]}),
        (rows_N, {"values": array[:, ::2]}),
        (rows_N, {"values": array.astype(object)}),
        (rows_N, {"values": array.astype(">f4")}),
        (rows_N, {"values": np.float32(1)}),
        (rows_N, {}),
        (rows_N, {f"a{n}": array for n in range(17)}),
        (np.zeros(3, np.int64), {"values": array}),
        (np.zeros((3, 1), ROW), {"values": array}),
        (cached_N, {"values": array}),
    ]
    for rows, arrays in hostile:
        with pytest.raises((StoreError, AttributeError)):
            RowBlock(good.origin, good.point, rows, arrays)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fidelity_that_is_no_number_is_refused_before_a_shard_has_it(value: float) -> None:
    good = block(1)
    with pytest.raises(StoreError, match="must be a finite number"):
        RowBlock(good.origin, good.point, good.rows_N, good.arrays, {"cosine_min": value})


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StoreError, match="links are not followed"):
        Writer(tmp_path / "link")
    with pytest.raises(StoreError, match="links are not followed"):
        read.open(tmp_path / "link")
    assert os.listdir(tmp_path / "real") == []


@pytest.mark.parametrize("name", ["manifest", "lock", "manifest.tmp", "notes.txt"])
def test_a_link_in_the_folder_is_refused_and_what_it_leads_to_is_untouched(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError):
        Writer(tmp_path / "s")
    with pytest.raises(StoreError):
        read.open(tmp_path / "s")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_shard_replaced_by_a_link_to_an_equal_file_is_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    store = read.open(tmp_path / "s")
    file = tmp_path / "s" / store.shards[0].name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreDamagedError, match="cannot be read"):
        store.rows(1)
    with pytest.raises(StoreError, match="is a link"):
        read.open(tmp_path / "s")


def test_a_pipe_in_the_folder_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "s" / "manifest")
    with pytest.raises(StoreError, match="is a link or a device"):
        read.open(tmp_path / "s")
    with pytest.raises(StoreError, match="not a plain file"):
        LocalDisk(tmp_path / "s").read("manifest")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(mode)
    with pytest.raises(StoreError, match="chmod go-w"):
        Writer(tmp_path / "s")


def test_every_file_is_private_to_its_owner(tmp_path: Path) -> None:
    with Writer(tmp_path / "s") as writer:
        writer.offer(block(1))
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "s").iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
