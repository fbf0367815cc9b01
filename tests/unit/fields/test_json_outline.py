"""The outline of JSON text agrees with a parser, and stops at the first bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import RequestError
from clairai.fields import json_outline
from clairai.fields.json_outline import (
    JsonBounds,
    JsonOutline,
    check_bounds,
    outermost_keys,
    outlined_keys,
    parsed_keys,
)

WIDE = JsonBounds(depth=10**6, items=10**9, values=10**9, keys=10**6)
TEXT = st.text(st.sampled_from('a"\\[]{},: \n\u00e9\ud800'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TEXT, VALUES), max_size=6), st.sampled_from([1, 2, 3, 7, 1 << 16]))
def test_keys_and_depth_are_those_that_a_parser_sees(
    pairs: list[tuple[str, Any]], step: int
) -> None:
    members = (f"{json.dumps(name)} : {json.dumps(value)}" for name, value in pairs)
    text = ("{" + " , ".join(members) + "}").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_outline, "STEP_BYTES", step)
        keys = [name for name, _ in pairs]
        assert outlined_keys(text, WIDE) == parsed_keys(text) == outermost_keys(text, WIDE) == keys
        depth = 1 + max((depth_of(value) for _, value in pairs), default=0)
        check_bounds(text, JsonBounds(depth=depth))
        with pytest.raises(RequestError, match="nested"):
            check_bounds(text, JsonBounds(depth=depth - 1))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64) | st.text('"\\{}[],:a ', max_size=64).map(str.encode))
def test_any_bytes_have_an_outline_and_json_has_one_only(text: bytes) -> None:
    outlined = outlined_keys(text, WIDE)
    assert parsed_keys(text) in (None, outlined)
    assert outermost_keys(text, WIDE) == outlined


@pytest.mark.parametrize(
    ("text", "bounds", "reason"),
    [
        (b"[" + b"1," * 99 + b"1]", JsonBounds(values=100), "values"),
        (b"[" + b'"",' * 99 + b"[]]", JsonBounds(items=100), "strings, lists and objects"),
        (b'{"a":"' + b"[" * 99 + b'"}', JsonBounds(depth=1), None),
        (b'{"a":"' + b"," * 99 + b'"}', JsonBounds(values=3), None),
        (b"{" + b",".join(b'"%d":1' % i for i in range(99)) + b"}", JsonBounds(keys=40), "fields"),
        (b"[" + b"1," * 98 + b"1]", JsonBounds(values=101), None),
    ],
)
def test_each_bound_is_kept(text: bytes, bounds: JsonBounds, reason: str | None) -> None:
    if reason is None:
        check_bounds(text, bounds)
        return
    with pytest.raises(RequestError, match=reason):
        check_bounds(text, bounds)


def test_reading_ends_at_the_bound() -> None:
    """Numbers without end cost no more than a million of them, however long the body is."""
    outline = JsonOutline(JsonBounds())
    with pytest.raises(RequestError, match="values"):
        outline.read(b"[" + b"0," * (4 << 20))
    assert outline.nbytes <= (2 << 20) + json_outline.STEP_BYTES
