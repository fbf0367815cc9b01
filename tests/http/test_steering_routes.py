"""The proxy's routes of steering: vectors by their whole name, tiers, large requests."""

from __future__ import annotations

import base64
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from clairai.proxy import schema as models
from tests.http.answers import CHAT
from tests.http.fake_steering import digest_of
from tests.http.test_steering import STEER, whole
from tests.http.world import World

VECTORS = "/v1/steering/vectors"
FILE = b"\x00file"


@pytest.mark.parametrize("name", ["calm", "mood/calm", "a b", "%2e", "é"])
def test_vectors_are_put_read_and_removed_by_their_whole_name(w: World, name: str) -> None:
    path = f"{VECTORS}/{quote(name)}"
    with w.client() as client:
        assert client.put(path, content=FILE).status_code == 201
        got = client.get(path)
        assert (got.content, got.headers["etag"]) == (FILE, f'"{digest_of(FILE)}"')
        same = client.get(path, headers={"If-None-Match": got.headers["etag"]})
        assert same.status_code == 304
        listed = client.get(VECTORS).json()
        msgspec.convert(listed, models.VectorList)
        assert [one["name"] for one in listed["data"]] == [name]
        assert client.delete(path).json()["data"] == []
        assert client.get(path).status_code == 404


def test_conditions_reach_the_engine(w: World) -> None:
    with w.client() as client:
        client.put(f"{VECTORS}/a", content=b"x", headers={"If-None-Match": "*"})
        client.delete(f"{VECTORS}/a", headers={"If-Match": '"d"'})
    put, delete = w.upstream.steering.asked
    assert (put[2]["If-None-Match"], delete[2]["If-Match"]) == ("*", '"d"')


def test_a_vectors_name_that_climbs_is_refused_before_it_is_passed_on(w: World) -> None:
    with w.client() as client:
        assert client.get(f"{VECTORS}/..%2f..%2fmodels").status_code == 400
    assert w.upstream.steering.asked == []


def test_tiers_are_read_and_changed_through_the_proxy(w: World) -> None:
    with w.client() as client:
        changed = client.post("/v1/steering", json={"base": STEER}).json()
        assert [one["vector"] for one in changed["base"]] == ["calm"]
        assert (changed["prefill"], changed["decode"], changed["version"]) == ([], [], 2)
        msgspec.convert(client.get("/v1/steering").json(), models.Tiers)


def test_a_vector_of_80_layers_of_8192_fits_into_a_request(w: World) -> None:
    packed = base64.b64encode(np.ones(8192, np.float32).tobytes()).decode()
    inline = {"dtype": "f32", "points": {f"post_block.{at}": packed for at in range(80)}}
    with w.client() as client:
        answer = client.post(CHAT, json=whole(clairai={"steer": [{"vector": inline}]}))
    assert answer.status_code == 200
    assert w.upstream.last.fields["steer"] == [{"vector": inline}]
