"""The check of requests that steer or stop, and the fields of their responses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clairai.vector.safetensors_format import dumps
from clairai.wire import control_messages, steering_messages
from tests.support import toy_publisher as toy
from tests.support.api_server import PATHS, ToyServer, steering_server, toy_server, vector

CHAT, TEXT = PATHS
ONES = base64.b64encode(np.ones(toy.WIDTH, np.float32).tobytes()).decode()
INLINE = {"dtype": "f32", "points": {"post_block.1": ONES}}
STEER = [{"vector": "calm", "scale": 2.0}]


@pytest.fixture
def server(runtime: Path) -> Iterator[ToyServer]:
    with steering_server(runtime) as made:
        yield made


def sent(server: ToyServer) -> dict[str, Any]:
    """Our fields, as vLLM got them."""
    made = json.loads(server.bodies[-1]["vllm_xargs"]["clairai"])
    assert isinstance(made, dict)
    return made


def applied(**changes: Any) -> dict[str, Any]:
    made = {
        "vector": "calm",
        "digest": vector().digest,
        "scale": 2.0,
        "op": "add",
        "points": ["post_block.0", "post_block.1"],
        "when": "both",
    }
    return made | changes


@pytest.mark.parametrize("path", PATHS)
def test_a_response_lists_what_was_applied(server: ToyServer, path: str) -> None:
    response = server.ask(path, steer=STEER)
    answer = response.json()
    assert answer.pop("clairai") == {"steering": [applied()]}
    assert answer == {"id": "1", "choices": [{"index": 0}]}
    assert int(response.headers["content-length"]) == len(response.content)


def test_a_change_through_this_server_is_known_at_once(server: ToyServer) -> None:
    server.ask(steer=STEER)
    other = vector(value=3.0)
    server.client.put("/v1/steering/vectors/calm", content=dumps(other))
    told = server.ask(steer=STEER).json()["clairai"]
    assert told == {"steering": [applied(digest=other.digest)]}
    server.client.put("/v1/probes/early", content=toy.file_of("early", toy.FIRST, threshold=0.25))
    rules = server.ask(stop=[{"probe": "early"}]).json()["clairai"]["stop"]
    assert rules[0]["threshold"] == 0.25


@pytest.mark.parametrize("path", PATHS)
def test_only_the_first_chunk_of_a_stream_lists_it(server: ToyServer, path: str) -> None:
    frames = server.ask(path, stream=True, steer=STEER).text.split("\n\n")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert chunks[0].pop("clairai") == {"steering": [applied()]}
    assert not any("clairai" in chunk for chunk in chunks)
    assert frames[-2] == "data: [DONE]"


def test_listed_vectors_are_pinned_by_digest(server: ToyServer) -> None:
    server.ask(steer=[*STEER, {"vector": INLINE}])
    named, inline = sent(server)["steer"]
    assert named["digest"] == vector().digest
    assert "digest" not in inline
    (plan,) = server.plans
    assert plan is not None
    assert plan.actions[0].digest == vector().digest


def test_a_name_changed_through_another_server_is_refused_with_the_reason(
    server: ToyServer,
) -> None:
    server.ask(steer=STEER)
    other = vector(value=3.0)
    server.control(steering_messages.PutVectors((dumps(other),)))
    answer = server.ask(steer=STEER)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "was changed" in error["message"]


def test_one_of_several_servers_asks_the_core_each_time(runtime: Path) -> None:
    with toy_server(runtime, api_servers=2) as server:
        server.control(steering_messages.PutVectors((dumps(vector()),)))
        assert server.ask(steer=STEER).json()["clairai"] == {"steering": [applied()]}
        other = vector(value=3.0)
        server.control(steering_messages.PutVectors((dumps(other),)))
        told = server.ask(steer=STEER).json()["clairai"]
        assert told == {"steering": [applied(digest=other.digest)]}
        asked = len(server.asked)
        server.ask(prompt_scores=True)
        assert len(server.asked) == asked  # who names nothing waits for nothing


def test_a_single_server_asks_the_core_once(server: ToyServer) -> None:
    for _ in range(3):
        assert server.ask(steer=STEER).status_code == 200
    assert [type(one) for one in server.asked] == [
        *(
            control_messages.ListProbes,
            steering_messages.ListVectors,
            steering_messages.GetSteering,
        ),
    ]


def test_an_unknown_name_is_asked_about_once_more_before_it_is_refused(server: ToyServer) -> None:
    server.ask(steer=STEER)
    server.control(steering_messages.PutVectors((dumps(vector("new")),)))
    assert server.ask(steer=[{"vector": "new"}]).status_code == 200
    answer = server.ask(steer=[{"vector": "none"}])
    assert answer.status_code == 400
    assert "no vector is named 'none'" in answer.json()["error"]["message"]


def gated(probe: str, **more: Any) -> list[dict[str, Any]]:
    return [{"vector": "calm", "gate": {"probe": probe, **more}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"steer": [{"vector": "clam"}]}, "request", "close to it: calm"),
        ({"steer": [{"vector": "calm", "scale": None}]}, "request", "finite"),
        ({"steer": [{"vector": "calm", "digest": "0" * 64}]}, "request", "was changed"),
        ({"steer": [{"vector": "calm", "points": ["pre_attn.0"]}]}, "point", "no row for"),
        ({"steer": [{"vector": {"points": {"pre_attn.0": ONES}}}]}, "point", "not tapped"),
        ({"steer": gated("late")}, "point", "comes after"),
        ({"steer": gated("early")}, "request", "no threshold"),
        ({"steer": gated("lite", threshold=1)}, "request", "no probe is named 'lite'"),
        ({"stop": [{"probe": "early"}]}, "request", "no threshold"),
        ({"stop": [{"probe": "lite"}]}, "request", "no probe is named 'lite'"),
        ({"stop": [{"probe": "late", "tokens": 0}]}, "request", "whole number"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_vllm_sees_it(
    server: ToyServer, fields: dict[str, Any], code: str, reason: str, stream: bool
) -> None:
    answer = server.ask(stream=stream, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert reason in error["message"]
    assert server.bodies == []


def test_an_inline_vector_is_listed_by_its_digest(server: ToyServer) -> None:
    (told,) = server.ask(steer=[{"vector": INLINE}]).json()["clairai"]["steering"]
    (plan,) = server.plans
    assert plan is not None
    assert (told["vector"], told["digest"]) == (None, plan.actions[0].digest)
    assert told["points"] == ["post_block.1"]


def test_gates_and_rules_are_listed_with_their_thresholds(server: ToyServer) -> None:
    steer = [{"vector": "calm", "points": ["post_block.1"], "gate": {"probe": "late"}}]
    told = server.ask(steer=steer, stop=[{"probe": "late", "tokens": 3}]).json()["clairai"]
    assert told["steering"][0]["gate"] == {"probe": "late", "threshold": 0.5}
    assert told["stop"] == [{"probe": "late", "threshold": 0.5, "tokens": 3, "action": "stop"}]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]]])
def test_prompts_of_one_request_do_not_share_a_stream(server: ToyServer, prompt: Any) -> None:
    xargs = {"clairai": json.dumps({"steer": STEER})}
    answer = server.client.post(TEXT, json={"prompt": prompt, "vllm_xargs": xargs})
    assert answer.json()["clairai"] == {"steering": [applied()]}
    assert len(server.plans) == 2
    assert "stream" not in sent(server)


@pytest.mark.parametrize("prompt", ["a", [1, 2]])
def test_one_prompt_gets_a_stream_id(server: ToyServer, prompt: Any) -> None:
    xargs = {"clairai": json.dumps({"steer": STEER})}
    server.client.post(TEXT, json={"prompt": prompt, "vllm_xargs": xargs})
    assert sent(server)["stream"] > 0


@pytest.mark.parametrize("fields", [{"steer": STEER}, {"stop": [{"probe": "late"}]}])
def test_beams_which_vllm_would_not_steer_are_refused(
    server: ToyServer, fields: dict[str, Any]
) -> None:
    body = {"messages": [], "use_beam_search": True}
    xargs = {"clairai": json.dumps(fields)}
    answer = server.client.post(CHAT, json={**body, "vllm_xargs": xargs})
    assert answer.status_code == 400
    assert "beams" in answer.json()["error"]["message"]
    assert server.client.post(CHAT, json=body).status_code == 200


def test_a_scale_of_zero_applies_nothing_and_is_not_listed(server: ToyServer) -> None:
    told = server.ask(steer=[{"vector": "calm", "scale": 0}]).json()["clairai"]
    assert told == {"steering": []}
    assert server.plans == [None]


def test_global_tiers_are_listed_in_responses_to_our_fields(server: ToyServer) -> None:
    tiers = {"base": STEER, "decode": [{"vector": INLINE}]}
    server.client.post("/v1/steering", json=tiers)
    base, decode = server.ask(prompt_scores=True).json()["clairai"]["steering"]
    assert base == {**applied(), "tier": "base"}
    assert (decode["vector"], decode["tier"], len(decode["digest"])) == (None, "decode", 64)


@pytest.mark.parametrize(
    ("field", "phase"),
    [
        ("steering_vectors", "both"),
        ("prefill_steering_vectors", "prompt"),
        ("decode_steering_vectors", "generation"),
    ],
)
def test_steering_vectors_work_beside_vllm_xargs_and_in_it(
    server: ToyServer, field: str, phase: str
) -> None:
    rows = {"post_block": {"1": [1.0, 0.0, 2.0]}}
    answer = server.client.post(CHAT, json={"messages": [], field: rows})
    (told,) = answer.json()["clairai"]["steering"]
    assert (told["vector"], told["when"], told["points"]) == (None, phase, ["post_block.1"])
    (plan,) = server.plans
    assert plan is not None
    assert plan.actions[0].rows[0].read().tolist() == [1.0, 0.0, 2.0]
    assert field not in server.bodies[0]


def test_steering_vectors_given_twice_are_refused(server: ToyServer) -> None:
    rows = {"post_block": {"1": [1.0, 0.0, 2.0]}}
    xargs = {"steering_vectors": json.dumps(rows)}
    body = {"messages": [], "steering_vectors": rows, "vllm_xargs": xargs}
    assert server.client.post(CHAT, json=body).status_code == 400


@pytest.mark.parametrize(
    "body", [{"messages": []}, {"messages": ["\u00e9"], "steering_vectors": None}]
)
def test_a_request_without_our_fields_passes_unaltered(
    server: ToyServer, body: dict[str, Any]
) -> None:
    answer = server.client.post(CHAT, json=body)
    assert "clairai" not in answer.json()
    assert server.bodies == [body]
    assert server.asked == []


def test_an_engine_without_steering_refuses_to_steer_but_still_stops(runtime: Path) -> None:
    with toy_server(runtime, is_steering=False) as server:
        server.client.put("/v1/probes/late", content=toy.file_of("late", threshold=0.5))
        answer = server.ask(steer=STEER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "steering-off")
        assert server.bodies == []
        told = server.ask(stop=[{"probe": "late"}]).json()["clairai"]
    assert (told["steering"], len(told["stop"])) == ([], 1)
