"""Stored rows are read back by request, point and position, in every layout and encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save

import clairai
from clairai.errors import StoreError
from clairai.store import read, shard, write_index
from clairai.store.codecs.registry import ENCODERS
from clairai.store.commit_shards import LAYOUTS
from clairai.store.core_folders import core_folder, whole_folder
from clairai.store.disk import LocalDisk, has_captures, is_shard
from clairai.store.row_block import RowBlock
from clairai.store.write import Writer
from clairai.wire.ring_messages import IMAGE, MEDIA_SHIFT, RECOMPUTED
from tests.support.row_blocks import block, pending_shard, values

POINTS = ("pre_attn.0", "post_block.3")


def _write(path: Path, *blocks: RowBlock, layout: str = "sharded") -> read.Store:
    with Writer(path, layout=layout) as writer:
        for one in blocks:
            writer.offer(one)
        for stream in sorted({int(s) for one in blocks for s in one.rows_N["stream"]}):
            writer.finish(stream)
    return read.open(path)


def _mixed(*streams: int, point: str) -> RowBlock:
    """One block with the rows of several requests interleaved, as in a batch."""
    parts = [block(stream, 4, point=point) for stream in streams]
    order = np.arange(4 * len(parts)).reshape(len(parts), 4).T.ravel()
    rows_N = np.concatenate([part.rows_N for part in parts])[order]
    arrays = {n: np.concatenate([p.arrays[n] for p in parts])[order] for n in parts[0].arrays}
    return RowBlock(parts[0].origin, point, rows_N, arrays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_is_found_under_its_request_point_and_position(
    layout: str, tmp_path: Path
) -> None:
    mixed = [_mixed(5, 6, 7, point=point) for point in POINTS]
    store = _write(tmp_path / "s", *mixed, layout=layout)
    assert [request.stream for request in store.requests()] == [5, 6, 7]
    for request in store.requests():
        assert (request.points, request.rows, request.positions) == (POINTS, 8, (0, 3))
        for point in POINTS:
            rows = store.rows(request.stream, point=point)
            assert np.array_equal(rows, values(request.stream, np.arange(4), point))
            assert rows.position.tolist() == [0, 1, 2, 3]
            assert rows.token_id.tolist() == [7, 8, 9, 10]
            assert set(rows.point) == {point}
    num_files = {"sharded": 1, "packed": 3, "per_file": 6, "npz": 6}[layout]
    assert len(store.shards) == num_files
    assert len([name for name in LocalDisk(tmp_path / "s").names() if is_shard(name)]) == num_files


@pytest.mark.parametrize("encoder", ENCODERS)
def test_rows_of_every_encoder_are_decoded_on_access(encoder: str, tmp_path: Path) -> None:
    given = block(1, 5, encoder=encoder)
    store = _write(tmp_path / "s", given)
    rows = store.rows(1)
    assert rows.origins[0].encoder == encoder
    stored = rows.encoded()
    assert all(np.array_equal(stored[name], given.arrays[name]) for name in given.arrays)
    whole = np.asarray(rows)
    assert rows.shape == whole.shape
    assert np.array_equal(rows[1:3], whole[1:3])
    assert np.array_equal(rows[-1], whole[-1])
    assert np.array_equal(rows[[4, 0]], whole[[4, 0]])
    assert np.asarray(rows, np.float64).dtype == np.float64


def test_rows_are_chosen_by_position_choice_and_point(tmp_path: Path) -> None:
    other = block(1, 4)
    other.rows_N["choice"] = 2
    store = _write(tmp_path / "s", block(1, 6), other, block(1, 6, point="pre_attn.0"))
    assert store.rows(1, positions=range(2, 4), choice=0).position.tolist() == [2, 3, 2, 3]
    assert store.rows(1, positions=[1, 99], point="resid_post.3", choice=2).position.tolist() == [1]
    assert store.request(1).choices == (0, 2)
    assert store.rows(1).point[:6] == ("pre_attn.0",) * 6
    assert len(store.rows(2)) == len(store.rows(1, positions=[])) == 0
    assert store.rows(1, choice=9)[:].shape[0] == 0


def test_of_a_row_computed_twice_only_the_newest_is_read(tmp_path: Path) -> None:
    again = block(1, 2, start=1)
    again.rows_N["flags"] = RECOMPUTED
    again = RowBlock(
        again.origin, again.point, again.rows_N, {"values": again.arrays["values"] + 1}
    )
    store = _write(tmp_path / "s", block(1, 4), again)
    rows = store.rows(1)
    assert rows.position.tolist() == [0, 1, 2, 3]
    difference = np.asarray(rows) - values(1, np.arange(4), "post_block.3")
    assert difference[:, 0].tolist() == [0, 1, 1, 0]


def test_rows_of_an_image_say_so_in_whichever_shard_they_are(tmp_path: Path) -> None:
    first, second = block(1, 3), block(1, 3, start=3)
    first.rows_N["flags"] = [0, IMAGE << MEDIA_SHIFT, RECOMPUTED]
    second.rows_N["flags"] = [RECOMPUTED | IMAGE << MEDIA_SHIFT, 0, 0]
    _write(tmp_path / "s", first)
    rows = _write(tmp_path / "s", second).rows(1)
    assert rows.media.tolist() == [0, IMAGE, 0, IMAGE, 0, 0]
    assert rows.before(4).media.tolist() == [0, IMAGE, 0, IMAGE]


def test_rows_of_several_shards_and_writers_are_joined(tmp_path: Path) -> None:
    _write(tmp_path / "s", block(1, 3), block(2, 3))
    store = _write(tmp_path / "s", block(1, 3, start=3))
    assert len(store.request(1).shards) == 2
    assert np.array_equal(store.rows(1), values(1, np.arange(6), "post_block.3"))
    assert np.array_equal(store.rows(1)[2:4], values(1, np.arange(2, 4), "post_block.3"))
    stored = store.rows(1).encoded()["values"]
    assert np.array_equal(stored, values(1, np.arange(6), "post_block.3"))


def test_rows_of_two_encoders_are_not_joined(tmp_path: Path) -> None:
    store = _write(tmp_path / "s", block(1, 3), block(1, 3, start=3, encoder="full8"))
    with pytest.raises(StoreError, match="encoders that differ"):
        np.asarray(store.rows(1))
    assert store.rows(1, positions=range(3, 6))[:].shape == (3, 8)


def test_tags_and_steering_are_stored_with_the_rows(tmp_path: Path) -> None:
    tags = {"user": "../../etc/passwd", "n": [1, None], "text": "line\nbreak\0"}
    with Writer(tmp_path / "s") as writer:
        writer.begin(1, tags=tags, steering={"vector": "calm", "scale": 2.5})
        writer.offer(block(1))
    request = clairai.open(tmp_path / "s").request(1)
    assert request.tags == tags
    assert request.steering == {"vector": "calm", "scale": 2.5}
    with pytest.raises(StoreError, match="no rows of stream 00000000000000ff"):
        clairai.open(tmp_path / "s").request(255)


def test_safetensors_own_reader_reads_a_shard_and_ours_reads_no_other_file(tmp_path: Path) -> None:
    store = _write(tmp_path / "s", block(1, 5, encoder="full8"))
    found = load_file(tmp_path / "s" / store.shards[0].name)
    assert found["position"].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(found["rows.codes"], block(1, 5, encoder="full8").arrays["codes"])
    foreign = save({"position": np.arange(3)})
    with pytest.raises(StoreError, match="checksum of its start"):
        shard.open_safetensors(
            "x", memoryview(foreign), head_nbytes=72, start_digest="0" * 64, nbytes=len(foreign)
        )


def test_tensors_are_aligned() -> None:
    sealed = shard.seal_safetensors(pending_shard(block(1, 5, encoder="topk8")).blocks, {})
    header = json.loads(sealed.start[8:])
    sizes = {"U64": 8, "I64": 8, "F64": 8, "U32": 4, "I32": 4, "F32": 4, "U16": 2, "U8": 1}
    header.pop("__metadata__")
    for tensor in header.values():
        assert (len(sealed.start) + tensor["data_offsets"][0]) % sizes[tensor["dtype"]] == 0


def test_the_range_of_measured_fidelity_is_stored() -> None:
    first, second = block(1), block(1, start=3)
    blocks = [
        RowBlock(first.origin, first.point, first.rows_N, first.arrays, {"cosine_min": 0.99}),
        RowBlock(first.origin, first.point, second.rows_N, second.arrays, {"cosine_min": 0.97}),
    ]
    assert shard.seal_safetensors(blocks, {}).head.fidelity == {"cosine_min": (0.97, 0.99)}


def test_a_shard_whose_header_is_too_large_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clairai.store.commit_shards.MAX_START_NBYTES", 4000)
    given = _mixed(*range(1, 30), point="post_block.3")
    store = _write(tmp_path / "s", given)
    assert len(store.commits) == 2
    assert len(store.shards) > 2
    assert all(entry.head_nbytes <= 4000 for entry in store.shards)
    for stream in range(1, 30):
        assert np.array_equal(store.rows(stream), values(stream, np.arange(4), "post_block.3"))


def test_the_index_has_a_line_for_each_request_point_and_shard(tmp_path: Path) -> None:
    store = _write(tmp_path / "s", *[_mixed(5, 6, point=point) for point in POINTS])
    assert write_index.write_index(store, LocalDisk(tmp_path / "s")) == "index.parquet"
    table = pq.read_table(tmp_path / "s" / "index.parquet").to_pylist()
    assert [(line["stream"][-1], line["point"], line["rows"]) for line in table] == [
        ("5", "post_block.3", 4),
        ("5", "pre_attn.0", 4),
        ("6", "post_block.3", 4),
        ("6", "pre_attn.0", 4),
    ]
    assert read.open(tmp_path / "s").refresh() == 0


def test_without_pyarrow_the_index_is_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _write(tmp_path / "s", block(5))
    monkeypatch.setattr(write_index, "find_spec", lambda _: None)
    assert write_index.write_index(store, LocalDisk(tmp_path / "s")) == "index.jsonl"
    (line,) = (tmp_path / "s" / "index.jsonl").read_text().splitlines()
    assert (json.loads(line)["rows"], json.loads(line)["weights"]) == (3, "v1")


def test_the_folders_of_several_engine_cores_are_read_as_one(tmp_path: Path) -> None:
    """Each has a writer of its own; answers of one request may be in several."""
    folder = tmp_path / "s"
    _write(Path(core_folder(str(folder), 1)), block(5), block(6))
    store = read.open(folder)
    assert [request.stream for request in store.requests()] == [5, 6]
    other = block(5)
    other.rows_N["choice"] = 1
    with Writer(core_folder(str(folder), 0)) as writer:
        writer.offer(other)
        writer.offer(block(7))
        assert [one.stream for one in read.open(folder).requests()] == [5, 6]  # not committed
    assert store.refresh() == 1
    assert store.refresh() == 0
    assert {one.stream: one.choices for one in store.requests()} == {5: (0, 1), 6: (0,), 7: (0,)}
    assert store.rows(5).choice.tolist() == [0] * 3 + [1] * 3
    for stream in (6, 7):
        rows = store.rows(stream)
        assert np.array_equal(rows, values(stream, np.arange(3), "post_block.3"))
    _write(folder, block(8))  # the engine now has one core
    assert store.refresh() == 1
    assert {one.stream for one in store.requests()} == {5, 6, 7, 8}


def test_what_an_engine_core_has_not_written_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    (folder / "engine-core-0").mkdir(parents=True)
    assert not has_captures(folder)
    with pytest.raises(StoreError, match="no manifest"):
        read.open(folder)
    _write(Path(core_folder(str(folder), 1)), block(5))
    assert has_captures(folder)
    assert [request.stream for request in read.open(folder).requests()] == [5]
    assert whole_folder(core_folder(str(folder), 1)) == whole_folder(str(folder)) == str(folder)


def test_a_folder_below_that_no_engine_core_made_is_left_alone(tmp_path: Path) -> None:
    _write(tmp_path / "s", block(5))
    for name in ("engine-core-x", "engine-core-01", "engine-core-", "core-1", "engine-core-1.tmp"):
        _write(tmp_path / "s" / name, block(6))
    assert [request.stream for request in read.open(tmp_path / "s").requests()] == [5]
    assert LocalDisk(tmp_path / "s").core_names() == []


def test_the_folder_around_those_of_engine_cores_is_private_too(tmp_path: Path) -> None:
    with Writer(core_folder(str(tmp_path / "s"), 0)):
        pass
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    (tmp_path / "s").chmod(0o770)
    with pytest.raises(StoreError, match="can be written by others"):
        Writer(core_folder(str(tmp_path / "s"), 1))
