"""A request's clairai fields: what callers write is what the engine core reads, or an error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, RequestError, quote
from clairai.fields.json_fields import MAX_CHARS, MAX_ITEMS
from clairai.fields.packed_vector import pack_vector
from clairai.fields.request_fields import (
    KEY,
    MAX_STREAM,
    RequestFields,
    new_stream_id,
    parse_fields,
    request,
)
from clairai.fields.rules import StopRule
from clairai.fields.steer import MAX_ENTRIES, SteerEntry
from clairai.fields.when import When
from clairai.points import Point
from clairai.vector.model import Vector

wanted = st.builds(
    RequestFields,
    stream=st.none() | st.integers(1, MAX_STREAM),
    prompt_scores=st.booleans(),
    steer=st.sampled_from(
        [(), (SteerEntry("joy", scale=2.0),), (SteerEntry("a"), SteerEntry("b", op="ablate"))]
    ),
    stop=st.sampled_from([(), (StopRule("anger", 0.5, 3, "alert"), StopRule("joy"))]),
)


def written(asked: RequestFields) -> dict[str, Any]:
    return request(
        stream=asked.stream,
        prompt_scores=asked.prompt_scores,
        steer=[entry.to_json() for entry in asked.steer],
        stop=[rule.to_json() for rule in asked.stop],
    )


def test_a_plain_request_has_no_fields() -> None:
    assert request() == {KEY: {}}
    assert parse_fields(request()) == RequestFields()


@settings(derandomize=True, deadline=None)
@given(wanted)
def test_parse_fields_reads_what_request_writes(asked: RequestFields) -> None:
    assert parse_fields(written(asked)) == asked


@settings(derandomize=True, deadline=None)
@given(wanted)
def test_the_json_text_of_the_fields_means_the_same(asked: RequestFields) -> None:
    assert parse_fields({KEY: json.dumps(written(asked)[KEY])}) == asked


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {KEY: {}}, {KEY: "{}"}], ids=repr)
def test_a_request_without_fields_asks_for_nothing(extra_args: dict[str, Any] | None) -> None:
    assert parse_fields(extra_args) == RequestFields()


def test_the_bounds_of_a_stream_are_the_bounds_of_64_bits_without_zero() -> None:
    assert parse_fields({KEY: {"stream": 1}}).stream == 1
    assert parse_fields({KEY: {"stream": 2**64 - 1}}).stream == 2**64 - 1


@pytest.mark.parametrize(
    "stream", [0, -1, 2**64, True, 1.0, "7", [7], {}, 10**4000, 10**9000, "x" * 10**6], ids=quote
)
def test_a_wrong_stream_is_refused_with_a_short_message(stream: object) -> None:
    with pytest.raises(RequestError, match=r"from 1 to .*leave it out") as caught:
        parse_fields({KEY: {"stream": stream}})
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError):
        request(stream=cast(int, stream))


@pytest.mark.parametrize("value", [0, 1, "true", None, [], "x" * 10**6, 10**9000], ids=quote)
def test_prompt_scores_is_true_or_false_and_nothing_like_it(value: object) -> None:
    with pytest.raises(RequestError, match="prompt_scores must be true or false") as caught:
        parse_fields({KEY: {"prompt_scores": value}})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [{"steam": 1}, {"stream": 1, "x": 2}, {1: 2}, {"": 1}, {"x" * 10**6: 1}, {10**9000: 1},
     {"\ud800": 1}, {"__class__": 1}, {1: 1, "b": 2, None: 3}],
    ids=quote,
)  # fmt: skip
def test_an_unknown_field_is_refused_with_those_known(fields: dict[Any, Any]) -> None:
    with pytest.raises(RequestError, match="known: stream, prompt_scores, steer, stop") as caught:
        parse_fields({KEY: fields})
    assert len(str(caught.value).encode()) < 300


@pytest.mark.parametrize("given", [None, [], [1], 3, 2.0, True, b"{}"], ids=repr)
def test_a_field_that_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        parse_fields({KEY: given})


@pytest.mark.parametrize("text", ["null", "[]", '"{}"', "1", "true", "NaN"])
def test_json_text_of_no_object_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        parse_fields({KEY: text})


@pytest.mark.parametrize(
    "text", ["", "{", "{'stream': 1}", "{}{}", "[" * 4096, '{"stream": 1,}', "\x00"], ids=quote
)
def test_text_that_is_no_json_is_refused_whatever_it_is(text: str) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse_fields({KEY: text})


def test_text_is_read_up_to_its_bound_and_no_further() -> None:
    assert parse_fields({KEY: "{}".ljust(MAX_CHARS)}) == RequestFields()
    with pytest.raises(RequestError, match=f"{MAX_CHARS + 1} characters long, at most {MAX_CHARS}"):
        parse_fields({KEY: "{}".ljust(MAX_CHARS + 1)})


def test_text_of_more_values_than_a_request_can_need_is_refused_before_it_is_read() -> None:
    with pytest.raises(RequestError, match=f"holds over {MAX_ITEMS} values"):
        parse_fields({KEY: "[" + "," * MAX_ITEMS})


@pytest.mark.parametrize(
    "text",
    ['{"stream": 1, "stream": 2}', '{"steer": [{"vector": "a", "scale": 1, "scale": 2}]}'],
)
def test_a_key_that_comes_twice_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="appears twice; keep one of them"):
        parse_fields({KEY: text})


@pytest.mark.parametrize("key", ["steer", "stop"])
@pytest.mark.parametrize("given", [None, {}, "joy", 3, True], ids=repr)
def test_steer_and_stop_are_lists(key: str, given: object) -> None:
    with pytest.raises(RequestError, match=f"{key} must be a list"):
        parse_fields({KEY: {key: given}})


def test_a_vector_given_to_request_travels_as_json_bit_for_bit() -> None:
    vector = Vector("mine", {Point("post_block", 3): np.array([0.1, -3e14], np.float32)})
    fields = request(steer=[{"vector": vector, "scale": np.float32(2)}])
    (entry,) = parse_fields({KEY: json.dumps(fields[KEY])}).steer
    assert entry == SteerEntry(pack_vector(vector), scale=2.0)
    assert pack_vector(vector).unpack(2, what="vector").digest == vector.digest


def test_request_refuses_what_parse_would() -> None:
    with pytest.raises(RequestError, match=r"steer\[0\]: unknown key 'scael'"):
        request(steer=[{"vector": "joy", "scael": 2}])
    with pytest.raises(RequestError, match=r"stop\[0\].tokens"):
        request(stop=[{"probe": "anger", "tokens": 0}])


SEED: dict[str, Any] = {"post_block": {"3": {"vector": [0.5, 1.0], "scale": 2.0}}}


@pytest.mark.parametrize("is_text", [False, True], ids=["object", "text"])
def test_steering_vectors_become_entries(is_text: bool) -> None:
    field: Any = json.dumps(SEED) if is_text else SEED
    extra_args = {KEY: {"steer": [{"vector": "joy"}]}, "decode_steering_vectors": field}
    own, seed = parse_fields(extra_args | {"steering_vectors": None}).steer
    assert own == SteerEntry("joy")
    assert (seed.when, seed.op, seed.scale) == (When("generation"), "add", 1.0)
    assert isinstance(seed.vector, Vector)
    assert seed.vector.rows[Point("post_block", 3)].tolist() == [1.0, 2.0]
    assert parse_fields({"steering_vectors": field}).steer[0].when == When("both")
    assert parse_fields({"prefill_steering_vectors": field}).steer[0].when == When("prompt")


@pytest.mark.parametrize("given", ["{", "[]", "null", 3, [1], b"{}"], ids=repr)
def test_steering_vectors_that_are_no_objects_are_refused(given: object) -> None:
    with pytest.raises(RequestError, match=r"steering_vectors (must be an object|is text, but)"):
        parse_fields({"steering_vectors": given})


def test_entries_of_both_kinds_are_counted_together() -> None:
    extra_args = {KEY: {"steer": [{"vector": "joy"}] * MAX_ENTRIES}}
    assert len(parse_fields(extra_args).steer) == MAX_ENTRIES
    with pytest.raises(RequestError, match=f"over {MAX_ENTRIES} entries"):
        parse_fields(extra_args | {"steering_vectors": SEED})


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_value_is_read_or_refused_and_nothing_else(value: object) -> None:
    ours: list[Any] = [value, json.dumps(value), {"stream": value}, {"steer": value}]
    for extra_args in (*({KEY: one} for one in ours), {"steering_vectors": value}):
        with suppress(ClairaiError):
            assert isinstance(parse_fields(extra_args), RequestFields)


def test_a_new_stream_id_is_valid() -> None:
    streams = {new_stream_id() for _ in range(1000)}
    assert len(streams) == 1000
    for stream in streams:
        assert RequestFields(stream).stream == stream
