"""What the commands `clairai capture` print, write and refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from clairai.cli.commands import app
from clairai.errors import StoreError
from clairai.store import read
from clairai.store.write import Writer
from tests.support.row_blocks import block, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Writer(tmp_path / "s") as writer:
        writer.begin(1, tags={"user": "someone"}, steering={"vector": "calm"})
        for stream in (1, 2):
            writer.offer(block(stream))
            writer.offer(block(stream, point="pre_attn.0"))
    return tmp_path / "s"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["capture", *map(str, arguments)])


def test_requests_are_listed_with_all_columns(folder: Path) -> None:
    titles, first, second, end = _run("ls", folder).output.splitlines()
    assert titles.split()[:3] == ["stream", "rows", "choices"]
    assert first.split()[:4] == ["0000000000000001", "6", "0", "0-2"]
    assert "pre_attn.0 and 1 more" in first
    assert '{"user": "someone"}' in first
    assert second.split()[0] == "0000000000000002"
    assert end.startswith("12 rows in 1 shards, ")


def test_show_prints_all_of_one_request(folder: Path) -> None:
    output = _run("show", folder, "1").output
    for said in ("pre_attn.0, post_block.3", "calm", "someone", "v1", ".safetensors", "float32"):
        assert said in output
    assert "a stream is up to 16 hex digits" in _run("show", folder, "x").output
    assert isinstance(_run("show", folder, "3").exception, StoreError)


def test_a_good_folder_verifies_and_a_changed_one_does_not(folder: Path) -> None:
    good = _run("verify", folder)
    assert (good.exit_code, "2 of 2 files are good, 12 rows" in good.output) == (0, True)
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    bad = _run("verify", folder)
    assert (bad.exit_code, f"bad   {file.name}: " in bad.output) == (1, True)
    assert "1 of 2 files are good, 0 rows" in bad.output


def test_a_shard_that_was_never_committed_is_noted(folder: Path) -> None:
    name = "0123456789abcdef-00000001.safetensors"
    (folder / name).write_bytes(b"")
    result = _run("verify", folder)
    assert (result.exit_code, f"note  {name} is in no line" in result.output) == (0, True)


def test_an_export_has_a_file_for_each_request_and_point(folder: Path, tmp_path: Path) -> None:
    result = _run("export", "npz", folder, tmp_path / "out")
    assert "4 files" in result.output
    with np.load(tmp_path / "out" / "0000000000000002-0-pre_attn.0.npz") as found:
        assert np.array_equal(found["values"], values(2, np.arange(3), "pre_attn.0"))
        assert found["position"].tolist() == [0, 1, 2]
    assert isinstance(_run("export", "npz", folder, tmp_path / "out").exception, StoreError)


def test_an_index_is_written_into_the_folder(folder: Path) -> None:
    assert _run("index", folder).output.strip() == str(folder / "index.parquet")
    assert (folder / "index.parquet").stat().st_mode & 0o777 == 0o600
    assert _run("verify", folder).exit_code == 0


def test_a_folder_without_captures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert isinstance(_run("ls", tmp_path / "empty").exception, StoreError)
    assert isinstance(_run("ls", tmp_path / "nowhere").exception, StoreError)
    assert isinstance(_run("index", tmp_path / "nowhere").exception, StoreError)
    assert not (tmp_path / "nowhere").exists()
    assert _run("verify", tmp_path / "empty").exit_code == 1


def test_the_folders_of_engine_cores_are_listed_verified_and_sent_together(tmp_path: Path) -> None:
    folder, to = tmp_path / "s", tmp_path / "sent"
    for core in (0, 1):
        with Writer(folder / f"engine-core-{core}") as writer:
            writer.offer(block(core + 1))
    assert _run("ls", folder).output.splitlines()[-1].startswith("6 rows in 2 shards, ")
    assert _run("verify", folder).output.startswith("4 of 4 files are good, 6 rows, ")
    assert _run("send", folder, f"file://{to}").output.startswith("2 shards sent, ")
    assert _run("send", folder, f"file://{to}").output.startswith("0 shards sent, ")
    for found in (read.open(to), read.open(f"file://{to}")):
        assert [request.stream for request in found.requests()] == [1, 2]
    refused = _run("repair", folder)
    assert refused.exit_code == 2
    assert "engine-core-0, engine-core-1" in " ".join(refused.output.replace("│", "").split())
    assert _run("repair", folder / "engine-core-1").exit_code == 0
    assert _run("index", folder).exit_code == 0
    (shard,) = (folder / "engine-core-1").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert _run("verify", folder).exit_code == 1
