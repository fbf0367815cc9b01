"""A folder of captures is copied to an address, whatever goes wrong on the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from clairai.cli.commands import app
from clairai.errors import ConfigError, StoreDamagedError, StoreError, StoreStoppedError
from clairai.store.disk import LocalDisk
from clairai.store.read import open as open_store
from clairai.store.recover import verify
from clairai.store.send_shards import ShardSender
from clairai.store.shard_manifest import parse_manifest
from clairai.store.write import Writer
from tests.support.row_blocks import block, values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _add(tmp_path / "s", 1)
    return tmp_path / "s"


@pytest.fixture
def url() -> str:
    return f"memory://{uuid4().hex}/captures"


def _add(folder: Path, *streams: int) -> None:
    for stream in streams:
        with Writer(folder) as writer:
            writer.offer(block(stream))


def _send(folder: Path, url: str) -> list[str]:
    return [entry.name for entry in ShardSender(LocalDisk(folder), url).send()]


def _download(url: str, to: Path) -> Path:
    """Download what is at the address."""
    MemoryFileSystem().get(url.removeprefix("memory:/") + "/", str(to) + "/", recursive=True)
    return to


def test_the_copy_is_the_same_folder(folder: Path, url: str, tmp_path: Path) -> None:
    _add(folder, 2)
    assert len(_send(folder, url)) == 2
    copy = _download(url, tmp_path / "copy")
    assert [check.fault for check in verify(LocalDisk(copy))] == ["", "", ""]
    for stream in (1, 2):
        found = np.asarray(open_store(copy).rows(stream))
        assert np.array_equal(found, values(stream, np.arange(3), "post_block.3"))


def test_what_was_sent_is_not_sent_again(folder: Path, url: str) -> None:
    assert len(_send(folder, url)) == 1
    assert _send(folder, url) == []
    _add(folder, 2)
    assert len(_send(folder, url)) == 1


def test_sending_continues_where_an_address_failed(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(folder, 2, 3)
    real, calls = MemoryFileSystem.open, []

    def failing(self: Any, path: str, mode: str = "rb", **rest: Any) -> Any:
        calls.append(path)
        if len(calls) == 4 and mode == "wb":  # the second commit's shard, behind its manifest
            raise ConnectionError("the line is down")
        return real(self, path, mode, **rest)

    monkeypatch.setattr(MemoryFileSystem, "open", failing)
    with pytest.raises(StoreStoppedError, match="could not be sent, ConnectionError"):
        _send(folder, url)
    assert [r.stream for r in open_store(_download(url, tmp_path / "half")).requests()] == [1]
    assert len(_send(folder, url)) == 2
    assert [r.stream for r in open_store(_download(url, tmp_path / "all")).requests()] == [1, 2, 3]


def test_a_shard_that_arrived_short_is_not_committed_there(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryFileSystem.info

    def short(self: Any, path: str, **rest: Any) -> Any:
        return {"size": 5} if path.endswith(".safetensors") else real(self, path, **rest)

    monkeypatch.setattr(MemoryFileSystem, "info", short)
    with pytest.raises(StoreStoppedError, match="has 5 bytes there"):
        _send(folder, url)
    manifest = MemoryFileSystem().cat_file(f"{url.removeprefix('memory:/')}/manifest")
    assert parse_manifest(manifest).entries == ()


def test_the_captures_of_another_folder_are_not_overwritten(
    folder: Path, url: str, tmp_path: Path
) -> None:
    _send(folder, url)
    _add(tmp_path / "other", 9)
    with pytest.raises(StoreError, match="another folder of captures"):
        _send(tmp_path / "other", url)


def test_a_manifest_other_than_the_one_sent_before_is_refused(folder: Path, url: str) -> None:
    _send(folder, url)
    for path in [*folder.glob("*.safetensors"), folder / "manifest"]:
        path.unlink()
    _add(folder, 9)
    with pytest.raises(StoreDamagedError, match="not the one that was sent"):
        _send(folder, url)


@pytest.mark.parametrize("url", ["", "captures", "nosuchkind://a/b", 7])
def test_what_is_no_address_is_refused(folder: Path, url: Any) -> None:
    with pytest.raises(StoreError):
        ShardSender(LocalDisk(folder), url)


def test_without_fsspec_the_extra_is_named(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"clairai\[fsspec\]"):
        ShardSender(LocalDisk(folder), url)


def test_the_command_sends_and_reports(folder: Path, url: str) -> None:
    output = CliRunner().invoke(app, ["capture", "send", str(folder), url]).output
    assert output.startswith("1 shards sent, ")
    with Writer(folder):
        result = CliRunner().invoke(app, ["capture", "send", str(folder), url])
    assert "has a writer already" in str(result.exception)
