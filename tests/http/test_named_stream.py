"""Named runs: numbered events that clients can leave and resume."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.proxy.proxy_settings import Limits
from tests.http.answers import CHAT, TEXT, asking, collect_event_scores, events, expected
from tests.http.fake import PROMPT, Exchange, answering
from tests.http.world import HURRIED, PATIENT, World, world
from tests.support.ring_engine import until

HELLO = [72, 101, 108, 108, 111]
NAMED = asking(events="named")


def ask(w: World, path: str = CHAT, **body: Any) -> httpx.Response:
    with w.client() as client:
        return client.post(path, json={**NAMED, **body})


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_run_is_a_stream_of_events_numbered_from_one(w: World, path: str) -> None:
    w.upstream.script = answering(HELLO)
    got = ask(w, path, stream=False)  # named events are a stream, whatever this says
    found = events(got.content)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.headers["x-accel-buffering"] == "no"
    assert [event.number for event in found] == [*range(1, len(found) + 1)]
    assert [event.name for event in found[-2:]] == ["probe_final", "done"]
    (one,) = collect_event_scores(found).values()
    assert (one.scores, one.text, one.lost) == (expected(HELLO), "Hello", 0)
    tokens = [event.data for event in found if event.name == "token"]
    assert [token["token_ids"] for token in tokens] == [[i] for i in HELLO]
    assert [token["start"] for token in tokens] == [0, 1, 2, 3, 4]
    assert "".join(text for token in tokens for text in token["tokens"]) == "Hello"


def test_the_last_events_sum_up_each_choice_and_the_run(w: World) -> None:
    w.upstream.script = answering(HELLO, [66, 121, 101])
    found = events(ask(w, n=2).content)
    finals = {event.data["choice"]: event.data for event in found if event.name == "probe_final"}
    assert finals[0] == {
        "choice": 0,
        "names": ["token", "position"],
        "count": 4,
        "mean": [97.25, 5.5],
        "max": [108.0, 7.0],
        "argmax": [2, 3],
        "above": [3, None],
        "lost": 0,
    }
    assert finals[1]["count"] == 2
    assert found[-1].data == {
        "id": "chatcmpl-1",
        "model": "toy",
        "finish_reasons": ["length", "length"],
        "stop_reasons": [None, None],
        "usage": {"prompt_tokens": 4, "total_tokens": 12, "completion_tokens": 8},
    }


def test_prompt_tokens_come_with_special_ones_as_they_are_written(w: World) -> None:
    found = events(ask(w, clairai={"events": "named", "prompt_scores": True}).content)
    first, second = [event for event in found if event.data.get("part") == "prompt"]
    assert first.data["token_ids"] == PROMPT
    assert first.data["tokens"] == ["<|im_start|>", "H", "i", "<|im_end|>"]
    assert second.name == "probe_update"
    assert len(second.data["scores"]) == len(PROMPT)


def test_a_character_in_pieces_is_shown_at_its_last_token(w: World) -> None:
    smile = list("a🙂é".encode())
    w.upstream.script = answering([*smile, 195])
    found = events(ask(w).content)
    tokens = [text for e in found if e.name == "token" for text in e.data["tokens"]]
    assert tokens == ["a", "", "", "", "🙂", "", "é", "\ufffd"]


def test_a_client_that_resumes_gets_the_next_events_and_no_second_generation(w: World) -> None:
    go = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, HELLO[:4])
        for token in HELLO[:2]:
            await exchange.tokens([token])
        await exchange.end_when(go)
        await exchange.tokens(HELLO[2:], finish="stop")
        await exchange.end()

    w.upstream.script = script
    with w.client() as client:
        with client.stream("POST", CHAT, json=NAMED) as first:
            run, parts = first.headers["x-clairai-run"], first.iter_bytes()
            begun = events(next(parts))
        go.set()
        after = {"Last-Event-ID": str(begun[-1].number)}
        rest = events(client.get(f"/v1/runs/{run}", headers=after).content)
        by_query = events(client.get(f"/v1/runs/{run}?after=1").content)
        whole = events(client.get(f"/v1/runs/{run}").content)
        nothing = client.get(f"/v1/runs/{run}?after={whole[-1].number}")
    assert [e.number for e in (*begun, *rest)] == [*range(1, len(begun) + len(rest) + 1)]
    assert [*begun, *rest] == whole
    assert by_query == whole[1:]
    assert collect_event_scores(whole)[0].scores == expected(HELLO)
    assert (nothing.status_code, nothing.content) == (204, b"")
    assert len(w.upstream.seen) == 1


def test_a_stopped_run_ends_at_once_with_all_it_had(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, [72])
        await exchange.tokens([72, 101])
        await exchange.forever()

    w.upstream.script = script
    with w.client() as client, client.stream("POST", CHAT, json=NAMED) as answer:
        parts, raw = answer.iter_bytes(), b""
        while b"event: probe_update" not in raw:
            raw += next(parts)
        with w.client() as other:
            stopped = other.delete(f"/v1/runs/{answer.headers['x-clairai-run']}")
        raw += b"".join(parts)
        w.upstream.wait_for(lambda: w.upstream.last.was_cancelled)
    found = events(raw)
    assert stopped.status_code == 204
    assert [event.name for event in found[-3:]] == ["probe_update", "probe_final", "done"]
    assert found[-1].data["finish_reasons"] == ["cancelled"]
    assert collect_event_scores(found)[0].scores == expected([72, 101])


def test_a_run_without_a_client_is_cancelled(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.forever()

    hurried = replace(PATIENT, run_alone=0.2, run_kept=0.2)
    with world(tmp_path, script=script, timeouts=hurried) as w, w.client() as client:
        with client.stream("POST", CHAT, json=NAMED) as answer:
            run = answer.headers["x-clairai-run"]
            next(answer.iter_bytes())
            assert not w.upstream.last.was_cancelled
        w.upstream.wait_for(lambda: w.upstream.last.was_cancelled)
        until(lambda: client.get(f"/v1/runs/{run}").status_code == 404)
        assert len(w.proxy.runs) == 0


def test_a_quiet_run_sends_a_comment_now_and_then(tmp_path: Path) -> None:
    go = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.end_when(go)
        await exchange.tokens([101], finish="stop")
        await exchange.end()

    chatty = replace(HURRIED, ping=0.05)
    with world(tmp_path, script=script, timeouts=chatty) as w:
        for raw in w.growing(NAMED):
            if b": ping\n\n" in raw:
                go.set()
    assert events(raw)[-1].name == "done"


def test_an_engine_that_dies_ends_the_run_with_an_error(w: World) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        exchange.die()

    w.upstream.script = script
    found = events(ask(w).content)
    assert [event.name for event in found] == ["token", "error"]
    assert found[-1].data["error"]["code"] == "engine-gone"


def test_an_error_that_the_engine_tells_is_the_last_event(w: World) -> None:
    error = {"message": "out of blocks", "type": "InternalServerError", "param": None, "code": 500}

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"error": error})
        await exchange.end()

    w.upstream.script = script
    found = events(ask(w).content)
    assert [event.name for event in found] == ["error"]
    assert found[0].data == {"error": error}


@pytest.mark.parametrize(
    ("after", "status"), [("x", 400), ("-1", 400), ("99999", 400), ("9" * 30, 400)]
)
def test_a_number_that_no_event_has_is_refused(w: World, after: str, status: int) -> None:
    run = ask(w).headers["x-clairai-run"]
    with w.client() as client:
        assert client.get(f"/v1/runs/{run}?after={after}").status_code == status
        assert client.get(f"/v1/runs/{'0' * 32}").status_code == 404
        assert client.delete(f"/v1/runs/{'0' * 32}").status_code == 404


def test_resuming_after_dropped_events_is_refused(tmp_path: Path) -> None:
    small = Limits(run_bytes=1500)
    with world(tmp_path, script=answering(HELLO * 4), limits=small) as w, w.client() as client:
        answer = client.post(CHAT, json=NAMED)
        run, found = answer.headers["x-clairai-run"], events(answer.content)
        assert [e.number for e in found] == [*range(1, len(found) + 1)]  # its own client got all
        assert client.get(f"/v1/runs/{run}?after=0").status_code == 410
        tail = client.get(f"/v1/runs/{run}?after={len(found) - 2}")
        assert events(tail.content) == found[-2:]


def test_no_more_runs_are_begun_than_can_be_held(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.forever()

    with (
        world(tmp_path, script=script, limits=Limits(runs=1)) as w,
        w.client() as client,
        client.stream("POST", CHAT, json=NAMED) as first,
    ):
        next(first.iter_bytes())
        refused = ask(w)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        client.delete(f"/v1/runs/{first.headers['x-clairai-run']}")
        w.upstream.wait_for(lambda: w.upstream.seen[0].was_cancelled)
        w.upstream.script = answering([72, 105])
        assert events(ask(w).content)[-1].name == "done"


def test_a_refusal_of_upstream_is_no_run(w: World) -> None:
    async def script(exchange: Exchange) -> Any:
        return exchange.refuse(404, "no such model")

    w.upstream.script = script
    answer = ask(w)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such model"
    assert "x-clairai-run" not in answer.headers


def test_every_event_is_one_line_of_json_however_odd_the_text(w: World) -> None:
    odd = list('a\r\n\u2028\x00"\\'.encode())
    w.upstream.script = answering(odd, at_once=len(odd))
    raw = ask(w).content
    found = events(raw)
    assert collect_event_scores(found)[0].text == 'a\r\n\u2028\x00"\\'
    assert all(json.dumps(event.data) for event in found)
