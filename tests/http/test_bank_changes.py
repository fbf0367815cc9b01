"""A change of the bank that was answered is known: no later request is answered by the bank before.

Rows that the engine published before the change may be read after it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from clairai.ring.layout import RingShape
from tests.http.answers import CHAT
from tests.http.fake import NAMES, OTHER_BANK, Ring, answering, bank_of
from tests.http.world import World, world
from tests.support.ring_engine import running_engine, until

OTHER_NAMES = [probe.name for probe in OTHER_BANK.probes]


def ask(client: httpx.Client, *names: str) -> httpx.Response:
    """A completion of one token, of which no row ever comes; without names: all probes."""
    return client.post(CHAT, json={"messages": [], "clairai": {"probes": names or "all"}})


def names_in(answer: httpx.Response) -> list[str]:
    found: list[str] = answer.json()["choices"][0]["probe_scores"]["names"]
    return found


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 400 and answer.json()["error"]["code"] == "probe"


def publish(w: World, bank: int = 1) -> None:
    """A row of nobody; returns when it was read."""
    assert w.upstream.ring is not None
    before = w.proxy.counts().ring.records_delivered
    w.upstream.ring.rows(12345, 0, [1], bank=bank)
    until(lambda: w.proxy.counts().ring.records_delivered > before)


def change(w: World, client: httpx.Client, name: str = "token") -> httpx.Response:
    w.upstream.bank = OTHER_BANK
    return client.delete(f"/v1/probes/{name}")


def test_rows_of_the_bank_before_name_no_probes_any_more(tmp_path: Path) -> None:
    with world(tmp_path, script=answering([72])) as w, w.client() as client:
        publish(w)
        assert ask(client, "token").status_code == 200
        assert names_in(ask(client)) == list(NAMES)
        assert change(w, client).status_code == 200
        publish(w)  # late
        assert is_refused(ask(client, "token"))
        assert names_in(ask(client)) == OTHER_NAMES
        assert ask(client, "negative").status_code == 200


def test_a_bank_that_changes_while_the_engine_is_asked_is_asked_again(tmp_path: Path) -> None:
    with (
        world(tmp_path, script=answering([72])) as w,
        w.client() as client,
        w.client() as changing,
        ThreadPoolExecutor() as pool,
    ):
        w.upstream.listing = threading.Event()
        early = pool.submit(ask, client, "token")
        w.upstream.wait_for(lambda: w.upstream.probes)  # it has listed the bank
        assert change(w, changing).status_code == 200
        w.upstream.listing.set()
        assert early.result().status_code == 200  # it came before the change
        assert is_refused(ask(client, "token"))


def test_a_change_without_an_answer_may_have_happened(tmp_path: Path) -> None:
    with world(tmp_path, script=answering([72])) as w, w.client() as client:
        publish(w)
        assert client.get("/health").json()["status"] == "ready"
        assert change(w, client, "lost").status_code == 502
        assert is_refused(ask(client, "token"))


def test_a_bank_that_somebody_else_changed_is_known_with_its_first_row(tmp_path: Path) -> None:
    with world(tmp_path, script=answering([72])) as w, w.client() as client:
        assert ask(client, "token").status_code == 200
        assert change(w, client).status_code == 200
        assert names_in(ask(client)) == OTHER_NAMES
        publish(w, bank=5)  # changed at vLLM's own port
        assert names_in(ask(client)) == list(NAMES)


def test_the_probes_of_an_engine_before_are_forgotten(tmp_path: Path) -> None:
    with world(tmp_path, script=answering([72])) as w, w.client() as client:
        publish(w)
        assert ask(client, "token").status_code == 200
        w.upstream.bank = OTHER_BANK
        with running_engine(tmp_path, shape=RingShape(64, 4096), bank_of=bank_of) as engine:
            w.upstream.epoch, w.upstream.ring = engine.epoch, Ring(engine.writer)
            assert w.engine is not None
            w.engine.server.close()
            until(lambda: w.proxy.feed.epochs == (engine.epoch,))
            assert is_refused(ask(client, "token"))
