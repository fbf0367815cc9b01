"""Engines come, go and share a folder: the proxy reads the one that answers it, and says so."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.errors import RingError
from clairai.proxy import ring_feed
from clairai.proxy.app import create_app
from clairai.proxy.observe.observer import CompletionEnd
from clairai.proxy.proxy_settings import ProxySettings
from clairai.ring.layout import RingShape
from clairai.wire import ring_messages
from tests.http.answers import CHAT, asking, chunks, collect_scores, expected
from tests.http.fake import Exchange, Ring, answering, bank_of
from tests.http.world import HURRIED, World, world
from tests.support.ring_engine import running_engine, until

HELLO = [72, 101, 108, 108, 111]


def scored(w: World) -> tuple[int, int]:
    """Tokens told with a score, and tokens told as lost."""
    with w.client() as client:
        (one,) = collect_scores(chunks(client.post(CHAT, json=asking()).content)).values()
    return sum(bool(row and row["token"]) for row in one.scores), one.lost


class Hanging:
    """An observer that takes as long as the test says: the thread that reads waits for it."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def on_scores(self, *_: object) -> None:
        assert self.go.wait(60)

    def on_completion_end(self, _: CompletionEnd) -> None: ...


def test_a_reading_thread_that_hangs_is_told_by_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_feed, "STALLED_S", 0.3)
    hanging = Hanging()
    with world(tmp_path, observers=(hanging,)) as w, w.client() as client:
        until(lambda: client.get("/health").json()["status"] == "ready")
        assert w.upstream.ring is not None
        w.upstream.ring.rows(1, 0, [1])
        until(lambda: client.get("/health").json()["status"] == "degraded")
        reason = "the thread that reads the ring hangs: scores are lost"
        assert client.get("/health").json()["reason"] == reason
        hanging.go.set()
        until(lambda: client.get("/health").json()["status"] == "ready")


def test_an_engine_that_restarts_is_read_again(tmp_path: Path) -> None:
    with world(tmp_path, script=answering(HELLO), has_ring=False) as w, w.client() as client:
        assert scored(w) == (0, 4)
        assert client.get("/health").json()["status"] == "degraded"
        for _ in range(2):
            with running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of) as engine:
                w.upstream.epoch, w.upstream.ring = engine.epoch, Ring(engine.writer)
                until(lambda: w.proxy.feed.is_attached)
                assert scored(w) == (4, 0)
                assert client.get("/health").json()["status"] == "ready"
                assert client.get("/v1/clairai").json()["reader"]["attached"] is True
            until(lambda: not w.proxy.feed.is_attached)
            w.upstream.ring = None
            assert scored(w) == (0, 4)
        ring = w.proxy.counts().ring
        assert ring.records_delivered == 2 * 5  # counts go on across engines
        assert ring.records_lost == 0
        assert ring.restarts == 1


def test_a_ring_that_closes_in_a_stream_loses_what_follows(tmp_path: Path) -> None:
    is_closed = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, HELLO[:2])
        await exchange.tokens(HELLO[:3])
        await exchange.end_when(is_closed)
        await exchange.tokens(HELLO[3:], finish="stop")
        await exchange.end()

    with world(tmp_path, has_ring=False) as w, w.client() as client:
        with running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of) as engine:
            w.upstream.epoch, w.upstream.ring = engine.epoch, Ring(engine.writer)
            until(lambda: w.proxy.feed.is_attached)
            w.upstream.script = script
            raw = b""
            stream = client.stream("POST", CHAT, json=asking())
            parts = iter(stream.__enter__().iter_bytes())
            until(lambda: w.proxy.counts().ring.records_delivered == 1)
        until(lambda: not w.proxy.feed.is_attached)
        is_closed.set()
        raw = b"".join(parts)
        stream.__exit__(None, None, None)
    (one,) = collect_scores(chunks(raw)).values()
    assert [row["token"] for row in one.scores] == [72, 101, None, None, None]
    assert one.lost == 2


def test_of_two_engines_in_a_folder_the_one_that_answers_is_read(tmp_path: Path) -> None:
    with (
        running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of) as ours,
        running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of),  # newer
        world(tmp_path, script=answering(HELLO), has_ring=False) as w,
    ):
        w.upstream.epoch, w.upstream.ring = ours.epoch, Ring(ours.writer)
        until(lambda: w.proxy.feed.is_attached)
        assert w.proxy.feed.epochs == (ours.epoch,)
        assert scored(w) == (4, 0)


def test_the_rings_of_all_cores_of_an_engine_are_read(tmp_path: Path) -> None:
    """Each answer's rows are in one of them; health and metrics name the core."""
    shape = RingShape(64, 4096)
    with (
        running_engine(tmp_path, shape=shape, bank_of=bank_of) as first,
        running_engine(tmp_path, shape=shape, bank_of=bank_of),  # somebody else's
        world(tmp_path, script=answering(HELLO), has_ring=False) as w,
        w.client() as client,
    ):
        with running_engine(tmp_path, shape=shape, bank_of=bank_of) as second:
            w.upstream.epoch = first.epoch
            w.upstream.core_epochs = (first.epoch, second.epoch)
            until(lambda: w.proxy.feed.epochs == (first.epoch, second.epoch))
            until(lambda: w.proxy.feed.is_attached)
            for core in (first, second, second):
                w.upstream.ring = Ring(core.writer)
                assert scored(w) == (4, 0)
            assert client.get("/health").json()["status"] == "ready"
            cores = w.proxy.counts().ring.cores
            assert [core.rows for core in cores] == [8, 16]
        until(lambda: not w.proxy.feed.is_attached)
        assert client.get("/health").json()["reason"] == (
            "engine core 1's ring is not attached: scores are lost"
        )
        assert [core.attached for core in w.proxy.counts().ring.cores] == [True, False]


def test_an_engine_with_fewer_cores_leaves_the_counts_of_the_others(tmp_path: Path) -> None:
    shape = RingShape(64, 4096)
    with (
        running_engine(tmp_path, shape=shape, bank_of=bank_of) as first,
        running_engine(tmp_path, shape=shape, bank_of=bank_of) as second,
        world(tmp_path, script=answering(HELLO), has_ring=False) as w,
    ):
        w.upstream.epoch = first.epoch
        w.upstream.core_epochs = (first.epoch, second.epoch)
        w.upstream.ring = Ring(second.writer)
        until(lambda: w.proxy.feed.is_attached)
        assert scored(w) == (4, 0)
        w.proxy.feed.set_targets({first.server.path: "oldest"})
        until(lambda: not w.proxy.feed._rings[1].is_attached)
        assert w.proxy.feed.is_attached
        counts = w.proxy.counts().ring
        assert (counts.records_delivered, counts.cores) == (5, ())


def test_without_routes_the_newest_engine_is_read(tmp_path: Path) -> None:
    with world(tmp_path, script=answering(HELLO), has_routes=False) as w, w.client() as client:
        assert scored(w) == (4, 0)
        refused = client.post(CHAT, json=asking(events="named"))
        with running_engine(tmp_path, bank_of=bank_of) as newer:
            until(lambda: w.proxy.feed.epochs == (newer.epoch,))
    assert refused.status_code == 400
    assert "VLLM_PLUGINS" in refused.json()["error"]["message"]


def test_an_engine_without_taps_is_not_mistaken_for_another(tmp_path: Path) -> None:
    with (
        running_engine(tmp_path, bank_of=bank_of),  # somebody else's
        world(tmp_path, script=answering(HELLO), has_ring=False) as w,
        w.client() as client,
    ):
        assert client.get("/v1/clairai").status_code == 404
        assert not w.proxy.feed.is_attached
        assert scored(w) == (0, 4)
        assert client.get("/health").json()["status"] == "degraded"
        named = client.post(CHAT, json=asking(events="named"))
        assert named.status_code == 200  # tokens are shown without taps too


def test_only_the_configured_socket_is_read(tmp_path: Path) -> None:
    with running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of) as engine:
        path = engine.server.path
        with world(tmp_path, script=answering(HELLO), has_ring=False, ring_socket=path) as w:
            w.upstream.epoch, w.upstream.ring = 1, Ring(engine.writer)
            until(lambda: w.proxy.feed.is_attached)
            assert scored(w) == (4, 0)


def test_a_folder_that_others_can_reach_into_is_refused_at_the_start(tmp_path: Path) -> None:
    app = create_app(ProxySettings("http://127.0.0.1:9", runtime_dir=tmp_path))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(start())
    tmp_path.chmod(0o755)
    with pytest.raises(RingError, match="open to others"):
        asyncio.run(start())


def test_records_that_were_overwritten_are_counted_and_degrade_health(tmp_path: Path) -> None:
    small = RingShape(slots=4, slot_bytes=4096)
    with (
        world(tmp_path, shape=small, timeouts=HURRIED) as w,
        w.client() as client,
    ):
        assert w.upstream.ring is not None
        while w.proxy.counts().ring.records_lost == 0:
            for _ in range(50):
                w.upstream.ring.rows(1, 0, [1])
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "lost" in health.json()["reason"]


def test_a_record_with_unknown_columns_is_lost_and_the_next_are_read(w: World) -> None:
    assert w.engine is not None
    before = w.proxy.counts().ring.records_lost
    rows = np.zeros(1, ring_messages.ROW)
    for columns, bank in ((3, 1), (2, 9)):  # not as many as its bank has; a bank there never was
        scores = np.zeros((1, columns), np.float32)
        w.engine.writer.publish(rows, scores, bank_version=bank, step=0)
    w.upstream.script = answering(HELLO)
    assert scored(w) == (4, 0)
    assert w.proxy.counts().ring.records_lost == before + 2


def test_counts_of_records_never_go_back_not_even_for_a_moment(w: World) -> None:
    """To Prometheus a counter that goes back has begun anew: it would add all of it again."""
    delivered: list[int] = []

    class Sampler(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            delivered.append(w.proxy.feed.counts(0).records_delivered)

    assert scored(w) == (1, 0)
    assert w.engine is not None
    until(lambda: w.proxy.counts().ring.lag == 0)
    before = w.proxy.counts().ring
    sampler, logger = Sampler(), logging.getLogger("clairai.proxy.ring_feed")
    logger.addHandler(sampler)  # called on the feed's thread, where it notices the loss
    try:
        rows, scores = np.zeros(1, ring_messages.ROW), np.zeros((1, 2), np.float32)
        w.engine.writer.publish(rows, scores, bank_version=9, step=0)
        until(lambda: w.proxy.counts().ring.records_lost == before.records_lost + 1)
    finally:
        logger.removeHandler(sampler)
    assert delivered == [before.records_delivered]


def test_a_feed_that_fails_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([RuntimeError("planted")])

    def fail(feed: Any, *_: object) -> None:
        del feed
        raise next(failures, RingError("once is enough"))

    with world(tmp_path, script=answering(HELLO), timeouts=HURRIED) as w:
        with monkeypatch.context() as patch:
            patch.setattr("clairai.proxy.ring_feed.RingFeed._read_records", fail)
            assert scored(w) == (0, 4)
        until(lambda: w.proxy.feed.is_attached)
        until(lambda: scored(w) == (4, 0))


class Watcher:
    """An observer that keeps what it is told; raises if asked to."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.scores: list[tuple[tuple[str, ...], int]] = []
        self.ends: list[CompletionEnd] = []
        self._is_broken = is_broken

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        assert stamp_ns <= time.monotonic_ns()
        self.scores.append((tuple(probe.name for probe in bank.probes), len(rows)))
        assert scores_RP.shape == (len(rows), len(bank.probes))
        if self._is_broken:
            raise RuntimeError("broken")

    def on_completion_end(self, end: CompletionEnd) -> None:
        self.ends.append(end)


def test_observers_see_every_row_and_the_end_of_every_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watcher, broken = Watcher(), Watcher(is_broken=True)
    with world(tmp_path, script=answering(HELLO), observers=(watcher, broken)) as w:
        assert scored(w) == (4, 0)
        assert w.upstream.ring is not None
        w.upstream.ring.rows(99, 0, [1, 2, 3])  # somebody else's
        until(lambda: watcher.scores[-1:] == [(("token", "position"), 3)] and watcher.ends)
        (end,) = watcher.ends
    assert (end.response_id, end.model, end.route, end.outcome) == (
        "chatcmpl-1",
        "toy",
        CHAT,
        "done",
    )
    (choice,) = end.choices
    assert (choice.tokens, choice.count, choice.lost) == (5, 4, 0)
    assert (choice.probes[0].name, choice.probes[0].above) == ("token", 3)
    assert len(broken.scores) == 1  # removed after its first error
    assert "is removed" in caplog.text


def test_a_run_that_its_client_left_ends_as_cancelled(tmp_path: Path) -> None:
    watcher = Watcher()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.forever()

    with world(tmp_path, script=script, observers=(watcher,)) as w, w.client() as client:
        with client.stream("POST", CHAT, json=asking()) as answer:
            next(answer.iter_bytes())
        until(lambda: watcher.ends)
        assert watcher.ends[0].outcome == "cancelled"
        assert w.proxy.counts().ended["cancelled"] == 1


def test_metrics_are_the_text_of_the_metrics_observer_and_then_vllms_own(tmp_path: Path) -> None:
    class Counting(Watcher):
        content_type: str = "text/plain; version=1"

        def snapshot(self, counts: Any, others: Any = ()) -> Callable[[], bytes]:
            del others
            return lambda: f"streams {counts.streams}\n".encode()

    with world(tmp_path, metrics=Counting()) as w, w.client() as client:
        answer = client.get("/metrics")
    own, _, others = answer.text.partition("\n")
    assert own == "streams 0"
    assert others == "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
    assert answer.headers["content-type"] == "text/plain; version=1"


def test_names_are_checked_against_the_bank_before_anything_is_generated(w: World) -> None:
    with w.client() as client:
        refused = client.post(CHAT, json=asking(probes=["token", "nobody"]))
    assert refused.status_code == 400
    assert "'nobody'" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "clairai.probes"
    assert w.upstream.seen == []


def test_expected_scores_are_what_the_fake_engine_gives() -> None:
    assert expected([7, 8]) == [{"token": 7, "position": 4}, {"token": None, "position": None}]
