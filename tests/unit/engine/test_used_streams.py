"""Which stream ids are taken: by requests of this engine, and by rows in its folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clairai.engine.used_streams import UsedStreams
from clairai.store.stored_streams import StoredStreams
from clairai.store.write import Writer
from tests.support.row_blocks import block


def store(folder: Path, *streams: int) -> None:
    with Writer(folder) as writer:
        for stream in streams:
            made = block(1)
            rows_N = made.rows_N.copy()
            rows_N["stream"] = stream
            writer.begin(stream)
            writer.offer(replace(made, rows_N=rows_N))
            writer.finish(stream)


def test_a_stream_is_free_until_it_is_used_and_for_other_choices_of_its_request() -> None:
    used = UsedStreams()
    assert used.is_free(5, "a", 0)
    used.add(5, "a", 0, is_captured=False)
    assert [used.is_free(5, "a", choice) for choice in (0, 1, 65535)] == [False, True, True]
    assert not used.is_free(5, "b", 1)
    assert used.is_free(6, "b", 0)


def test_the_last_streams_are_remembered_and_captured_ones_longer() -> None:
    used = UsedStreams(limit=4)
    used.add(1, "captured", 0, is_captured=True)
    for stream in range(2, 8):
        used.add(stream, f"request {stream}", 0, is_captured=False)
    free = [stream for stream in range(1, 8) if used.is_free(stream, "another", 0)]
    assert free == [2, 3]


def test_a_stream_in_a_folder_is_taken(tmp_path: Path) -> None:
    store(tmp_path / "a", 3, 5)
    store(tmp_path / "b", 2**64 - 1)
    used = UsedStreams(StoredStreams((tmp_path / "a", tmp_path / "b", tmp_path / "none")))
    taken = [stream for stream in (1, 3, 4, 5, 2**64 - 1) if used.is_stored(stream, "new")]
    assert taken == [3, 5, 2**64 - 1]


def test_a_request_of_this_engine_may_add_choices_to_what_it_stored(tmp_path: Path) -> None:
    used = UsedStreams(StoredStreams((tmp_path,)))
    used.add(3, "own", 0, is_captured=True)
    store(tmp_path, 3)
    assert not used.is_stored(3, "own")
    assert used.is_stored(3, "another")


def test_what_is_no_longer_remembered_is_found_in_the_folder(tmp_path: Path) -> None:
    used = UsedStreams(StoredStreams((tmp_path,)), limit=4)
    assert not used.is_stored(1, "first")  # reads the folder, which is empty
    for stream in range(1, 8):
        used.add(stream, f"request {stream}", 0, is_captured=True)
    store(tmp_path, *range(1, 8))
    assert all(
        used.is_stored(stream, "another") or not used.is_free(stream, "another", 0)
        for stream in range(1, 8)
    )
