"""The built-in capture consumers, opened from settings: what they keep, count and report."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import Consumer, EngineInfo, open_consumers
from clairai.errors import ClairaiError, ConfigError, StoreStoppedError
from clairai.store.callback import Delivery
from clairai.store.read import open as open_store
from tests.support.row_blocks import WIDTH, block, values

ABOUT = EngineInfo("tiny", "v1", "float32", WIDTH, ("post_block.3",))
HERE = "tests.unit.store.test_consumers"


def _open(name: str, **options: Any) -> Consumer:
    specs = CaptureSettings.parse({"consumers": {name: options}}).consumers
    return open_consumers(specs, ABOUT)[name]


def _feed(consumer: Consumer) -> Consumer:
    consumer.begin(1, tags={"a": 1}, steering={"vector": "calm"})
    assert consumer.offer(block(1))
    consumer.finish(1)
    return consumer


def test_a_folder_alone_is_the_consumer_fs(tmp_path: Path) -> None:
    (spec,) = CaptureSettings.parse({"folder": str(tmp_path / "s")}).consumers
    consumer = _feed(open_consumers([spec], ABOUT)["fs"])
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
    _feed(_open(kind, folder=str(tmp_path / "s"), **chosen)).close()
    (file,) = (tmp_path / "s").glob("*-0000000000000001-*")
    assert file.name.endswith(suffix)


def test_a_consumer_may_have_a_name_of_its_own_and_a_kind(tmp_path: Path) -> None:
    _feed(_open("mine", kind="npz", folder=str(tmp_path / "s"))).close()
    assert [*(tmp_path / "s").glob("*.npz")]


def test_rows_are_at_the_address_when_a_flush_returns(tmp_path: Path) -> None:
    name = uuid4().hex
    consumer = _feed(_open("fsspec", folder=str(tmp_path / "s"), url=f"memory://{name}/c"))
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
        consumer = _feed(_open("fsspec", folder=str(tmp_path / "s"), url=url))
        with pytest.raises(StoreStoppedError, match="not at the address"):
            consumer.flush(20)
        assert (consumer.state.name, "line is down" in consumer.state.reason) == ("stopped", True)
    consumer.flush(20)
    assert (consumer.state.name, consumer.losses(1)) == ("writing", 0)
    consumer.close()


class Recorder:
    """Stands in for the callback below and records what it is called with."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.error: Exception | None = None
        self.is_called = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, delivery: Delivery) -> None:
        self.is_called.set()
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error
        self.deliveries.append(delivery)


receive = Recorder()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(f"{HERE}.receive", made)
    return made


def test_a_function_is_called_with_the_rows_and_their_notes(recorder: Recorder) -> None:
    consumer = _feed(_open("callback", call=f"{HERE}:receive"))
    consumer.flush(10)
    (delivery,) = recorder.deliveries
    assert np.array_equal(delivery.values(), values(1, np.arange(3), "post_block.3"))
    assert delivery.rows["position"].tolist() == [0, 1, 2]
    assert (delivery.about, delivery.notes[1].tags) == (ABOUT, '{"a":1}')
    assert (consumer.where, consumer.policy) == (f"{HERE}:receive", "drop")
    consumer.close()


def test_rows_with_which_a_function_failed_are_counted_as_lost(recorder: Recorder) -> None:
    recorder.error = RuntimeError("no")
    consumer = _feed(_open("callback", call=f"{HERE}:receive"))
    consumer.flush(10)
    assert (consumer.state.name, "RuntimeError" in consumer.state.reason) == ("stopped", True)
    assert consumer.losses(1) == 3
    recorder.error = None
    assert consumer.offer(block(2))
    consumer.flush(10)
    assert (consumer.state.name, len(recorder.deliveries)) == ("writing", 1)
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost"):
        consumer.close()


def test_a_slow_function_does_not_delay_offers(recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    consumer = _open("callback", call=f"{HERE}:receive", queue_mib=1)
    accepted = [consumer.offer(block(1, 20_000))]
    assert recorder.is_called.wait(20)  # the function has the first, and does not return
    accepted += [consumer.offer(block(stream, 20_000)) for stream in range(2, 6)]
    assert (accepted[0], accepted[-1]) == (True, False)
    assert consumer.losses(5) == 20_000
    recorder.may_go_on.set()
    consumer.close()
    assert len(recorder.deliveries) == sum(accepted)


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
        _open(kind, **options)


def test_a_consumer_that_cannot_be_opened_leaves_no_other_open(tmp_path: Path) -> None:
    good = {"folder": str(tmp_path / "s")}
    specs = CaptureSettings.parse({"consumers": {"fs": good, "npz": {}}}).consumers
    with pytest.raises(ConfigError):
        open_consumers(specs, ABOUT)
    _open("fs", **good).close()  # the folder has no writer any more
