"""Captures through the proxy: what the engine is asked, what the client gets, files in ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from clairai.proxy import schema as models
from tests.http.answers import CHAT, TEXT, asking, chunks, events
from tests.http.fake import Exchange, Script, answering
from tests.http.fake_captures import FILE, ID, handle
from tests.http.test_steering import whole
from tests.http.world import World, world

WISH = {"points": ["post_block.1"], "positions": {"from": -3}, "tags": {"user": "a"}}


def _captured(script: Script) -> Script:
    """As an engine with clairai's routes ends a stream: a chunk without choices tells the rows."""

    async def captured(exchange: Exchange) -> web.StreamResponse | None:
        exchange.last = {"capture": handle(f"{exchange.stream:016x}")}
        return await script(exchange)

    return captured


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_engine_gets_the_wish_and_the_answer_has_the_handle(w: World, path: str) -> None:
    with w.client() as client:
        answer = client.post(path, json=whole(path, clairai={"capture": WISH})).json()
    assert w.upstream.last.fields["capture"] == WISH
    told = answer["clairai"]["capture"]
    msgspec.convert(told, models.CaptureHandle)
    assert int(told["id"], 16) == w.upstream.last.stream


@pytest.mark.parametrize("given", [True, False])
def test_true_and_false_go_to_the_engine(w: World, given: bool) -> None:
    with w.client() as client:
        answer = client.post(CHAT, json=whole(clairai={"capture": given})).json()
    assert w.upstream.last.fields["capture"] is given
    assert ("clairai" in answer) is given


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_last_chunk_of_a_stream_says_what_became_of_the_rows(w: World, path: str) -> None:
    w.upstream.script = _captured(answering([72, 105]))
    with w.client() as client:
        body = whole(path, stream=True, clairai={"capture": True})
        found = chunks(client.post(path, json=body).content)
    assert found[0]["clairai"]["capture"]["state"] == "open"
    assert (found[-1]["choices"], found[-1]["clairai"]["capture"]["rows"]) == ([], 6)


def test_the_event_done_has_the_capture_and_no_steering_event_is_sent(w: World) -> None:
    w.upstream.script = _captured(answering([72, 105]))
    with w.client() as client:
        found = events(client.post(CHAT, json=asking(events="named", capture=True)).content)
    assert "steering" not in [event.name for event in found]
    done = found[-1].data["capture"]
    assert (found[-1].name, done["state"], done["rows"]) == ("done", "kept", 6)


def test_a_capture_is_refused_if_the_engine_stores_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as own, own.client() as client:
        own.upstream.captures.is_on = False
        refused = client.post(CHAT, json=whole(clairai={"capture": True}))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "capture-off")
        assert own.upstream.seen == []
        assert client.post(CHAT, json=whole(clairai={"capture": False})).status_code == 200


def test_what_was_captured_is_listed(w: World) -> None:
    with w.client() as client:
        listed = client.get("/v1/captures?limit=3").json()
    msgspec.convert(listed, models.CaptureList)
    assert w.upstream.captures.asked[-1][0] == "/v1/captures?limit=3"


@pytest.mark.parametrize(
    ("asked", "part"),
    [(None, slice(None)), ("bytes=0-9", slice(0, 10)), ("bytes=-7", slice(-7, None))],
)
def test_a_file_comes_whole_or_in_ranges(w: World, asked: str | None, part: slice) -> None:
    headers = {} if asked is None else {"Range": asked}
    with w.client() as client:
        got = client.get(f"/v1/captures/{ID}?point=post_block.1", headers=headers)
    assert (got.status_code, got.content) == (200 if asked is None else 206, FILE[part])
    assert (got.headers["etag"], got.headers["accept-ranges"]) == ('"tag"', "bytes")
    assert int(got.headers["content-length"]) == len(FILE[part])
    assert ("content-range" in got.headers) == (asked is not None)
    path, sent = w.upstream.captures.asked[-1]
    assert (path, sent.get("Range")) == (f"/v1/captures/{ID}?point=post_block.1", asked)


def test_a_file_that_ends_early_is_not_taken_for_a_whole_one(w: World) -> None:
    w.upstream.captures.ends_early = True
    with w.client() as client, pytest.raises(httpx.RemoteProtocolError):
        client.get(f"/v1/captures/{ID}")


def test_an_unknown_capture_is_not_found(w: World) -> None:
    with w.client() as client:
        got = client.get("/v1/captures/00000000000000ff")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "store")


@pytest.mark.parametrize("wish", [7, "all", [1], {"points": "x", "bananas": 1}])
def test_a_wrong_wish_is_refused_with_the_reason(w: World, wish: Any) -> None:
    with w.client() as client:
        refused = client.post(CHAT, json=whole(clairai={"capture": wish}))
    assert refused.status_code == 400
    assert "capture" in refused.json()["error"]["message"]
