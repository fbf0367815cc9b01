"""Which bodies have clairai fields, and where those stand."""

from __future__ import annotations

import json

import msgspec
import pytest

from clairai.fields.request_body import (
    UNREADABLE,
    decode_body,
    decode_value,
    has_value,
    is_true,
    may_have_fields,
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
    assert decode_value(body["n"]) == 3
    assert decode_value(None) is None


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
    ("raw", "expected"),
    [
        *((raw, True) for raw in (b"true", b"1", b"1.0", b'"yes"', b'"ON"', b'"t"')),
        *((raw, False) for raw in (b"false", b"0", b"2", b"null", b'"no"', b"[]")),
    ],
)
def test_true_is_what_vllm_reads_as_true(raw: bytes, expected: bool) -> None:
    assert is_true(msgspec.Raw(raw)) == expected
