"""The routes under /v1/steering, with an engine that can steer and one that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clairai.engine.steer.steering_registry import SteeringLimits
from clairai.points import Point
from clairai.vector import gguf_format
from clairai.vector.files import MAX_NBYTES, loads
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps
from tests.support import toy_publisher as toy
from tests.support.api_server import POSITION, RUNNING, ToyServer, toy_server, vector

VECTORS = "/v1/steering/vectors"


@pytest.fixture
def server(runtime: Path) -> Iterator[ToyServer]:
    with toy_server(runtime) as made:
        yield made


def put(server: ToyServer, made: Vector, **headers: str) -> int:
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = server.client.put(f"{VECTORS}/{made.name}", content=dumps(made), headers=shown)
    return answer.status_code


def test_vectors_are_listed_with_all_their_metadata(server: ToyServer) -> None:
    assert put(server, vector()) == 201
    listed = server.client.get(VECTORS).json()
    assert listed == {
        "data": [
            {
                "name": "calm",
                "points": ["post_block.0", "post_block.1"],
                "width": toy.WIDTH,
                "digest": vector().digest,
                "norms": pytest.approx([3**0.5, 3**0.5]),
                "description": None,
                "method": None,
                "scale": 1.0,
            }
        ],
        "version": 1,
        "points": ["post_block.0", "post_block.1"],
        "width": toy.WIDTH,
        "capacity": {"rows": 8, "programs": 8},
    }


def test_a_vector_is_downloaded_as_the_file_with_its_digest(server: ToyServer) -> None:
    made = vector("mood/calm")
    put(server, made)
    got = server.client.get(f"{VECTORS}/mood/calm")
    assert got.headers["content-type"] == "application/octet-stream"
    assert loads(got.content, source="answer") == made
    tag = got.headers["etag"]
    assert tag == f'"{made.digest}"'
    again = server.client.get(f"{VECTORS}/mood/calm", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_a_replaced_vector_has_another_tag(server: ToyServer) -> None:
    put(server, vector())
    assert put(server, vector(value=2.0)) == 200
    assert server.client.get(f"{VECTORS}/calm").headers["etag"] == f'"{vector(value=2.0).digest}"'


def test_other_formats_take_the_name_of_the_path(server: ToyServer) -> None:
    seed = b'{"post_block": {"1": {"vector": [1, 2, 3], "scale": 2.0}}}'
    assert server.client.put(f"{VECTORS}/a", content=seed).status_code == 201
    block = Vector("x", {toy.SECOND: np.ones(toy.WIDTH, np.float32)})
    assert server.client.put(f"{VECTORS}/b", content=gguf_format.dumps(block)).status_code == 201
    listed = server.client.get(VECTORS).json()["data"]
    assert [one["name"] for one in listed] == ["a", "b"]
    assert listed[0]["norms"] == pytest.approx([2 * 14**0.5])


@pytest.mark.parametrize(
    ("headers", "is_there", "status"),
    [
        ({"If_None_Match": "*"}, False, 201),
        ({"If_None_Match": "*"}, True, 412),
        ({"If_Match": "*"}, True, 200),
        ({"If_Match": "*"}, False, 412),
        ({"If_Match": '"other"'}, True, 412),
        ({"If_Match": f'"other", "{vector().digest}"'}, True, 200),
        ({"If_None_Match": f'"{vector().digest}"'}, True, 412),
        ({"If_None_Match": '"other"'}, True, 200),
    ],
)
def test_a_vector_is_put_under_if_match_and_if_none_match(
    server: ToyServer, headers: dict[str, str], is_there: bool, status: int
) -> None:
    if is_there:
        put(server, vector())
    assert put(server, vector(value=2.0), **headers) == status


def test_a_vector_is_removed_by_its_name_or_by_its_content(server: ToyServer) -> None:
    put(server, vector())
    path = f"{VECTORS}/calm"
    assert server.client.delete(path, headers={"If-Match": '"other"'}).status_code == 412
    assert server.client.delete(path).json()["data"] == []
    gone = server.client.delete(path)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "vector")
    assert server.client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (b"nothing", "vector", "request body"),
        (dumps(vector("other")), "vector", "make them the same"),
        (dumps(vector(width=2)), "vector", "width 2"),
        (
            dumps(Vector("calm", {Point("post_attn", 0): np.ones(3, np.float32)})),
            "point",
            "not tapped",
        ),
    ],
)
def test_a_bad_vector_is_refused_with_the_reason(
    server: ToyServer, content: bytes, code: str, reason: str
) -> None:
    answer = server.client.put(f"{VECTORS}/calm", content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], reason in error["message"]) == (code, True)
    assert server.client.get(VECTORS).json()["data"] == []


def test_a_body_larger_than_any_vector_is_not_read(server: ToyServer) -> None:
    headers = {"Content-Length": str(MAX_NBYTES + 1)}
    answer = server.client.put(f"{VECTORS}/calm", content=b"", headers=headers)
    assert answer.status_code == 413
    assert str(MAX_NBYTES) in answer.json()["error"]["message"]


def test_a_full_engine_refuses_more_vectors(runtime: Path) -> None:
    with toy_server(runtime, limits=SteeringLimits(rows=8, programs=8, vectors=1)) as server:
        assert put(server, vector()) == 201
        answer = server.client.put(f"{VECTORS}/b", content=dumps(vector("b")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "vector-capacity")


def test_tiers_are_shown_and_changed_one_by_one(server: ToyServer) -> None:
    put(server, vector())
    client = server.client
    none = {"base": [], "prefill": [], "decode": [], "version": 0}
    assert client.get("/v1/steering").json() == none
    base = [{"vector": "calm", "scale": 2.0}]
    assert client.post("/v1/steering", json={"base": base}).json()["base"][0]["scale"] == 2.0
    both = client.post("/v1/steering", json={"decode": base}).json()
    assert [len(both[tier]) for tier in ("base", "prefill", "decode")] == [1, 0, 1]
    assert client.post("/v1/steering", json={"base": []}).json()["base"] == []
    assert client.get("/v1/steering").json()["version"] == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "base, prefill or decode"),
        (b"[]", "base, prefill or decode"),
        (b'{"bose": []}', "bose"),
        (b'{"base": {}}', "base"),
        (b'{"base": [{"vector": "unknown"}]}', "no vector is named 'unknown'"),
        (b'{"base": [{"vector": "calm", "scale": 1e400}]}', "base"),
    ],
)
def test_a_bad_tier_is_refused_and_changes_nothing(
    server: ToyServer, body: bytes, reason: str
) -> None:
    put(server, vector())
    answer = server.client.post("/v1/steering", content=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert server.client.get("/v1/steering").json()["version"] == 0


def test_a_vector_that_a_tier_uses_is_not_removed(server: ToyServer) -> None:
    put(server, vector())
    server.client.post("/v1/steering", json={"base": [{"vector": "calm"}]})
    assert server.client.delete(f"{VECTORS}/calm").status_code == 400


def test_an_engine_without_steering_says_how_to_enable_it(runtime: Path) -> None:
    with toy_server(runtime, is_steering=False) as server:
        answers = [
            server.client.get(VECTORS),
            server.client.get(f"{VECTORS}/calm"),
            server.client.put(f"{VECTORS}/calm", content=dumps(vector())),
            server.client.delete(f"{VECTORS}/calm"),
            server.client.get("/v1/steering"),
            server.client.post("/v1/steering", json={"base": []}),
        ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (409, "steering-off")
        assert '"steering": true' in error["message"]


def test_the_steering_of_a_running_request_is_changed_by_its_stream(server: ToyServer) -> None:
    path = f"/v1/steering/requests/{RUNNING}"
    answer = server.client.post(path, json={"steer": [{"vector": "calm", "scale": 2}]})
    assert answer.status_code == 200
    assert answer.json()["positions"] == [POSITION]
    assert answer.json()["steering"][0]["scale"] == 2.0


@pytest.mark.parametrize(
    ("stream", "body"),
    [
        ("7", '{"steer": []}'),  # nobody's
        ("0x7", '{"steer": []}'),
        ("7" * 21, '{"steer": []}'),
        (str(2**64), '{"steer": []}'),
        ("-1", '{"steer": []}'),
        ("\u0667", '{"steer": []}'),
        (str(RUNNING), '{"steer": [{"vctor": 1}]}'),
        (str(RUNNING), '{"ster": []}'),
        (str(RUNNING), "[" * 10_000),
        (str(RUNNING), "\ud800"),
    ],
    ids=range(10),
)
def test_a_wrong_or_late_change_of_steering_is_refused(
    server: ToyServer, stream: str, body: str
) -> None:
    content = body.encode(errors="surrogatepass")
    answer = server.client.post(f"/v1/steering/requests/{stream}", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request"
