"""The `capture` field and setting are parsed as written, or refused with the way out."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.capture.capture_settings import CaptureSettings
from clairai.errors import ClairaiError, ConfigError, RequestError
from clairai.fields.capture import CaptureSpec, EncoderSpec, parse_capture
from clairai.fields.positions import (
    SELECTORS,
    MessagePosition,
    PositionSpan,
    absolute_ranges,
    parse_positions,
    positions_to_json,
)
from clairai.fields.ranges import OPEN_END
from clairai.fields.request_fields import KEY, RequestFields, parse_fields, request

spans = st.builds(PositionSpan, st.integers(-50, 50), st.none())
parts = st.sampled_from(SELECTORS) | spans | st.builds(MessagePosition, st.integers(0, 9))
positions = st.lists(parts, min_size=1, max_size=4).map(tuple)
wishes = st.builds(
    CaptureSpec,
    points=st.none() | st.just(("post_block.3", "pre_attn.*")),
    positions=st.none() | positions,
    encoder=st.sampled_from(
        [None, EncoderSpec("raw", {}), EncoderSpec("rp8", {"k": 64, "seed": 3})]
    ),
    to=st.none() | st.just(("fs",)),
    tags=st.sampled_from(["{}", '{"a":1,"b":[true,null]}']),
)


@settings(derandomize=True, deadline=None)
@given(wishes | st.sampled_from([CaptureSpec(), CaptureSpec(is_wanted=False)]))
def test_the_json_of_a_spec_is_parsed_to_an_equal_spec(wish: CaptureSpec) -> None:
    said = json.loads(json.dumps(wish.to_json()))
    assert parse_capture(said) == wish
    assert parse_fields(request(capture=said)) == RequestFields(capture=wish)
    assert parse_fields({KEY: json.dumps({"capture": said})}) == RequestFields(capture=wish)


def test_a_missing_field_is_no_spec() -> None:
    assert parse_capture(None) is None
    assert request() == {KEY: {}}


@settings(derandomize=True, deadline=None)
@given(positions)
def test_the_json_of_positions_is_parsed_to_equal_positions(given_positions: Any) -> None:
    said = json.loads(json.dumps(positions_to_json(given_positions)))
    assert parse_positions(said, what="x") == given_positions


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(SELECTORS)
        | st.builds(PositionSpan, st.integers(-30, 30), st.none() | st.integers(-30, 30)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 25),
)
def test_ranges_hold_exactly_the_positions_they_stand_for(
    chosen: list[Any], prompt_len: int
) -> None:
    def is_meant(part: Any, at: int) -> bool:
        if isinstance(part, PositionSpan):
            first = part.first if part.first >= 0 else prompt_len + part.first
            end = OPEN_END if part.end is None else part.end
            return first <= at < (end if end >= 0 else prompt_len + end)
        return {
            "all": True,
            "prompt": at < prompt_len,
            "generated": at >= prompt_len,
            "last_prompt": at == prompt_len - 1,
        }[part]

    found = absolute_ranges(tuple(chosen), prompt_len)
    assert all(first < end for first, end in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    held = {at for at in range(80) if any(first <= at < end for first, end in found)}
    assert held == {at for at in range(80) if any(is_meant(part, at) for part in chosen)}


WRONG: dict[str, tuple[Any, str]] = {
    "not an object": (3, "capture must be an object"),
    "unknown key": ({"point": "x"}, "unknown key 'point'"),
    "unknown selector": ({"positions": "some"}, "must be one of all, prompt"),
    "empty range": ({"positions": {"from": 5, "to": 5}}, "holds no position"),
    "range to 0": ({"positions": {"from": -5, "to": 0}}, "holds no position"),
    "no range": ({"positions": []}, "is empty; leave it out"),
    "a number": ({"positions": 7}, "or one with message"),
    "huge": ({"positions": {"from": 2**40}}, "must be a whole number"),
    "too many ranges": ({"positions": [{"from": 1}] * 65}, "give at most 64"),
    "negative message": ({"positions": {"message": -1}}, "must be a whole number"),
    "message and more": ({"positions": {"message": 1, "to": 3}}, "unknown key 'to'"),
    "no points": ({"points": []}, "leave it out for all tapped points"),
    "points of another kind": ({"points": [3]}, "must be text"),
    "unknown encoder": ({"encoder": "zip"}, "no encoder is named 'zip'"),
    "wrong parameter": ({"encoder": {"name": "rp8", "size": 3}}, "has no 'size'"),
    "wrong value": ({"encoder": {"name": "rp8", "k": 0}}, "k is 0"),
    "nobody": ({"to": []}, "each consumer once"),
    "twice": ({"to": ["fs", "fs"]}, "each consumer once"),
    "tags in a list": ({"tags": []}, "tags must be an object"),
    "large tags": ({"tags": {"a": "x" * 5000}}, "may take 4096"),
    "tags that JSON has not": ({"tags": {"a": float("nan")}}, "cannot be written"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused_with_the_reason(name: str) -> None:
    given_wish, reason = WRONG[name]
    with pytest.raises(RequestError, match="capture") as caught:
        parse_capture(given_wish)
    assert reason in caught.value.reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["points", "positions", "encoder", "to", "tags", "from", "name", "message"]
            )
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(json_values)
def test_any_other_value_is_refused(value: Any) -> None:
    with suppress(ClairaiError):
        parse_capture(value)
    with suppress(ConfigError):
        CaptureSettings.parse(value)


def test_a_folder_stands_for_the_consumer_fs() -> None:
    setting = CaptureSettings.parse({"folder": "/captures"})
    (consumer,) = setting.consumers
    assert (consumer.name, consumer.kind, dict(consumer.options)) == (
        "fs",
        "fs",
        {"folder": "/captures"},
    )
    assert setting.to == ("fs",)
    assert setting.sample == 0  # only requests that ask are captured
    assert CaptureSettings.parse({"folder": "x", "when": {"probe": "p"}}).sample == 1


def test_consumers_have_names_and_kinds() -> None:
    given_consumers = {"disk": {"kind": "fs", "folder": "a"}, "npz": {"folder": "b"}}
    setting = CaptureSettings.parse({"consumers": given_consumers, "to": ["disk"]})
    assert [(one.name, one.kind) for one in setting.consumers] == [("disk", "fs"), ("npz", "npz")]
    assert setting.to == ("disk",)


WRONG_SETTINGS: dict[str, tuple[Any, str]] = {
    "nowhere": ({}, "give one of the two"),
    "twice": ({"folder": "x", "consumers": {}}, "give one of the two"),
    "no consumers": ({"consumers": {}}, "1 to 8 names"),
    "options": ({"consumers": {"fs": 3}}, "must be an object of options"),
    "unknown to": ({"folder": "x", "to": ["npz"]}, "no consumer is named 'npz'"),
    "share": ({"folder": "x", "sample": 1.5}, "must be a number of 0 to 1"),
    "no share": ({"folder": "x", "sample": float("nan")}, "must be a finite number"),
    "rule": ({"folder": "x", "when": {"above": 1}}, "capture.when.probe"),
    "memory": ({"folder": "x", "staging_mib": 0}, "capture.staging_mib"),
    "unknown": ({"folder": "x", "every": True}, "unknown key 'every'"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_with_the_reason(name: str) -> None:
    given_setting, reason = WRONG_SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        CaptureSettings.parse(given_setting)
    assert reason in caught.value.reason
