"""The ids of a folder's requests are found exactly, also after more were committed."""

from __future__ import annotations

from pathlib import Path

from clairai.store.disk import MANIFEST
from clairai.store.stored_streams import StoredStreams
from tests.unit.engine.test_used_streams import store


def test_ids_are_found_after_each_refresh(tmp_path: Path) -> None:
    streams = StoredStreams((tmp_path,))
    for number in (1, 2):
        store(tmp_path, number, number + 10)
        assert number not in streams
        streams.refresh()
        assert [one for one in range(20) if one in streams] == sorted(
            [*range(1, number + 1), *range(11, number + 11)]
        )
    assert len(streams) == 4


def test_no_folder_a_damaged_manifest_and_a_damaged_shard_hold_no_ids(tmp_path: Path) -> None:
    store(tmp_path / "damaged", 1)
    (tmp_path / "damaged" / MANIFEST).write_bytes(b"nonsense\n")
    store(tmp_path / "half", 1, 2)
    store(tmp_path / "half", 3, 4)
    shard = min((tmp_path / "half").glob("*.safetensors"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    streams = StoredStreams((tmp_path / "none", tmp_path / "damaged", tmp_path / "half"))
    streams.refresh()
    assert len(streams) == 2


def test_a_file_of_one_request_is_not_read(tmp_path: Path) -> None:
    store(tmp_path, 7)
    (shard,) = tmp_path.glob("*.safetensors")
    shard.unlink()
    streams = StoredStreams((tmp_path,))
    streams.refresh()
    assert 7 in streams
