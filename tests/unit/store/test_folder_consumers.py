"""The consumers that write to a folder, opened from settings: what they keep, count and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import open_consumers
from clairai.errors import ClairaiError, ConfigError, StoreStoppedError
from clairai.store.read import open as open_store
from tests.support.consumers import ENGINE, feed, open_consumer
from tests.support.row_blocks import block


def test_a_folder_alone_is_the_consumer_fs(tmp_path: Path) -> None:
    (spec,) = CaptureSettings.parse({"folder": str(tmp_path / "s")}).consumers
    consumer = feed(open_consumers([spec], ENGINE)["fs"])
    consumer.flush(10)
    assert (consumer.policy, consumer.where) == ("drop", str(tmp_path / "s"))
    assert (consumer.state.name, consumer.losses(1)) == ("writing", 0)
    (request,) = open_store(tmp_path / "s").requests()
    assert (request.tags, request.steering, request.rows) == ({"a": 1}, {"vector": "calm"}, 3)
    consumer.close()


@pytest.mark.parametrize(
    ("kind", "layout", "suffix"),
    [("fs", "per_file", "-post_block.3.safetensors"), ("npz", None, "-post_block.3.npz")],
)
def test_a_layout_decides_the_files(
    kind: str, layout: str | None, suffix: str, tmp_path: Path
) -> None:
    chosen = {} if layout is None else {"layout": layout}
    feed(open_consumer(kind, folder=str(tmp_path / "s"), **chosen)).close()
    (file,) = (tmp_path / "s").glob("*-0000000000000001-*")
    assert file.name.endswith(suffix)


def test_a_consumer_may_have_a_name_of_its_own_and_a_kind(tmp_path: Path) -> None:
    feed(open_consumer("mine", kind="npz", folder=str(tmp_path / "s"))).close()
    assert [*(tmp_path / "s").glob("*.npz")]


def test_rows_are_at_the_address_when_a_flush_returns(tmp_path: Path) -> None:
    name = uuid4().hex
    consumer = feed(open_consumer("fsspec", folder=str(tmp_path / "s"), url=f"memory://{name}/c"))
    consumer.flush(20)
    there = MemoryFileSystem().ls(f"/{name}/c", detail=False)
    assert [Path(path).suffix for path in there].count(".safetensors") == 1
    assert consumer.where == str(tmp_path / "s")  # which keeps all of it
    assert consumer.offer(block(2))
    consumer.close()
    there = MemoryFileSystem().ls(f"/{name}/c", detail=False)
    assert [Path(path).suffix for path in there].count(".safetensors") == 2


def test_an_address_that_fails_is_reported_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the line is down")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", failing)
        url = f"memory://{uuid4().hex}/c"
        consumer = feed(open_consumer("fsspec", folder=str(tmp_path / "s"), url=url))
        with pytest.raises(StoreStoppedError, match="not at the address"):
            consumer.flush(20)
        assert (consumer.state.name, "line is down" in consumer.state.reason) == ("stopped", True)
    consumer.flush(20)
    assert (consumer.state.name, consumer.losses(1)) == ("writing", 0)
    consumer.close()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("fs", {}, "needs .folder"),
    ("fs", {"folder": "x", "bananas": 1}, "unknown option .bananas.; known: policy"),
    ("fs", {"folder": "x", "layout": "flat"}, "layout must be one of sharded"),
    ("fs", {"folder": "x", "policy": "wait"}, "policy must be one of block, drop, spill"),
    ("fs", {"folder": "x", "policy": "spill"}, "go together"),
    ("fs", {"folder": "x", "spill_to": "y"}, "go together"),
    ("fs", {"folder": "x", "policy": "spill", "spill_to": 7}, "spill_to must be a path"),
    ("fs", {"folder": "x", "shard_mib": 0}, "shard_mib must be a whole number of 1 to"),
    ("fs", {"folder": "x", "queue_mib": True}, "queue_mib must be a whole number"),
    ("fs", {"folder": "x", "seal_after_s": 0}, "seal_after_s must be above 0"),
    ("npz", {"folder": "x", "layout": "npz"}, "unknown option .layout."),
    ("fsspec", {"folder": "x"}, "needs .url"),
    ("fsspec", {"folder": "x", "url": "nosuchkind://a"}, "fsspec cannot use"),
    ("callback", {}, "needs .call"),
    ("callback", {"call": "no.such.module:f"}, "cannot be imported"),
    ("callback", {"call": "json:no_such"}, "cannot be imported"),
    ("callback", {"call": "json:__name__"}, "is no function"),
    ("carrier_pigeon", {}, "there are callback, fs, fsspec, npz"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_options_are_refused_with_the_way_out(
    kind: str,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClairaiError, match=message):
        open_consumer(kind, **options)


def test_a_consumer_that_cannot_be_opened_leaves_no_otheropen_consumer(tmp_path: Path) -> None:
    good = {"folder": str(tmp_path / "s")}
    specs = CaptureSettings.parse({"consumers": {"fs": good, "npz": {}}}).consumers
    with pytest.raises(ConfigError):
        open_consumers(specs, ENGINE)
    open_consumer("fs", **good).close()  # the folder has no writer any more
