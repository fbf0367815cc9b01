"""Steering entries as JSON: read, written again, or refused with a short message."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, PointError, RequestError, quote
from clairai.fields.packed_vector import PackedVector
from clairai.fields.rules import parse_rules
from clairai.fields.steer import (
    MAX_ENTRIES,
    OPS,
    GateSpec,
    SteerEntry,
    parse_entries,
)
from clairai.fields.when import PHASES, When
from clairai.points import Point
from tests.support.steering_plans import vector

reals = st.floats(-1e30, 1e30)
factors = st.just(0.0) | st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30)
names = st.text("abc-_.", min_size=1, max_size=5)
ends = st.tuples(st.integers(-9, -5), st.none() | st.integers(-4, -1))
whens = st.builds(When, st.sampled_from(PHASES)) | st.builds(
    When,
    st.sampled_from(["both", "prompt"]),
    st.none() | st.lists(ends, min_size=1, max_size=3).map(tuple),
    st.booleans(),
)
gates = st.builds(GateSpec, names, st.none() | reals, st.none() | st.just(2.0), st.booleans())
hard_gates = st.builds(GateSpec, names, release=reals)
packed = st.just(PackedVector("f16", ((Point("post_block", 1), "AAAA"),)))
entries = st.builds(
    SteerEntry,
    vector=names | packed | st.just(vector()),
    digest=st.none() | st.just("0a" * 32),
    scale=factors,
    op=st.sampled_from(["add", "ablate", "replace"]),
    points=st.none() | st.just((Point("pre_attn", 0), Point("post_block", 1))),
    when=whens,
    gate=st.none() | gates | hard_gates,
) | st.builds(SteerEntry, st.just("v"), op=st.just("clamp"), low=reals) | st.builds(
    SteerEntry, st.just("v"), match_norm=st.just(True)
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(entries, max_size=4))
def test_an_entry_written_as_json_is_read_as_an_equal_one(every: list[SteerEntry]) -> None:
    text = json.dumps([entry.to_json() for entry in every])
    read = parse_entries(json.loads(text), what="steer")
    assert [entry.to_json() for entry in read] == [entry.to_json() for entry in every]
    for entry, again in zip(every, read, strict=True):
        if not isinstance(entry.vector, type(vector())):
            assert again == entry


def test_the_shortest_entry_adds_a_vector_to_all_tokens_at_all_of_its_points() -> None:
    (entry,) = parse_entries([{"vector": "joy"}], what="steer")
    assert entry == SteerEntry("joy", None, 1.0, "add", False, None, None, None, When(), None)
    assert entry.label == "steer[0]"
    assert entry.describe() == {"vector": "joy", "scale": 1.0, "op": "add", "when": "both"}


def test_points_are_read_by_either_name_in_path_order() -> None:
    written = {"vector": "joy", "points": ["resid_post.3", "pre_attn.0"]}
    (entry,) = parse_entries([written], what="steer")
    assert entry.points == (Point("pre_attn", 0), Point("post_block", 3))


def test_an_inline_vector_is_described_by_its_digest_and_never_by_its_numbers() -> None:
    (entry,) = parse_entries([{"vector": vector()}], what="steer")
    shown = entry.describe()["vector"]
    assert shown == {"digest": vector().digest, "points": ["pre_attn.1", "post_attn.2"]}
    (packed_entry,) = parse_entries([entry.to_json()], what="steer")
    assert packed_entry.describe()["vector"] == {"points": ["pre_attn.1", "post_attn.2"]}


HUGE = 10**9000
NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e39, HUGE]
NOT_NUMBERS: list[object] = [*NOT_FINITE, True, None, "1", [1], {}]


@pytest.mark.parametrize("key", ["scale", "low", "high"])
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=quote)
def test_a_number_is_finite_in_float32_and_of_a_number_type(key: str, value: object) -> None:
    if value is None and key != "scale":
        return  # as if left out
    with pytest.raises(RequestError, match=rf"steer\[0\].{key} must be a finite number") as caught:
        parse_entries([{"vector": "v", "op": "clamp", "low": 0, key: value}], what="steer")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["threshold", "sharpness", "release"])
@pytest.mark.parametrize("value", [v for v in NOT_NUMBERS if v is not None], ids=quote)
def test_a_gate_has_finite_numbers_too(key: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"gate.{key} must be a finite number"):
        parse_entries([{"vector": "v", "gate": {"probe": "p", key: value}}], what="steer")


REFUSED: list[tuple[dict[Any, Any], str]] = [
    ({}, "names no vector; give a name"),
    ({"vector": ""}, "text of 1 to 128 characters"),
    ({"vector": "x" * 129}, "text of 1 to 128 characters"),
    ({"vector": 7}, "must be the name of a vector, or an object"),
    ({"vector": [0.1, 0.2]}, "must be the name of a vector, or an object"),
    ({"vector": "v", "scael": 2}, "unknown key 'scael'; known: vector, digest, scale, op"),
    ({"vector": "v", 3: 2}, "unknown key 3; known: vector"),
    ({"vector": "v", "op": "multiply"}, "one of add, ablate, clamp, replace, got 'multiply'"),
    ({"vector": "v", "op": ["add"]}, "one of add, ablate"),
    ({"vector": "v", "digest": "abc"}, "64 hexadecimal digits"),
    ({"vector": "v", "digest": "A" * 64}, "64 hexadecimal digits"),
    ({"vector": "v", "digest": b"a" * 64}, "64 hexadecimal digits"),
    ({"vector": "v", "match_norm": 1}, "match_norm must be true or false"),
    ({"vector": "v", "match_norm": True, "op": "ablate"}, "match_norm goes with add, not with"),
    ({"vector": "v", "low": 1}, "low and high go with clamp, not with add"),
    ({"vector": "v", "op": "clamp"}, "clamp needs low, high or both"),
    ({"vector": "v", "op": "clamp", "low": 2, "high": 1}, "low must not be above high"),
    ({"vector": "v", "points": []}, "at least one; leave it out for all"),
    ({"vector": "v", "points": ["pre_attn.0", "resid_pre.0"]}, "name each point once"),
    ({"vector": "v", "points": "pre_attn.0"}, "points must be a list"),
    ({"vector": "v", "when": "always"}, "one of both, prompt, generation, last_prompt"),
    ({"vector": "v", "when": 3}, "when must be an object"),
    ({"vector": "v", "when": {"from": 3}}, "unknown key 'from'; known: phase, positions"),
    ({"vector": "v", "when": {"skip_special": "no"}}, "skip_special must be true or false"),
    ({"vector": "v", "gate": "p"}, "gate must be an object"),
    ({"vector": "v", "gate": {}}, "gate.probe must be text"),
    ({"vector": "v", "gate": {"probe": "p", "latch": 1}}, "latch must be true or false"),
    ({"vector": "v", "gate": {"probe": "p", "open": 1}}, "unknown key 'open'; known: probe"),
    ({"vector": "v", "gate": {"probe": "p", "sharpness": 0}}, "sharpness is 0"),
    (
        {"vector": "v", "gate": {"probe": "p", "sharpness": 1, "release": 0}},
        "release goes with a hard gate",
    ),
    (
        {"vector": "v", "gate": {"probe": "p", "latch": True, "release": 0}},
        "a latch never closes",
    ),
]


@pytest.mark.parametrize(("entry", "reason"), REFUSED, ids=lambda given: quote(given))
def test_a_wrong_entry_is_refused_with_the_way_out(entry: object, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_entries([{"vector": "fine"}, entry], what="steer")
    assert reason in str(caught.value)
    assert str(caught.value).startswith("steer[1]")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["block.3", "post_block", "post_block.-1", 7, None, "x" * 10**6])
def test_an_unknown_point_is_a_point_error(name: object) -> None:
    with pytest.raises(PointError, match=r"steer\[0\].points: ") as caught:
        parse_entries([{"vector": "v", "points": [name]}], what="steer")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("given", [None, {}, "[]", 3, True, {"vector": "v"}], ids=quote)
def test_steer_is_a_list(given: object) -> None:
    with pytest.raises(RequestError, match="steer must be a list"):
        parse_entries(given, what="steer")


@pytest.mark.parametrize("given", [None, [], "joy", 3, True], ids=quote)
def test_an_entry_is_an_object(given: object) -> None:
    with pytest.raises(RequestError, match=r"steer\[0\] must be an object"):
        parse_entries([given], what="steer")


def test_the_entries_of_a_request_are_limited() -> None:
    assert len(parse_entries([{"vector": "v"}] * MAX_ENTRIES, what="steer")) == MAX_ENTRIES
    with pytest.raises(RequestError, match=f"has {MAX_ENTRIES + 1} items; give at most"):
        parse_entries([{"vector": "v"}] * (MAX_ENTRIES + 1), what="steer")


def test_every_op_is_one_of_the_language() -> None:
    for op in OPS:
        low = {"low": 1.0} if op == "clamp" else {}
        (entry,) = parse_entries([{"vector": "v", "op": op, **low}], what="steer")
        assert entry.op == op


KEYS = ("vector", "scale", "op", "points", "when", "gate", "phase", "positions", "probe", "dtype")
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3) | st.integers(), inner)
    ),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(junk | st.dictionaries(st.sampled_from(KEYS), junk), max_size=2))
def test_any_value_is_read_or_refused(given: object) -> None:
    with suppress(ClairaiError):
        parse_entries(given, what="steer")
    with suppress(ClairaiError):
        parse_rules(given, what="stop")
