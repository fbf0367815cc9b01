"""Captured requests: the fields of their responses, and the routes that list and return rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from clairai.proxy import schema as models
from clairai.server import capture_download
from clairai.server import response_fields as handle_module
from clairai.store.bundle import bundle
from clairai.wire.capture_messages import Captured, Captures, DescribeCapture
from tests.support.api_server import PATHS, PROMPT
from tests.support.capturing_server import (
    NUM_ROWS,
    POINTS,
    CapturingServer,
    capturing_server,
    values,
)
from tests.support.ring_engine import until

CHAT, TEXT = PATHS
HELLO = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]


@pytest.fixture
def server(runtime: Path, tmp_path: Path) -> Iterator[CapturingServer]:
    with capturing_server(runtime, {"folder": str(tmp_path / "s")}) as made:
        yield made


def told(server: CapturingServer, path: str = CHAT, **clairai: Any) -> dict[str, Any]:
    handle = server.ask(path, **clairai).json()["clairai"]["capture"]
    assert isinstance(handle, dict)
    return handle


def sent(server: CapturingServer) -> dict[str, Any]:
    """Our fields, as vLLM got them."""
    made = json.loads(server.bodies[-1]["vllm_xargs"]["clairai"])
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("path", PATHS)
def test_a_response_says_what_was_kept_and_under_which_id(
    server: CapturingServer, path: str
) -> None:
    handle = told(server, path, capture=True)
    assert handle == {
        "id": f"{sent(server)['stream']:016x}",
        "state": "kept",
        "rows": NUM_ROWS * len(POINTS),
        "lost": 0,
        "discarded": 0,
    }


def test_the_file_has_the_rows_of_that_request_and_no_others(server: CapturingServer) -> None:
    handles = [told(server, capture={"tags": {"n": n}}) for n in range(3)]
    for handle in handles:
        got = server.client.get(f"/v1/captures/{handle['id']}")
        assert (got.status_code, got.headers["x-clairai-lost"]) == (200, "0")
        found = load(got.content)
        stream = int(handle["id"], 16)
        assert set(found["stream"].tolist()) == {stream}
        assert found["position"].tolist() == [*range(NUM_ROWS)] * len(POINTS)
        expected = [values(stream, np.arange(NUM_ROWS), point) for point in POINTS]
        assert np.array_equal(found["rows.values"], np.concatenate(expected))


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_the_id_first_and_the_result_last(server: CapturingServer, path: str) -> None:
    frames = server.ask(path, stream=True, capture=True).text.split("\n\n")
    first, last = (json.loads(frames[at].removeprefix("data: ")) for at in (0, -3))
    assert first["clairai"]["capture"]["state"] == "open"
    assert (last["choices"], last["id"], last["clairai"]["capture"]["state"]) == ([], "1", "kept")
    assert last["clairai"]["capture"]["id"] == first["clairai"]["capture"]["id"]
    assert frames[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_engine_that_ends_too_early_spoils_no_response(
    server: CapturingServer, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    assert server.capture is not None
    answering = server.capture.answer

    def gone(control: Any) -> Any:
        if isinstance(control, DescribeCapture):  # before it is admitted
            return answering(control)
        raise RuntimeError("EngineDeadError")

    monkeypatch.setattr(server.capture, "answer", gone)
    answer = server.ask(stream=is_streamed, capture=True)
    assert answer.status_code == 200
    assert '"state":"failed"' in answer.text
    assert "did not say what became of its rows" in answer.text
    assert not is_streamed or answer.text.endswith("data: [DONE]\n\n")


def test_answers_of_one_request_are_one_capture(server: CapturingServer) -> None:
    body = {"messages": [], "n": 3, "vllm_xargs": {"clairai": '{"capture": true}'}}
    handle = server.client.post(CHAT, json=body).json()["clairai"]["capture"]
    assert handle["rows"] == 3 * NUM_ROWS * len(POINTS)
    got = load(server.client.get(f"/v1/captures/{handle['id']}?choice=2").content)
    assert set(got["choice"].tolist()) == {2}


def test_a_request_without_capture_gets_no_fields_and_false_keeps_nothing(
    server: CapturingServer,
) -> None:
    assert "clairai" not in server.ask(prompt_scores=True).json()
    assert "clairai" not in server.ask(capture=False).json()
    assert server.client.get("/v1/captures").json()["data"] == []


def test_captures_are_listed_newest_first(server: CapturingServer) -> None:
    ids = [told(server, capture={"points": ["post_block.1"]})["id"] for _ in range(3)]
    listed = server.client.get("/v1/captures?limit=2").json()
    assert [one["id"] for one in listed["data"]] == [ids[2], ids[1]]
    assert listed["data"][0]["points"] == ["post_block.1"]
    (consumer,) = listed["consumers"]
    assert (consumer["name"], consumer["state"], consumer["reason"]) == ("fs", "writing", "")
    assert (consumer["refused"], consumer["lost"]) == (0, 0)
    assert consumer["since"] > 0
    assert consumer["free_nbytes"] >= 0
    assert listed["rows"] == 3 * NUM_ROWS
    msgspec.convert(listed, models.CaptureList)


def test_any_range_can_be_asked_for_and_has_one_etag(server: CapturingServer) -> None:
    path = f"/v1/captures/{told(server, capture=True)['id']}"
    whole = server.client.get(path)
    tag, nbytes = whole.headers["etag"], len(whole.content)
    for asked, part in (("0-9", slice(0, 10)), ("5-", slice(5, None)), ("-4", slice(-4, None))):
        got = server.client.get(path, headers={"Range": f"bytes={asked}", "If-Range": tag})
        assert (got.status_code, got.content) == (206, whole.content[part])
        first = part.indices(nbytes)[0]
        assert got.headers["content-range"].startswith(f"bytes {first}-")
    stale = server.client.get(path, headers={"Range": "bytes=0-9", "If-Range": '"old"'})
    assert (stale.status_code, stale.content) == (200, whole.content)
    beyond = server.client.get(path, headers={"Range": f"bytes={nbytes}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{nbytes}")
    assert server.client.get(path, headers={"If-None-Match": tag}).status_code == 304


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/captures/00000000000000ff", 404, "no capture has the id"),
        ("/v1/captures/..%2fmanifest", 404, ""),
        ("/v1/captures/zz", 404, "no capture has the id"),
        ("/v1/captures/0000000000000000", 404, "no capture has the id"),
        ("/v1/captures?limit=0", 400, "limit must be a whole number of 1 to 1000"),
        ("/v1/captures?limit=x", 400, "limit must be"),
        ("/v1/captures/{id}?point=nowhere", 400, "nowhere"),
        ("/v1/captures/{id}?point=post_block.7", 400, "no rows at post_block.7 were kept"),
        ("/v1/captures/{id}?choice=-1", 400, "choice must be"),
        ("/v1/captures/{id}?choice=9", 400, "has no such rows"),
    ],
)
def test_a_wrong_request_for_rows_is_refused_with_the_reason(
    server: CapturingServer, path: str, status: int, said: str
) -> None:
    handle = told(server, capture=True)
    got = server.client.get(path.format(id=handle["id"]))
    assert (got.status_code, said in got.text) == (status, True)


def test_a_request_that_runs_has_no_file_yet(
    server: CapturingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_module, "WAIT_S", 0.01)
    assert server.capture is not None
    server.capture.is_held = True
    id = told(server, capture=True)["id"]
    got = server.client.get(f"/v1/captures/{id}")
    assert (got.status_code, "is not whole" in got.text) == (409, True)
    server.capture.end()
    until(lambda: server.client.get(f"/v1/captures/{id}").status_code == 200)


def test_rows_that_a_rule_discarded_are_reported_as_gone(
    server: CapturingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "probe anger stayed below 0.9"
    told = Captured(7, 0, "discarded", ("post_block.1",), "raw", discarded=9, reason=why)
    monkeypatch.setattr(server.capture, "answer", lambda _: Captures(((told,),)))
    got = server.client.get("/v1/captures/0000000000000007")
    assert (got.status_code, why in got.text) == (410, True)


def test_rows_of_an_earlier_engine_are_found_too(runtime: Path, tmp_path: Path) -> None:
    setting = {"folder": str(tmp_path / "s")}
    with capturing_server(runtime, setting) as before:
        id = told(before, capture=True)["id"]
        data = before.client.get(f"/v1/captures/{id}").content
    with capturing_server(runtime, setting) as server:
        assert server.client.get(f"/v1/captures/{id}").content == data


def test_an_engine_without_capture_says_so(runtime: Path) -> None:
    with capturing_server(runtime, None) as server:
        refused = server.ask(capture=True)
        assert refused.json()["error"]["code"] == "capture-off"
        assert "does not capture" in refused.json()["error"]["message"]
        for path in ("/v1/captures", "/v1/captures/00000000000000ff"):
            assert server.client.get(path).status_code == 409


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_beam_search": True}, "leave out use_beam_search"),
        ({"prompt": ["a", "b"]}, "send one prompt in each"),
    ],
)
def test_what_would_be_captured_wrongly_is_refused(
    server: CapturingServer, fields: dict[str, Any], said: str
) -> None:
    body = {**fields, "vllm_xargs": {"clairai": '{"capture": true}'}}
    refused = server.client.post(TEXT, json=body)
    assert (refused.status_code, said in refused.text) == (400, True)
    assert server.bodies == []


def _ask(server: CapturingServer, positions: Any, path: str = CHAT, **fields: Any) -> Any:
    xargs = {"clairai": json.dumps({"capture": {"positions": positions}})}
    return server.client.post(path, json={"messages": HELLO, "vllm_xargs": xargs, **fields})


@pytest.mark.parametrize(
    ("positions", "placed"),
    [
        ({"message": 0}, {"from": 0, "to": 4}),
        ({"message": 1}, {"from": 4, "to": 8}),
        (["last_prompt", {"message": 1}], ["last_prompt", {"from": 4, "to": 8}]),
    ],
)
def test_a_message_of_a_chat_becomes_its_positions(
    server: CapturingServer, positions: Any, placed: Any
) -> None:
    answer = _ask(server, positions, add_generation_prompt=True)
    assert answer.status_code == 200
    assert sent(server)["capture"]["positions"] == placed
    assert PROMPT  # what they hold of it is the engine's to say


@pytest.mark.parametrize(
    ("positions", "fields", "said"),
    [
        ({"message": 2}, {}, "the chat has 2 messages; give 0 to 1"),
        ({"message": 0}, {"chat_template": "reversing"}, "changes its beginning"),
        ({"message": 0}, {"tools": ["refused"]}, "the template refuses: no tools here"),
        ({"message": 0}, {"documents": [1]}, "cannot be told of a chat with documents"),
        ({"message": 0}, {"path": TEXT}, "only a chat has messages"),
    ],
)
def test_a_message_that_cannot_be_located_is_refused(
    server: CapturingServer, positions: Any, fields: dict[str, Any], said: str
) -> None:
    refused = _ask(server, positions, **fields)
    assert (refused.status_code, said in refused.text) == (400, True)
    assert server.bodies == []


@pytest.mark.parametrize("bound", ["HELD_NBYTES", "IDLE_NBYTES"])
def test_only_the_last_files_are_kept_for_the_next_range(
    server: CapturingServer, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_download, bound, 1)
    made: list[int] = []

    def counted(*given: Any, **more: Any) -> Any:
        made.append(given[1])
        return bundle(*given, **more)

    monkeypatch.setattr(capture_download, "bundle", counted)
    first, second = (told(server, capture=True)["id"] for _ in range(2))
    for id in (first, first, second, second, first):
        part = server.client.get(f"/v1/captures/{id}", headers={"Range": "bytes=0-7"})
        assert part.status_code == 206
    assert made == [int(id, 16) for id in (first, second, first)]
