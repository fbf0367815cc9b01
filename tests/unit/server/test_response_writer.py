"""Requests that only the engine core can refuse: status and reason of the response."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.engine.steer.steering_registry import SteeringLimits
from clairai.errors import VectorCapacityError
from clairai.fields.request_fields import FRESH_STREAM_HEADER
from clairai.vector.safetensors_format import dumps
from tests.support import toy_publisher as toy
from tests.support.api_server import (
    PATHS,
    RESPONSES,
    ToyServer,
    steering_server,
    toy_server,
    vector,
)

CHAT, TEXT = PATHS
STEER = [{"vector": "calm", "scale": 2.0}]
ZEROS = base64.b64encode(bytes(4 * toy.WIDTH)).decode()
NAN = base64.b64encode(np.full(toy.WIDTH, np.nan, np.float32).tobytes()).decode()


@pytest.fixture
def server(runtime: Path) -> Iterator[ToyServer]:
    with steering_server(runtime) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("packed", "code", "reason"),
    [
        ("AAAA", "request", "base64"),
        ("A" * 15 + "!", "request", "not base64"),
        (NAN, "vector", "NaN"),
        (ZEROS, "vector", "all zeros"),
    ],
)
def test_wrong_numbers_are_refused_with_the_reason_of_the_core(
    server: ToyServer, packed: str, code: str, reason: str, stream: bool
) -> None:
    steer = [{"vector": {"points": {"post_block.1": packed}}}]
    answer = server.ask(stream=stream, steer=steer)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert reason in error["message"]
    assert server.plans == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_engine_refuses_with_a_status_and_a_reason(
    runtime: Path, path: str, stream: bool
) -> None:
    with toy_server(runtime, limits=SteeringLimits(rows=1, programs=8)) as server:
        server.client.put("/v1/steering/vectors/calm", content=dumps(vector()))
        assert server.ask(path, steer=STEER).status_code == 200
        two = {"dtype": "f32", "points": {"post_block.1": _packed(2.0)}}
        answer = server.ask(path, stream=stream, steer=[{"vector": two}])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "vector-capacity")
    assert answer.headers["content-type"].startswith("application/json")


def _packed(value: float) -> str:
    return base64.b64encode(np.full(toy.WIDTH, value, np.float32).tobytes()).decode()


def test_numbers_are_checked_before_vllm_if_a_request_has_several_prompts(
    server: ToyServer,
) -> None:
    steer = [{"vector": {"points": {"post_block.1": NAN}}}]
    xargs = {"clairai": json.dumps({"steer": steer})}
    answer = server.client.post(TEXT, json={"prompt": ["a", "b"], "vllm_xargs": xargs})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "vector")
    assert server.bodies == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_refused_and_answered_like_chats(
    server: ToyServer, stream: bool
) -> None:
    bad = server.ask(
        RESPONSES, stream=stream, steer=[{"vector": {"points": {"post_block.1": NAN}}}]
    )
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "vector")
    good = server.ask(RESPONSES, stream=stream, steer=STEER)
    assert good.text.count('"clairai":{"steering":[{"vector":"calm"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_id_in_use_is_refused_with_the_reason(server: ToyServer, stream: bool) -> None:
    body = {"messages": [], "stream": stream, "vllm_xargs": {"clairai": '{"stream": 7}'}}
    assert server.client.post(CHAT, json=body).status_code == 200
    answer = server.client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "stream 7 belongs to a request" in answer.json()["error"]["message"]


FRESH = {FRESH_STREAM_HEADER: "1"}


def _scored(*, stream: bool, **fields: Any) -> dict[str, Any]:
    xargs = {"clairai": json.dumps({"stream": 7, **fields})}
    return {"messages": [], "stream": stream, "vllm_xargs": xargs}


def test_a_stream_with_a_fresh_id_begins_before_the_core_has_admitted_it(
    server: ToyServer,
) -> None:
    body = _scored(stream=True)
    assert server.client.post(CHAT, json=body, headers=FRESH).status_code == 200
    late = server.client.post(CHAT, json=body, headers=FRESH)  # its id was not fresh after all
    first, second = late.text.split("\n\n")[:2]
    assert (late.status_code, '"role":"assistant"' in first) == (200, True)
    assert "stream 7 belongs to a request" in second


@pytest.mark.parametrize("fields", [{"steer": STEER}, {"label": "mine"}])
def test_a_stream_with_fields_to_tell_of_waits_for_the_core(
    server: ToyServer, fields: dict[str, Any]
) -> None:
    body = _scored(stream=True, **fields)
    assert server.client.post(CHAT, json=body, headers=FRESH).status_code == 200
    assert server.client.post(CHAT, json=body, headers=FRESH).status_code == 400


def test_an_answer_that_is_not_streamed_waits_for_the_core(server: ToyServer) -> None:
    body = _scored(stream=False)
    assert server.client.post(CHAT, json=body, headers=FRESH).status_code == 200
    assert server.client.post(CHAT, json=body, headers=FRESH).status_code == 400


def test_a_refusal_that_depends_on_the_prompt_has_a_reason(server: ToyServer) -> None:
    when = {"phase": "prompt", "positions": [[90, 100]]}
    answer = server.ask(steer=[{"vector": "calm", "when": when}])
    assert answer.status_code == 400
    assert "hold none of this prompt's 5 tokens" in answer.json()["error"]["message"]


def test_a_choice_refused_after_tokens_of_another_gives_the_reason_in_the_stream(
    runtime: Path,
) -> None:
    with toy_server(runtime) as server:
        mark, marked = server.admission.prepare, []

        def refusing(request: Any) -> Any:
            """The second choice finds the tables full."""
            marked.append(request)
            if len(marked) > 1:
                server.core_control.note_refusal(9, VectorCapacityError("full"))
                raise VectorCapacityError("full")
            return mark(request)

        server.admission.prepare = refusing  # type: ignore[method-assign]
        xargs = {"clairai": '{"stream": 9}'}
        body = {"messages": [], "stream": True, "n": 2, "vllm_xargs": xargs}
        frames = server.client.post(CHAT, json=body).text.split("\n\n")
    error = json.loads(frames[-3].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("vector-capacity", "full")
    assert frames[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_vllm_passes_unchanged(server: ToyServer, stream: bool) -> None:
    def failing(_: Any) -> Any:
        raise VectorCapacityError("full")

    server.admission.prepare = failing  # type: ignore[assignment,method-assign]
    answer = server.ask(stream=stream, steer=STEER)
    assert answer.status_code == (200 if stream else 500)
    assert "Internal server error" in answer.text
    assert '"clairai"' not in answer.text


def test_an_exception_of_vllm_stays_an_exception(server: ToyServer) -> None:
    def failing(_: Any) -> Any:
        raise VectorCapacityError("full")

    server.admission.prepare = failing  # type: ignore[assignment,method-assign]
    with pytest.raises(ValueError, match="103 validation errors"):
        server.ask(RESPONSES, stream=True, steer=STEER)
