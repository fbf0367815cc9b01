"""The key `clairai`: what it may ask, what is refused with which reason, and what goes upstream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clairai.errors import RequestError
from clairai.fields.request_fields import parse_fields
from clairai.proxy.completions.completion_request import read_request
from clairai.proxy.proxy_settings import Limits

LIMITS = Limits()


def body(clairai: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [], "clairai": clairai, **more}).encode()


@pytest.mark.parametrize(
    ("clairai", "names", "is_named"),
    [
        ({}, None, False),
        ({"probes": "all"}, None, False),
        ({"probes": ["b", "a"]}, ("b", "a"), False),
        ({"events": "named", "prompt_scores": True}, None, True),
    ],
)
def test_known_fields_are_read(
    clairai: dict[str, Any], names: tuple[str, ...] | None, is_named: bool
) -> None:
    request = read_request(body(clairai), LIMITS)
    assert request is not None
    assert request.options.names == names
    assert request.options.is_named == is_named


@pytest.mark.parametrize(
    ("clairai", "reason"),
    [
        ({"steer": {}}, "steer"),
        ({"steer": None}, "steer"),
        ({"stop": "now"}, "stop"),
        ({"steering": []}, "steering"),
        ({"probes": "some"}, "some"),
        ({"probes": []}, "length"),
        ({"probes": ["a", "a"]}, "twice"),
        ({"probes": [1]}, "str"),
        ({"probes": ["x" * 201]}, "length"),
        ({"probes": ["a"] * 3000}, "length"),
        ({"prompt_scores": 1}, "bool"),
        ({"events": "sse"}, "sse"),
        ([], "object"),
        ("all", "object"),
        (None, "object"),
        (True, "object"),
    ],
)
def test_anything_else_is_refused(clairai: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_request(body(clairai), LIMITS)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 65}, "at most 64"),
        ({"n": "1000"}, "whole number"),
        ({"n": 100.0}, "whole number"),
        ({"n": True}, "whole number"),
        ({"n": int("9" * 4000)}, "whole number"),
        ({"use_beam_search": True}, "beam"),
        ({"echo": True}, "echo"),
        ({"echo": "yes"}, "true or false"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"prompt": ["a", "b"]}, "2 prompts"),
        ({"prompt": [[1], [2]]}, "2 prompts"),
        ({"vllm_xargs": {"clairai": "{}"}}, "vllm_xargs"),
        ({"vllm_xargs": [1]}, "object"),
    ],
)
def test_what_scores_would_change_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_request(body({}, **more), LIMITS)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 64},
        {"use_beam_search": False},
        {"echo": True, "return_token_ids": True},
        {"include_reasoning": True},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": "a"},
        {"vllm_xargs": None},
        {"vllm_xargs": {"mine": 1}},
    ],
)
def test_what_scores_do_not_change_is_passed_on(more: dict[str, Any]) -> None:
    request = read_request(body({}, **more), LIMITS)
    assert request is not None
    sent = json.loads(request.body(7))
    assert {name: sent[name] for name in more if name != "vllm_xargs"} == {
        name: value for name, value in more.items() if name != "vllm_xargs"
    }


@pytest.mark.parametrize(
    "raw",
    [
        b'{"clairai":{},"clairai":{"probes":["a"]}}',
        b'{"clairai":{},"cl\\u0061irai":{}}',
        b'{"messages":[],"messages":[],"clairai":{}}',
        b'{"clairai":{"probes":"all","probes":["a"]}}',
        b'{"clairai":{},"vllm_xargs":{"a":1,"a":2}}',
        b'{"clairai":{},"vllm_xargs":{"clairai":"{}","a":1}}',
        b'{"clairai":{},"vllm_xargs":{},"vllm_xargs":{"clairai":"{}"}}',
        b'{"prompt":"\\ud800","clairai":{},"n":1,"n":2}',
    ],
)
def test_nothing_is_smuggled_in_twice(raw: bytes) -> None:
    with pytest.raises(RequestError, match=r"twice|both"):
        read_request(raw, LIMITS)


BIG = b'{"steer":["' + b"A" * 70_000 + b'"],"probes":"all"}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"clairai":%s,"clairai":%s}' % (BIG, BIG),
        b'{"clairai":%s,"n":1,"n":2}' % BIG,
        b'{"clairai":%s}' % BIG.replace(b'"probes"', b'"probes":["a"],"probes"'),
        b'{"messages":[%s],"vllm_xargs":{"a":1,"a":2},"clairai":%s}' % (BIG, BIG),
    ],
)
def test_nothing_is_smuggled_in_behind_megabytes(raw: bytes) -> None:
    with pytest.raises(RequestError, match="twice"):
        read_request(raw, LIMITS)
    assert read_request(b'{"clairai":%s,"n":1}' % BIG, LIMITS) is not None


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b'"\\ud800"'])
def test_json_that_only_a_lax_parser_reads_cannot_hide_our_key(value: bytes) -> None:
    with pytest.raises(RequestError, match="strict"):
        read_request(b'{"clairai":{},"a":%s}' % value, LIMITS)


def test_a_key_in_escapes_is_our_key() -> None:
    request = read_request(b'{"\\u0063lairai":{"probes":["a"]},"messages":[]}', LIMITS)
    assert request is not None
    assert "clairai" not in json.loads(request.body(1))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"clairai",
        b'"clairai"',
        b'{"a":"clairai"}',
        b'{"Clairai":{}}',
        b'{"clairai ":{}}',
        b'{"a":"\\u0041"}',
    ],
)
def test_whatever_is_not_our_key_is_none_of_ours(raw: bytes) -> None:
    assert read_request(raw, LIMITS) is None


def test_upstream_gets_the_stream_and_is_asked_for_token_ids() -> None:
    request = read_request(body({"prompt_scores": True}, vllm_xargs={"mine": "x"}), LIMITS)
    assert request is not None
    sent = json.loads(request.body(2**64 - 1))
    assert sent["return_token_ids"] is True
    assert sent["vllm_xargs"]["mine"] == "x"
    wanted = parse_fields(sent["vllm_xargs"])  # as the engine reads it
    assert (wanted.stream, wanted.prompt_scores) == (2**64 - 1, True)
    assert "stream" not in sent


def test_named_events_are_streamed_and_counted_whatever_was_asked() -> None:
    request = read_request(body({"events": "named"}, stream=False, stream_options=None), LIMITS)
    assert request is not None
    sent = json.loads(request.body(1))
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
