"""A disk that is full, a consumer that is dead or too slow: it is said where people look."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clairai.capture.consumers import DROPPING, LOSS_MEMORY_S, GuardedConsumer, LossEpisode
from clairai.errors import StoreStoppedError
from clairai.proxy.observe.metrics import Metrics
from clairai.store import folder_consumers
from clairai.store.block_queue import BlockQueue, SpillFile
from clairai.store.callback import CallbackConsumer
from clairai.store.commit_shards import Committer
from clairai.store.folder_consumers import FsspecConsumer
from clairai.store.send_shards import ShardSender
from clairai.store.write import Writer, WriterLimits
from tests.http.world import World, world
from tests.support.capturing_server import capturing_server
from tests.support.faulty_disk import DEADLINE_S, QUICK, failing, wait_until
from tests.support.row_blocks import block


@pytest.mark.attack(510)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_state_with_a_reason_and_capturing_goes_on_when_there_is_room(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = {"points": ["post_block.0"], "folder": str(tmp_path / "s")}
    began = time.time()
    with capturing_server(tmp_path, setting) as server:

        def status() -> dict[str, Any]:
            (found,) = server.client.get("/v1/clairai/capture").json()["consumers"]
            return dict(found)

        assert status()["state"] == "writing"
        with failing(monkeypatch, "create", code):
            answer = server.ask(capture=True)
            wait_until(lambda: status()["state"] == "stopped")
            told = status()
        assert answer.status_code == 200
        assert answer.json()["clairai"]["capture"]["state"] == "writing"
        assert "the disk is full" in answer.json()["clairai"]["capture"]["reason"]
        assert "the disk is full" in told["reason"]
        assert str(tmp_path) not in json.dumps(told)
        assert began <= told["since"] <= time.time()
        wait_until(lambda: status()["state"] == "writing")
        id = answer.json()["clairai"]["capture"]["id"]
        assert server.client.get(f"/v1/captures/{id}").status_code == 200
        assert status()["lost"] == status()["refused"] == 0


@pytest.mark.attack(511)
@pytest.mark.parametrize(
    ("state", "is_up"), [("stopped", False), ("failed", False), ("dropping", True)]
)
def test_health_and_metrics_of_the_proxy_say_that_a_consumer_is_in_trouble(
    state: str, is_up: bool, tmp_path: Path
) -> None:
    with world(tmp_path, metrics=Metrics()) as w, w.client() as client:
        _until_health(w, lambda health: health["status"] == "ready")
        trouble = {"state": state, "reason": "the disk is full", "since": 7.5}
        w.upstream.captures.consumer = {**trouble, "refused": 3, "lost": 4, "free_nbytes": 9}
        w.upstream.captures.dropped = 5
        health = _until_health(w, lambda health: health["status"] == "degraded")
        assert health["reason"] == f"capture consumer fs is {state}: the disk is full"
        assert health["since"] == 7.5
        metrics = client.get("/metrics").text.splitlines()
        assert f'clairai_capture_consumer_up{{consumer="fs"}} {float(is_up)}' in metrics
        assert 'clairai_capture_free_bytes{consumer="fs"} 9.0' in metrics
        for reason, count in (("staging", 5.0), ("queue", 3.0), ("consumer", 4.0)):
            assert f'clairai_capture_rows_lost_total{{reason="{reason}"}} {count}' in metrics
        w.upstream.captures.forget()
        _until_health(w, lambda health: health["status"] == "ready")


def _until_health(w: World, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def look() -> bool:
        with w.client() as client:
            found.append(client.get("/health").json())
        return is_so(found[-1])

    wait_until(look)
    return found[-1]


@pytest.mark.attack(512)
def test_asking_for_health_without_end_does_not_interrupt_the_engine_without_end(
    tmp_path: Path,
) -> None:
    with world(tmp_path) as w, w.client() as client:
        began_s = time.monotonic()
        for _ in range(100):
            assert client.get("/health").json()["status"] == "ready"
        asked = [path for path, _ in w.upstream.captures.asked if "clairai/capture" in path]
        assert 1 <= len(asked) <= 2 + time.monotonic() - began_s


def test_an_engine_that_does_not_capture_is_healthy_and_asked_once(tmp_path: Path) -> None:
    with world(tmp_path, metrics=Metrics()) as w, w.client() as client:
        w.upstream.captures.is_on = False
        assert client.get("/health").json()["status"] == "ready"
        assert "clairai_capture" not in client.get("/metrics").text
        assert len(w.upstream.captures.asked) == 1


@pytest.mark.attack(513)
def test_a_queue_that_drops_rows_is_a_state_until_a_minute_after_the_last() -> None:
    release = threading.Event()
    queue = BlockQueue("drop", 1)
    hung = CallbackConsumer(
        lambda _: release.wait(120), "mod:hangs", about=None, queue=queue, policy="drop"
    )
    guarded = GuardedConsumer(hung)
    try:
        wait_until(lambda: not guarded.offer(block(1)))
        told = guarded.status("fn")
        assert (told.state, told.reason, told.refused) == ("dropping", DROPPING, 3)
        assert time.time() - 30 < told.since <= time.time()
    finally:
        release.set()
        hung.close()
    now = [100.0]
    episode = LossEpisode(lambda: now[0])
    assert episode.since(0) is None
    assert episode.since(1) == 100.0
    now[0] += LOSS_MEMORY_S - 1
    assert episode.since(2) == 100.0
    now[0] += LOSS_MEMORY_S - 1  # since the last, and nearly twice as long since the first
    assert episode.since(2) == 100.0
    now[0] += 2
    assert episode.since(2) is None
    assert episode.since(3) == now[0]


@pytest.mark.attack(514)
def test_a_function_that_raises_is_stopped_since_its_first_failure() -> None:
    is_broken = [True]

    def call(_: object) -> None:
        if is_broken[0]:
            raise RuntimeError("no")

    consumer = CallbackConsumer(
        call, "mod:fn", about=None, queue=BlockQueue("drop", 1 << 20), policy="drop"
    )
    guarded = GuardedConsumer(consumer)
    guarded.offer(block(1))
    wait_until(lambda: guarded.status("fn").state == "stopped")
    since = guarded.status("fn").since
    guarded.offer(block(2))
    guarded.flush(20)
    told = guarded.status("fn")
    assert (told.state, told.since, told.lost) == ("stopped", since, 6)
    is_broken[0] = False
    guarded.offer(block(3))
    guarded.flush(20)
    assert guarded.status("fn").state == "dropping"  # it works again, and lost rows just now
    with pytest.raises(StoreStoppedError):
        consumer.close()


@pytest.mark.attack(515)
def test_an_address_that_takes_nothing_and_says_nothing_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    release, is_stuck = threading.Event(), threading.Event()

    def hang(*_: object) -> Any:
        is_stuck.set()
        assert release.wait(120)
        return iter(())

    monkeypatch.setattr(ShardSender, "send", hang)
    monkeypatch.setattr(folder_consumers, "SEND_SILENT_S", 0.01)
    options = {"folder": str(tmp_path / "s"), "url": f"file://{tmp_path}/there"}
    consumer = FsspecConsumer("fsspec", options, layout="sharded")
    try:
        assert is_stuck.wait(DEADLINE_S)
        wait_until(lambda: consumer.state.name == "stopped")
        assert "has taken nothing for" in consumer.state.reason
    finally:
        release.set()
        consumer.close()


@pytest.mark.attack(516)
def test_an_exception_of_an_address_does_not_end_its_thread_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")

    def fail(*_: object) -> Any:
        raise KeyError("plugin")

    options = {"folder": str(tmp_path / "s"), "url": f"file://{tmp_path}/there"}
    consumer = FsspecConsumer("fsspec", options, layout="sharded")
    with monkeypatch.context() as patched:
        patched.setattr(ShardSender, "send", fail)
        with pytest.raises(StoreStoppedError, match="KeyError"):
            consumer.flush(20)
        state = consumer.state
        assert state.name == "stopped"
        with pytest.raises(StoreStoppedError):
            consumer.flush(20)
        assert consumer.state.since == state.since
    consumer.flush(20)
    assert consumer.state.name == "writing"
    consumer.close()


@pytest.mark.attack(517)
def test_a_writer_that_has_failed_does_not_become_healthy_by_an_earlier_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread fails while the other is in the middle of a commit that then succeeds."""
    may_go, is_committing = threading.Event(), threading.Event()
    real_commit, real_seal = Committer.commit, Committer.seal
    sealed: list[int] = []

    def commit(self: Committer, shards: Any) -> Any:
        is_committing.set()
        assert may_go.wait(120)
        return real_commit(self, shards)

    def seal(self: Committer, pending: Any) -> Any:
        sealed.append(len(pending))
        if len(sealed) == 2:
            raise MemoryError("planted")
        return real_seal(self, pending)

    monkeypatch.setattr(Committer, "commit", commit)
    monkeypatch.setattr(Committer, "seal", seal)
    writer = Writer(tmp_path / "s", limits=QUICK)
    writer.offer(block(1))
    assert is_committing.wait(DEADLINE_S)
    writer.offer(block(2))
    wait_until(lambda: writer.state.name == "failed")
    may_go.set()
    wait_until(lambda: writer.counts.committed == 3)
    assert writer.state.name == "failed"
    assert "planted" in writer.state.reason
    assert not writer.offer(block(3))
    with pytest.raises(StoreStoppedError, match="planted"):
        writer.close()


@pytest.mark.attack(518)
def test_a_spill_file_that_cannot_be_read_costs_its_rows_and_not_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = BlockQueue("spill", 1, spill := SpillFile(tmp_path, 1 << 20))
    for stream in (1, 2, 3):
        assert queue.put(block(stream))
    monkeypatch.setattr("clairai.store.block_queue._load_block", _raise_once())
    found: list[object] = []
    while len(found) < 2:
        found += queue.get(None)
    assert (queue.counts.lost, queue.losses(2), queue.losses(3)) == (3, 3, 0)
    assert queue.put(block(4))
    spill.close()


def _raise_once() -> Callable[[bytes], object]:
    from clairai.store.block_queue import _load_block

    calls: list[int] = []

    def load(data: bytes) -> object:
        calls.append(len(data))
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return _load_block(data)

    return load


@pytest.mark.attack(519)
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_broken_disk_fails_the_consumer_for_good_and_nothing_partial_is_visible(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = GuardedConsumer(Writer(tmp_path / "s", limits=QUICK))  # type: ignore[arg-type]
    with failing(monkeypatch, "sync", code):
        guarded.offer(block(1))
        wait_until(lambda: guarded.state.name == "failed")
    guarded.offer(block(2))
    told = GuardedConsumer.state.fget(guarded)  # type: ignore[attr-defined]
    assert "the disk refused a shard" in told.reason
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["lock", "manifest"]
    with pytest.raises(StoreStoppedError):
        guarded.close()


def test_free_space_is_reported_without_the_reserve(tmp_path: Path) -> None:
    limits = WriterLimits(reserve_nbytes=1 << 62)
    with Writer(tmp_path / "s", limits=limits) as writer:
        assert writer.free_nbytes == 0
    with Writer(tmp_path / "s", limits=QUICK) as writer:
        assert (writer.free_nbytes or 0) > 0
    assert writer.free_nbytes is None
