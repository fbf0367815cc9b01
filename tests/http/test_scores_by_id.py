"""Scores fetched by the id of their answer, for clients that drop fields they do not know."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.proxy import schema as models
from clairai.proxy.access_keys import AccessKey
from clairai.proxy.proxy_settings import Timeouts
from tests.http.answers import CHAT, TEXT, asking, chunks, collect_scores, events, expected
from tests.http.fake import PROMPT, Exchange, answering
from tests.http.world import PATIENT, World, world
from tests.support.ring_engine import until

HELLO = [72, 101, 108, 108, 111]
HEADER = {"X-Clairai-Scores": "all"}
KEYS = (
    AccessKey.of("key-of-alice-0001", name="alice", rights=("read",)),
    AccessKey.of("key-of-bob-000001", name="bob", rights=("read",)),
    AccessKey.of("key-of-root-00001", name="root", rights=("admin",)),
)


def plain(path: str = CHAT, **more: Any) -> dict[str, Any]:
    """A request without a word about scores."""
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {**asked, **more}


def fetch(w: World, response_id: str, *, key: str | None = None) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with w.client(headers=headers) as client:
        return client.get(f"/v1/scores/{response_id}")


def rows(choice: dict[str, Any]) -> list[dict[str, float | None]]:
    found = choice["probe_scores"]
    return [dict(zip(found["names"], row, strict=True)) for row in found["scores"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_is_untouched_and_its_scores_are_kept(
    w: World, path: str, is_streamed: bool
) -> None:
    w.upstream.script = answering(HELLO, [66, 121, 101])
    body = plain(path, n=2, stream=is_streamed)
    with w.client() as client, w.direct() as direct:
        quiet = client.post(path, json=body, headers=HEADER)
        alone = direct.post(path, json=body)
    # A choice that waits for its last rows is overtaken by the other.
    assert sorted(quiet.content.split(b"\n\n")) == sorted(alone.content.split(b"\n\n"))
    found = chunks(quiet.content)[0] if is_streamed else quiet.json()
    kept = fetch(w, found["id"]).json()
    msgspec.convert(kept, models.AnswerScores)
    assert (kept["id"], kept["status"], kept["is_final"]) == (found["id"], "done", True)
    assert [rows(choice) for choice in kept["choices"]] == [
        expected(HELLO),
        expected([66, 121, 101]),
    ]
    assert kept["choices"][0]["token_ids"] == HELLO
    assert kept["choices"][0]["tokens"] == list("Hello")
    assert kept["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_scores_of_a_request_that_has_them_in_its_answer_are_the_same_by_id(
    w: World, is_streamed: bool
) -> None:
    w.upstream.script = answering(HELLO)
    body = {**asking(prompt_scores=True), "stream": is_streamed}
    with w.client() as client:
        raw = client.post(CHAT, json=body).content
    found = chunks(raw) if is_streamed else [msgspec.json.decode(raw)]
    (one,) = collect_scores(found).values()
    (choice,) = fetch(w, found[0]["id"]).json()["choices"]
    assert rows(choice) == one.scores == expected(HELLO)
    assert choice["prompt_scores"] == one.prompt
    assert choice["prompt_scores"]["token_ids"] == PROMPT


def test_scores_of_a_named_run_are_kept_too(w: World) -> None:
    w.upstream.script = answering(HELLO)
    with w.client() as client:
        done = events(client.post(CHAT, json=asking(events="named")).content)[-1]
    kept = fetch(w, done.data["id"]).json()
    assert rows(kept["choices"][0]) == expected(HELLO)


@pytest.mark.parametrize(
    ("clairai", "end"), [({}, b"data: [DONE]"), ({"events": "named"}, b"event: done")]
)
def test_scores_are_final_as_soon_as_the_client_has_the_end(
    tmp_path: Path, clairai: dict[str, Any], end: bytes
) -> None:
    is_seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        await answering([72, 105])(exchange)
        await exchange.end_when(is_seen)  # upstream's connection stays open behind its end

    with world(tmp_path, script=script) as w:
        kept: dict[str, Any] = {}
        for raw in w.growing(asking(**clairai)):
            if end in raw and not kept:
                kept = fetch(w, "chatcmpl-1").json()
                is_seen.set()
    assert (kept["status"], kept["is_final"]) == ("done", True)
    assert rows(kept["choices"][0]) == expected([72, 105])


def test_a_stream_can_be_fetched_while_it_runs(tmp_path: Path) -> None:
    is_seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        exchange.rows(4, [72])
        await exchange.tokens([101])
        exchange.rows(5, [101])
        await exchange.end_when(is_seen)
        await exchange.tokens([108], finish="stop")
        await exchange.end()

    with world(tmp_path, script=script) as w:
        running: dict[str, Any] = {}
        for raw in w.growing(asking()):
            if b'"content":"e"' in raw and not running:
                running = fetch(w, "chatcmpl-1").json()
                is_seen.set()
        ended = fetch(w, "chatcmpl-1").json()
    assert (running["status"], running["is_final"], running["expires"]) == ("running", False, None)
    assert running["choices"][0]["token_ids"] == [72, 101]
    assert rows(running["choices"][0]) in ([], expected([72, 101])[:1])
    assert rows(ended["choices"][0]) == expected([72, 101, 108])


def test_a_client_that_leaves_has_the_scores_so_far(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin()
        exchange.rows(4, [72])
        await exchange.tokens([72, 101])
        await exchange.forever()

    with world(tmp_path, script=script) as w:
        with (
            w.client(headers=HEADER) as client,
            client.stream("POST", CHAT, json=plain(stream=True)) as answer,
        ):
            raw = next(answer.iter_bytes())
        found = msgspec.json.decode(raw[6:].split(b"\n")[0])["id"]
        w.upstream.wait_for(lambda: w.upstream.last.was_cancelled)
        until(lambda: fetch(w, found).json()["is_final"])
        kept = fetch(w, found).json()
    assert (kept["status"], kept["is_final"]) == ("cancelled", True)


def test_a_header_may_name_probes(w: World) -> None:
    with w.client(headers={"X-Clairai-Scores": "position, token"}) as client:
        found = client.post(CHAT, json=plain()).json()["id"]
    assert fetch(w, found).json()["choices"][0]["probe_scores"]["names"] == ["position", "token"]


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        ("all", {"use_beam_search": True}, "beams are not scored"),
        ("token,token", {}, "each once"),
        ("", {}, "must be all, none, or names"),
        ("absent", {}, "no probe is named"),
    ],
)
def test_a_header_that_asks_the_impossible_is_refused(
    w: World, header: str, body: dict[str, Any], reason: str
) -> None:
    with w.client(headers={"X-Clairai-Scores": header}) as client:
        answer = client.post(CHAT, json=plain(**body))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert not w.upstream.seen


def test_without_header_field_and_setting_nothing_is_scored(tmp_path: Path) -> None:
    with world(tmp_path) as w, w.client() as client:
        found = client.post(CHAT, json=plain()).json()["id"]
        assert not w.upstream.last.is_scored
        answer = fetch(w, found)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no-scores")


def test_a_proxy_may_score_every_request(tmp_path: Path) -> None:
    with world(tmp_path, score_all=True) as w, w.client() as client:
        found = client.post(CHAT, json=plain())
        none = client.post(CHAT, json=plain(), headers={"X-Clairai-Scores": "none"})
        beams = client.post(CHAT, json=plain(use_beam_search=True))
        kept = fetch(w, found.json()["id"]).json()
        scored = [exchange.is_scored for exchange in w.upstream.seen]
    assert rows(kept["choices"][0]) == expected([72, 105])
    assert scored == [True, False, False]
    assert [one.status_code for one in (found, none, beams)] == [200, 200, 200]
    assert "beams are not scored" in beams.headers["X-Clairai-Unscored"]
    assert "X-Clairai-Unscored" not in none.headers


@pytest.mark.attack(815)
def test_scores_are_those_of_the_key_that_asked(tmp_path: Path) -> None:
    keys = {"Authorization": "Bearer key-of-alice-0001"}
    with world(tmp_path, keys=KEYS) as w:
        with w.client(headers={**keys, **HEADER}) as client:
            found = client.post(CHAT, json=plain()).json()["id"]
        statuses = {
            name: fetch(w, found, key=key).status_code
            for name, key in (
                ("alice", "key-of-alice-0001"),
                ("bob", "key-of-bob-000001"),
                ("root", "key-of-root-00001"),
                ("nobody", None),
            )
        }
    assert statuses == {"alice": 200, "bob": 404, "root": 200, "nobody": 401}


def test_an_expired_id_is_refused_with_the_reason(tmp_path: Path) -> None:
    timeouts = Timeouts(finish=PATIENT.finish, scores_kept=0.001)
    with world(tmp_path, timeouts=timeouts) as w, w.client(headers=HEADER) as client:
        found = client.post(CHAT, json=plain()).json()["id"]
        until(lambda: not len(w.proxy.kept_scores))
        answer = fetch(w, found)
    assert answer.status_code == 404
    assert "expired; they are kept 0.001 s" in answer.json()["error"]["message"]
