"""Steering through the proxy: what goes upstream, what is echoed, what ends an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clairai.errors import RequestError
from clairai.fields.request_fields import parse_fields
from clairai.proxy import schema as models
from clairai.proxy.completions.completion_request import read_request
from clairai.proxy.completions.request_scores import find_stopping_probe
from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.proxy_settings import Limits
from tests.http.answers import CHAT, TEXT, asking, chunks, collect_scores, events, expected
from tests.http.fake import answering
from tests.http.test_observed import Recorder
from tests.http.world import World, world
from tests.support.ring_engine import until

HELLO = [72, 101, 108, 108, 111]
STEER = [{"vector": "calm", "scale": 2.0}]
RULE = {"probe": "token", "threshold": 100.0, "tokens": 2}
REASON = "clairai: probe token >= 100 for 2 tokens"
SEEDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")


def whole(path: str = CHAT, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": "Hi"}
    return {**prompt, **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_says_what_the_engine_applies(w: World, path: str) -> None:
    with w.client() as client:
        answer = client.post(path, json=whole(path, clairai={"steer": STEER})).json()
    msgspec.convert(answer["clairai"], models.SteeringEcho)
    assert [one["vector"] for one in answer["clairai"]["steering"]] == ["calm"]
    assert "probe_scores" in answer["choices"][0]
    assert w.upstream.last.fields["steer"] == STEER


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_only_the_first_chunk_has_the_echo(w: World, path: str) -> None:
    w.upstream.script = answering(HELLO)
    with w.client() as client:
        body = whole(path, stream=True, clairai={"steer": STEER})
        found = chunks(client.post(path, json=body).content)
    assert found[0]["clairai"]["steering"][0]["vector"] == "calm"
    assert not any("clairai" in chunk for chunk in found[1:])
    assert collect_scores(found)[0].scores == expected(HELLO)


def test_the_first_event_has_the_echo(w: World) -> None:
    with w.client() as client:
        found = events(client.post(CHAT, json=asking(events="named", steer=STEER)).content)
    assert [event.name for event in found].count("steering") == 1
    assert (found[0].number, found[0].name) == (1, "steering")
    msgspec.convert(found[0].data, models.SteeringEvent)


def test_a_request_that_is_not_steered_has_no_steering_echo(w: World) -> None:
    with w.client() as client:
        assert "clairai" not in client.post(CHAT, json=whole(clairai={})).json()
        named = events(client.post(CHAT, json=asking(events="named")).content)
    assert "steering" not in {event.name for event in named}
    assert not w.upstream.steering.asked


@pytest.mark.parametrize("field", SEEDS)
def test_the_seeds_fields_steer_with_our_key_or_without(w: World, field: str) -> None:
    rows = {"post_block": {"3": [0.5] * 8}}
    for more in ({}, {"clairai": {"probes": ["token"]}}):
        body = {**whole(), field: rows, **more}
        with w.client() as client:
            answer = client.post(CHAT, json=body).json()
        assert len(answer["clairai"]["steering"]) == 1
        assert "probe_scores" in answer["choices"][0]
        assert w.upstream.last.fields[field] == rows
        assert field not in w.upstream.last.body


def test_the_engine_reads_what_the_proxy_sends() -> None:
    rows = {"post_block": {"3": [0.5] * 8}}
    body = whole(clairai={"steer": STEER, "stop": [RULE]}, steering_vectors=rows)
    request = read_request(json.dumps(body).encode(), Limits())
    assert request is not None
    wanted = parse_fields(json.loads(request.body(7))["vllm_xargs"])
    assert [entry.vector for entry in wanted.steer][:1] == ["calm"]
    assert (len(wanted.steer), wanted.stop[0].tokens, wanted.stream) == (2, 2, 7)


@pytest.mark.parametrize(
    "raw", [b'{"messages":[],"steering_vectors":null}', b'{"a":"steering_vectors"}']
)
def test_a_null_steering_vectors_field_is_ignored(raw: bytes) -> None:
    assert read_request(raw, Limits()) is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("clairai", [{"steer": STEER}, {"stop": [RULE]}])
def test_an_answer_without_a_steering_echo_is_refused(
    w: World, clairai: dict[str, Any], stream: bool
) -> None:
    answers = answering(HELLO)

    async def silent(exchange: Any) -> Any:
        exchange.echo = None
        return await answers(exchange)

    w.upstream.script = silent
    with w.client() as client:
        answer = client.post(CHAT, json=whole(stream=stream, clairai=clairai))
    assert "does not say that it steers" in answer.text
    assert "Hello" not in answer.text
    assert '"content":"H"' not in answer.text
    assert answer.status_code == (200 if stream else 502)


def test_a_named_run_that_is_not_steered_ends_in_an_error(w: World) -> None:
    answers = answering(HELLO)

    async def silent(exchange: Any) -> Any:
        exchange.echo = None
        return await answers(exchange)

    w.upstream.script = silent
    with w.client() as client:
        found = events(client.post(CHAT, json=asking(events="named", steer=STEER)).content)
    assert [event.name for event in found] == ["error"]


def test_steering_is_refused_if_the_engine_does_not_steer(tmp_path: Path) -> None:
    with world(tmp_path) as w, w.client() as client:
        w.upstream.steering.is_on = False
        answer = client.post(CHAT, json=whole(clairai={"steer": STEER}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "steering-off")
        assert w.upstream.seen == []
        stopped = client.post(CHAT, json=whole(clairai={"stop": [RULE]}))
        assert stopped.status_code == 200  # a rule needs taps alone


@pytest.mark.parametrize("clairai", [{"steer": STEER}, {"stop": [RULE]}])
def test_steering_is_refused_if_the_engine_lacks_our_routes(
    tmp_path: Path, clairai: dict[str, Any]
) -> None:
    with world(tmp_path, has_routes=False) as w, w.client() as client:
        answer = client.post(CHAT, json=whole(clairai=clairai))
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "steering-off")
        assert w.upstream.seen == []


def test_upstreams_refusal_of_a_vector_passes_as_it_is(w: World) -> None:
    async def refuse(exchange: Any) -> Any:
        return exchange.refuse(400, "no vector is named 'clam'")

    w.upstream.script = refuse
    with w.client() as client:
        answer = client.post(CHAT, json=whole(stream=True, clairai={"steer": STEER}))
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "no vector is named 'clam'",
    )


@pytest.mark.parametrize("field", SEEDS)
def test_nothing_is_steered_twice(field: str) -> None:
    body = whole(clairai={}, vllm_xargs={field: "{}"})
    with pytest.raises(RequestError, match="both"):
        read_request(json.dumps(body).encode(), Limits())


# An answer that a rule ended


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stopped_answer_says_why_in_chunks_and_whole(w: World, path: str) -> None:
    w.upstream.script = answering(HELLO, finish="stop", stop_reason=REASON)
    with w.client() as client:
        body = whole(path, clairai={"stop": [RULE]})
        one = client.post(path, json=body).json()["choices"][0]
        found = chunks(client.post(path, json={**body, "stream": True}).content)
    last = next(chunk["choices"][0] for chunk in reversed(found) if chunk["choices"])
    for choice in (one, last):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", REASON)


def test_a_stopped_run_says_why_in_its_last_event(w: World) -> None:
    w.upstream.script = answering(HELLO, finish="stop", stop_reason=REASON)
    with w.client() as client:
        found = events(client.post(CHAT, json=asking(events="named", stop=[RULE])).content)
    assert found[-1].data["finish_reasons"] == ["stop"]
    assert found[-1].data["stop_reasons"] == [REASON]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def proxied(tmp_path: Path, recorder: Recorder) -> Iterator[World]:
    with world(tmp_path, observers=(recorder,), metrics=Metrics()) as made:
        yield made


def test_stopped_answers_are_counted_by_probe_and_reported_to_observers(
    proxied: World, recorder: Recorder
) -> None:
    proxied.upstream.script = answering(HELLO, finish="stop", stop_reason=REASON)
    with proxied.client() as client:
        for clairai in ({"stop": [RULE]}, {"stop": [RULE]}, {}):
            client.post(CHAT, json=whole(clairai=clairai))
        until(lambda: len(recorder.ends) == 3)
        text = client.get("/metrics").text
    assert [end.choices[0].stopped for end in recorder.ends] == ["token", "token", None]
    assert {end.outcome for end in recorder.ends} == {"done"}
    assert 'clairai_stopped_total{probe="token"} 2.0' in text
    assert 'clairai_stopped_total{probe="position"} 0.0' in text


@pytest.mark.parametrize(
    ("finish", "reason", "probe"),
    [
        ("stop", REASON, "token"),
        ("stop", "clairai: probe token >= 0.5 for 1 token", "token"),
        ("length", REASON, None),
        ("stop", "clairai: probe other >= 1 for 1 token", None),
        ("stop", f"{REASON} more", None),
        ("stop", 7, None),
        ("stop", None, None),
        (None, REASON, None),
    ],
)
def test_only_a_rule_of_the_request_can_have_stopped_an_answer(
    finish: str | None, reason: str | int | None, probe: str | None
) -> None:
    assert find_stopping_probe({"token"}, finish, reason) == probe
    assert find_stopping_probe([], finish, reason) is None


def test_a_named_run_is_steered_otherwise_by_its_id(w: World) -> None:
    go_on = threading.Event()

    async def script(exchange: Any) -> None:
        await exchange.begin()
        await exchange.tokens([72])
        await exchange.end_when(go_on)
        await exchange.tokens([105], finish="length")
        await exchange.end()

    w.upstream.script = script
    body = asking(events="named")
    with w.client() as client, client.stream("POST", CHAT, json=body) as answer:
        path = f"/v1/runs/{answer.headers['X-Clairai-Run']}/steering"
        with w.client() as other:
            changed = other.post(path, json={"steer": STEER})
            assert other.post(path, json={"steer": 1}).status_code == 400
        go_on.set()
        answer.read()
        msgspec.convert(changed.json(), models.Amended)
        stream = str(w.upstream.last.stream)
        assert [one[:2] for one in w.upstream.steering.asked] == [("POST", stream)] * 2
        until(lambda: client.post(path, json={"steer": []}).status_code == 409)  # it has ended
        assert client.post("/v1/runs/none/steering", json={"steer": []}).status_code == 404


def test_a_rule_that_steers_needs_an_engine_that_does(tmp_path: Path) -> None:
    rule = {**RULE, "action": "steer", "steer": STEER}
    with world(tmp_path) as w, w.client() as client:
        w.upstream.steering.is_on = False
        assert client.post(CHAT, json=whole(clairai={"stop": [rule]})).status_code == 409
        w.upstream.steering.is_on = True
        answer = client.post(CHAT, json=whole(clairai={"stop": [rule]})).json()
    assert answer["clairai"]["stop"][0]["action"] == "steer"
