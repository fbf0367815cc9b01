"""Takes settings of consumers; gives consumers that keep rows, count the rest, and say why not."""

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


def _opened(name: str, **options: Any) -> Consumer:
    specs = CaptureSettings.parse({"consumers": {name: options}}).consumers
    return open_consumers(specs, ABOUT)[name]


def _fed(consumer: Consumer) -> Consumer:
    consumer.begin(1, tags={"a": 1}, steering={"vector": "calm"})
    assert consumer.offer(block(1))
    consumer.finish(1)
    return consumer


def test_a_folder_alone_is_the_consumer_fs(tmp_path: Path) -> None:
    (spec,) = CaptureSettings.parse({"folder": str(tmp_path / "s")}).consumers
    consumer = _fed(open_consumers([spec], ABOUT)["fs"])
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
    _fed(_opened(kind, folder=str(tmp_path / "s"), **chosen)).close()
    (file,) = (tmp_path / "s").glob("*-0000000000000001-*")
    assert file.name.endswith(suffix)


def test_the_kind_may_be_said_beside_a_name_of_ones_own(tmp_path: Path) -> None:
    _fed(_opened("mine", kind="npz", folder=str(tmp_path / "s"))).close()
    assert [*(tmp_path / "s").glob("*.npz")]


def test_rows_are_at_the_address_when_a_flush_returns(tmp_path: Path) -> None:
    name = uuid4().hex
    consumer = _fed(_opened("fsspec", folder=str(tmp_path / "s"), url=f"memory://{name}/c"))
    consumer.flush(20)
    there = MemoryFileSystem().ls(f"/{name}/c", detail=False)
    assert [Path(path).suffix for path in there].count(".safetensors") == 1
    assert consumer.where == str(tmp_path / "s")  # which keeps all of it
    assert consumer.offer(block(2))
    consumer.close()
    there = MemoryFileSystem().ls(f"/{name}/c", detail=False)
    assert [Path(path).suffix for path in there].count(".safetensors") == 2


def test_an_address_that_fails_is_said_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the line is down")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", failing)
        url = f"memory://{uuid4().hex}/c"
        consumer = _fed(_opened("fsspec", folder=str(tmp_path / "s"), url=url))
        with pytest.raises(StoreStoppedError, match="not at the address"):
            consumer.flush(20)
        assert (consumer.state.name, "line is down" in consumer.state.reason) == ("stopped", True)
    consumer.flush(20)
    assert (consumer.state.name, consumer.losses(1)) == ("writing", 0)
    consumer.close()


class Heard:
    """What the function below was called with; a test puts one in its place."""

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


hear = Heard()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    made = Heard()
    monkeypatch.setattr(f"{HERE}.hear", made)
    return made


def test_a_function_is_called_with_decoded_rows_and_whose_they_are(heard: Heard) -> None:
    consumer = _fed(_opened("callback", call=f"{HERE}:hear"))
    consumer.flush(10)
    (delivery,) = heard.deliveries
    assert np.array_equal(delivery.values(), values(1, np.arange(3), "post_block.3"))
    assert delivery.rows["position"].tolist() == [0, 1, 2]
    assert (delivery.about, delivery.notes[1].tags) == (ABOUT, '{"a":1}')
    assert (consumer.where, consumer.policy) == (f"{HERE}:hear", "drop")
    consumer.close()


def test_rows_a_function_failed_with_are_lost_and_counted(heard: Heard) -> None:
    heard.error = RuntimeError("no")
    consumer = _fed(_opened("callback", call=f"{HERE}:hear"))
    consumer.flush(10)
    assert (consumer.state.name, "RuntimeError" in consumer.state.reason) == ("stopped", True)
    assert consumer.losses(1) == 3
    heard.error = None
    assert consumer.offer(block(2))
    consumer.flush(10)
    assert (consumer.state.name, len(heard.deliveries)) == ("writing", 1)
    with pytest.raises(StoreStoppedError, match="3 accepted rows are lost"):
        consumer.close()


def test_a_slow_function_makes_nobody_wait(heard: Heard) -> None:
    heard.may_go_on.clear()
    consumer = _opened("callback", call=f"{HERE}:hear", queue_mib=1)
    taken = [consumer.offer(block(1, 20_000))]
    assert heard.is_called.wait(20)  # the function has the first, and gives it not back
    taken += [consumer.offer(block(stream, 20_000)) for stream in range(2, 6)]
    assert (taken[0], taken[-1]) == (True, False)
    assert consumer.losses(5) == 20_000
    heard.may_go_on.set()
    consumer.close()
    assert len(heard.deliveries) == sum(taken)


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


@pytest.mark.parametrize(("kind", "options", "said"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_options_are_refused_with_the_way_out(
    kind: str, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClairaiError, match=said):
        _opened(kind, **options)


def test_a_consumer_that_cannot_be_opened_leaves_no_other_open(tmp_path: Path) -> None:
    good = {"folder": str(tmp_path / "s")}
    specs = CaptureSettings.parse({"consumers": {"fs": good, "npz": {}}}).consumers
    with pytest.raises(ConfigError):
        open_consumers(specs, ABOUT)
    _opened("fs", **good).close()  # the folder has no writer any more
