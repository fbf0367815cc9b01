"""Rows that are cached, forwarded again, lost or late: delivered once or not at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from clairai.wire import ring_messages
from tests.http.answers import CHAT, asking, chunks, collect_scores, expected
from tests.http.fake import PROMPT, Exchange
from tests.http.world import HURRIED, PATIENT, World, world
from tests.support.ring_engine import until

HELLO = [72, 101, 108, 108, 111]
BYE = [66, 121, 101]


def ask(w: World, path: str = CHAT, **body: Any) -> bytes:
    with w.client() as client:
        answer = client.post(path, json={**asking(), **body})
    assert answer.status_code == 200, answer.text
    return answer.content


def test_cached_tokens_have_no_scores_and_are_not_lost(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        assert exchange.ring is not None
        exchange.ring.mark(exchange.stream, ring_messages.CACHED, position=0, span=3)
        exchange.rows(3, PROMPT[3:], phase=ring_messages.PREFILL)
        await exchange.begin()
        await exchange.tokens([72], finish="length")
        await exchange.end()

    w.upstream.script = script
    (one,) = collect_scores(chunks(ask(w, clairai={"prompt_scores": True}))).values()
    assert one.prompt is not None
    assert one.prompt["scores"] == [[None, None]] * 3 + [[257.0, 3.0]]
    assert "lost" not in one.prompt


def test_tokens_forwarded_again_after_a_preemption_are_delivered_once(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.prefill()
        await exchange.begin()
        await exchange.tokens([72])
        exchange.rows(4, [72])
        await exchange.tokens([101])
        everything = [*PROMPT, 72]
        exchange.rows(
            0, everything[:4], phase=ring_messages.PREFILL, flags=ring_messages.RECOMPUTED
        )
        exchange.rows(4, everything[4:], flags=ring_messages.RECOMPUTED)
        exchange.rows(5, [101])
        await exchange.tokens([108], finish="stop")
        await exchange.end()

    w.upstream.script = script
    (one,) = collect_scores(chunks(ask(w))).values()
    assert one.scores == expected([72, 101, 108])
    assert one.lost == 0


def test_a_row_of_another_token_is_not_delivered_and_is_counted(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, [72, 99, 108])  # the stream says 101
        await exchange.tokens([72, 101, 108, 111], finish="stop")
        await exchange.end()

    w.upstream.script = script
    before = w.proxy.counts().ring.mismatched
    (one,) = collect_scores(chunks(ask(w))).values()
    mismatched = w.proxy.counts().ring.mismatched - before
    nothing = {"token": None, "position": None}
    assert one.scores == [*expected([72, 1])[:1], nothing, {"token": 108, "position": 6}, nothing]
    assert (one.lost, mismatched) == (1, 1)


def test_rows_of_another_stream_are_not_delivered(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        assert exchange.ring is not None
        await exchange.begin()
        exchange.ring.rows(exchange.stream ^ 1, 4, [72, 101])
        await exchange.tokens([72, 101, 108], finish="stop")
        await exchange.end()

    with world(tmp_path, script=script, timeouts=HURRIED) as w:
        (one,) = collect_scores(chunks(ask(w, clairai={"probes": ["token"]}))).values()
        until(lambda: w.proxy.counts().ring.orphaned == 2)
        assert w.proxy.counts().ring.rows == 0
    assert one.scores == [{"token": None}] * 3
    assert one.lost == 2


def test_an_overwritten_row_is_lost_and_the_next_are_delivered(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        exchange.rows(4, [72])
        await exchange.tokens([101])
        # Token 101 was forwarded, but its record never reached us; 108's did.
        exchange.rows(6, [108])
        await exchange.tokens([108])
        await exchange.tokens([111], finish="stop")
        await exchange.end()

    w.upstream.script = script
    (one,) = collect_scores(chunks(ask(w))).values()
    assert [row["token"] for row in one.scores] == [72, None, 108, None]
    assert one.lost == 1


def test_a_bank_that_changes_in_between_is_followed_by_name(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, [72])
        exchange.rows(5, [101], bank=2)
        await exchange.tokens([72, 101, 108], finish="stop")
        await exchange.end()

    with world(tmp_path, script=script) as w:
        (one,) = collect_scores(chunks(ask(w))).values()
        (named,) = collect_scores(
            chunks(ask(w, clairai={"probes": ["token", "position"]}))
        ).values()
    nothing = dict.fromkeys(("token", "position", "negative"))
    first, second = {"token": 72, "position": 4}, {"position": 5, "negative": -101}
    assert one.scores == [nothing | first, nothing | second, nothing]
    assert named.scores[1] == {"token": None, "position": 5}
    assert (one.lost, named.lost) == (0, 0)


def test_the_last_chunk_waits_for_rows_that_are_on_their_way(tmp_path: Path) -> None:
    is_sent = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72, 101], finish="stop")
        await exchange.end()
        is_sent.set()

    with world(tmp_path, script=script) as w:
        got: list[bytes] = []
        asking_thread = threading.Thread(target=lambda: got.append(ask(w)))
        asking_thread.start()
        assert is_sent.wait(60)
        w.upstream.last.rows(4, [72])
        asking_thread.join(60)
    (one,) = collect_scores(chunks(got[0])).values()
    assert one.scores == expected([72, 101])


def test_a_choice_that_waits_for_rows_holds_back_no_other(tmp_path: Path) -> None:
    is_seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin(choices=2)
        await exchange.tokens([72, 101], finish="stop")  # its row comes only after 66 was seen
        await exchange.tokens([66], choice=1)
        await exchange.end_when(is_seen)
        exchange.rows(4, [72])
        exchange.rows(4, [66], choice=1)
        await exchange.tokens([121], choice=1, finish="stop")
        await exchange.end()

    with world(tmp_path, script=script) as w:
        for raw in w.growing({**asking(), "n": 2}):
            if b'"content":"B"' in raw:
                is_seen.set()
    found = collect_scores(chunks(raw))
    assert found[0].scores == expected([72, 101])
    assert found[1].scores == expected([66, 121])


def test_a_last_chunk_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72, 101], finish="stop")
        await exchange.end()

    with world(tmp_path, script=script, timeouts=HURRIED) as w:
        (one,) = collect_scores(chunks(ask(w))).values()
        (whole,) = collect_scores(chunks(ask(w))).values()
    assert (len(one.scores), one.lost) == (2, 1)
    assert (len(whole.scores), whole.lost) == (2, 1)


def test_a_last_row_that_was_lost_is_not_waited_for(w: World) -> None:
    """The engine's mark that it has finished says that no row follows."""

    async def script(exchange: Exchange) -> None:
        assert exchange.ring is not None
        exchange.prefill()
        await exchange.begin()
        exchange.rows(4, [72])
        exchange.ring.mark(exchange.stream, ring_messages.FINISHED, position=6, span=0)
        await exchange.tokens([72, 101, 108], finish="stop")
        await exchange.end()

    w.upstream.script = script
    begun_s = time.monotonic()
    (one,) = collect_scores(chunks(ask(w))).values()
    assert time.monotonic() - begun_s < PATIENT.finish / 2
    assert (one.scores[:1], one.lost) == (expected([72, 101])[:1], 1)
