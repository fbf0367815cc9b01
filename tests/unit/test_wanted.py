"""A request's clairai fields: what callers write is what the engine core reads, or an error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import RequestError
from clairai.points import quote
from clairai.steer.text import MAX_CHARS
from clairai.wanted import KEY, MAX_STREAM, Wanted, mint, parse, request

wanted = st.builds(
    Wanted, stream=st.none() | st.integers(1, MAX_STREAM), prompt_scores=st.booleans()
)


def test_a_plain_request_says_nothing() -> None:
    assert request() == {KEY: {}}
    assert parse(request()) == Wanted()


@settings(derandomize=True, deadline=None)
@given(wanted)
def test_what_request_writes_parse_reads(asked: Wanted) -> None:
    written = request(stream=asked.stream, prompt_scores=asked.prompt_scores)
    assert parse(written) == asked


@settings(derandomize=True, deadline=None)
@given(wanted)
def test_the_json_text_of_the_fields_means_the_same(asked: Wanted) -> None:
    written = request(stream=asked.stream, prompt_scores=asked.prompt_scores)
    assert parse({KEY: json.dumps(written[KEY])}) == asked


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {KEY: {}}, {KEY: "{}"}], ids=repr)
def test_a_request_without_fields_asks_for_nothing(extra_args: dict[str, Any] | None) -> None:
    assert parse(extra_args) == Wanted()


def test_the_bounds_of_a_stream_are_the_bounds_of_64_bits_without_zero() -> None:
    assert parse({KEY: {"stream": 1}}).stream == 1
    assert parse({KEY: {"stream": 2**64 - 1}}).stream == 2**64 - 1


@pytest.mark.parametrize(
    "stream", [0, -1, 2**64, True, 1.0, "7", [7], {}, 10**4000, 10**9000, "x" * 10**6], ids=quote
)
def test_a_stream_that_is_no_stream_is_refused_in_few_words(stream: object) -> None:
    with pytest.raises(RequestError, match=r"from 1 to .*leave it out") as caught:
        parse({KEY: {"stream": stream}})
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError):
        request(stream=cast(int, stream))


@pytest.mark.parametrize("value", [0, 1, "true", None, [], "x" * 10**6, 10**9000], ids=quote)
def test_prompt_scores_is_true_or_false_and_nothing_like_it(value: object) -> None:
    with pytest.raises(RequestError, match="prompt_scores must be true or false") as caught:
        parse({KEY: {"prompt_scores": value}})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [{"steam": 1}, {"stream": 1, "x": 2}, {1: 2}, {"": 1}, {"x" * 10**6: 1}, {10**9000: 1},
     {"\ud800": 1}, {"__class__": 1}, {1: 1, "b": 2, None: 3}],
    ids=quote,
)  # fmt: skip
def test_an_unknown_field_is_refused_with_those_known(fields: dict[Any, Any]) -> None:
    with pytest.raises(RequestError, match="known: stream, prompt_scores") as caught:
        parse({KEY: fields})
    assert len(str(caught.value).encode()) < 300


@pytest.mark.parametrize("given", [None, [], [1], 3, 2.0, True, b"{}"], ids=repr)
def test_a_field_that_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        parse({KEY: given})


@pytest.mark.parametrize("text", ["null", "[]", '"{}"', "1", "true", "NaN"])
def test_json_text_of_no_object_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        parse({KEY: text})


@pytest.mark.parametrize(
    "text", ["", "{", "{'stream': 1}", "{}{}", "[" * 4096, '{"stream": 1,}', "\x00"], ids=quote
)
def test_text_that_is_no_json_is_refused_whatever_it_is(text: str) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        parse({KEY: text})


def test_text_is_read_up_to_its_bound_and_no_further() -> None:
    assert parse({KEY: "{}".ljust(MAX_CHARS)}) == Wanted()
    with pytest.raises(RequestError, match=f"{MAX_CHARS + 1} characters long, at most {MAX_CHARS}"):
        parse({KEY: "{}".ljust(MAX_CHARS + 1)})


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_any_value_is_read_or_refused_and_nothing_else(value: object) -> None:
    for extra_args in ({KEY: value}, {KEY: {"stream": value}}, {KEY: json.dumps(value)}):
        with suppress(RequestError):
            assert isinstance(parse(extra_args), Wanted)


def test_a_minted_stream_is_one_a_request_may_have() -> None:
    streams = {mint() for _ in range(1000)}
    assert len(streams) == 1000
    for stream in streams:
        assert Wanted(stream).stream == stream
