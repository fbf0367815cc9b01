"""Which bodies have clairai fields, and where those stand."""

from __future__ import annotations

import json

import msgspec
import pytest

from clairai.errors import RequestError
from clairai.fields.json_outline import JsonBounds
from clairai.fields.request_body import (
    UNREADABLE,
    check_json,
    check_text,
    check_unique_keys,
    decode_body,
    has_our_keys,
    has_value,
    may_have_fields,
    read_count,
    read_flag,
    steering_vector_fields,
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"messages": []}', False),
        (b'{"clairai": {}}', True),
        (b'{"vllm_xargs": {"clairai": "{}"}}', True),
        (b'{"decode_steering_vectors": {}}', True),
        (b'{"\\u0063lairai": {}}', True),  # an escaped key
    ],
)
def test_a_body_with_our_fields_is_never_passed_over(body: bytes, expected: bool) -> None:
    assert may_have_fields(body) == expected


def test_the_fields_of_a_body_stay_encoded() -> None:
    body = decode_body(b'{"messages": [ 1,  2 ], "n": 3}')
    assert bytes(body["messages"]) == b"[ 1,  2 ]"
    assert read_count(body, "n") == 3
    assert read_count(body, "m") is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_unreadable(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        decode_body(body)


def test_steering_vectors_are_found_unless_they_are_null() -> None:
    given = {"steering_vectors": {"a": 1}, "prefill_steering_vectors": None, "clairai": None}
    body = decode_body(json.dumps(given).encode())
    assert steering_vector_fields(body).keys() == {"steering_vectors"}
    assert not has_value(body, "clairai")
    assert not has_value(body, "stop")


@pytest.mark.parametrize(
    ("raw", "expected"), [(b"true", True), (b"false", False), (b"null", None), (b" true", True)]
)
def test_a_flag_is_true_or_false(raw: bytes, expected: bool | None) -> None:
    assert read_flag(decode_body(b'{"echo":%s}' % raw), "echo") is expected
    assert read_flag({}, "echo") is None


@pytest.mark.parametrize("raw", [b"1", b"1.0", b'"yes"', b'"true"', b"[]", b"1e999", b"9" * 5000])
def test_what_only_a_lax_parser_takes_for_a_flag_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="echo must be true or false"):
        read_flag(decode_body(b'{"echo":%s}' % raw), "echo")


@pytest.mark.parametrize("raw", [b'"100"', b"100.0", b"true", b"1e2", b"1e999", b"9" * 5000])
def test_what_only_a_lax_parser_takes_for_a_count_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="n must be a whole number"):
        read_count(decode_body(b'{"n":%s}' % raw), "n")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_only_plain_utf8_is_read(encoding: str) -> None:
    text = '{"clairai": {}}'
    assert json.loads(text.encode(encoding))  # vLLM would
    with pytest.raises(RequestError, match="UTF-8"):
        check_text(text.encode(encoding))
    check_text(json.dumps({"a": "héllo"}, ensure_ascii=False).encode())


@pytest.mark.parametrize("body", [b'{"a":"\xed\xa0\x80"}', b'{"a":"\xff"}', b'{"a":1}\0'])
def test_what_python_reads_and_no_other_parser_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        check_json(body, JsonBounds())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"clairai":1}', True),
        (b'{"cl\\u0061irai":1}', True),
        (b'{"a":"\\ud800","decode_steering_vectors":1}', True),  # which msgspec does not read
        (b'{"a":{"clairai":1},"b":["clairai"],"c":"clairai"}', False),
        (b'["clairai"]', False),
        (b'{"a":1,"a":2}', False),  # vLLM's affair
    ],
)
def test_our_keys_are_found_where_vllm_would_read_them(body: bytes, expected: bool) -> None:
    assert has_our_keys(body, JsonBounds()) == expected


@pytest.mark.parametrize(
    "body", [b'{"clairai":1,"a":1,"\\u0061":2}', b'{"vllm_xargs":{},"vllm_xargs":{}}']
)
def test_a_key_beside_ours_stands_once(body: bytes) -> None:
    with pytest.raises(RequestError, match="twice"):
        has_our_keys(body, JsonBounds())
    with pytest.raises(RequestError, match="under vllm_xargs"):
        check_unique_keys(msgspec.Raw(b'{"a":1,"a":2}'), "vllm_xargs", JsonBounds())


@pytest.mark.parametrize("begin", [0, 1, (1 << 20) - 4, 1 << 20, (2 << 20) - 7, (2 << 20) + 9])
def test_a_mark_is_found_wherever_it_begins_in_a_long_body(begin: int) -> None:
    body = b"x" * begin + b"clairai" + b"x" * ((2 << 20) + 16 - begin)
    assert may_have_fields(body)
    assert not may_have_fields(body.replace(b"clairai", b"clairar"))


def test_a_search_through_a_long_body_ends_a_step_for_each_mebibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[None] = []
    monkeypatch.setattr("clairai.fields.request_body.end_step", lambda: steps.append(None))
    assert not may_have_fields(bytes(3 << 20))
    assert len(steps) == 3 * 3  # three marks
