"""Finds the clairai fields in the JSON body of a completion request, and leaves the rest encoded.

Runs in: the proxy and the API server. vLLM passes on what is under `vllm_xargs`; there the
`clairai` object and the `steering_vectors` fields are JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from clairai.errors import RequestError, quote
from clairai.fields.json_outline import JsonBounds, check_bounds, outermost_keys
from clairai.fields.request_fields import KEY
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.fields.turns import end_step

XARGS: Final = "vllm_xargs"
OUR_KEYS: Final = frozenset((KEY, *FIELD_PHASES))
# A larger body takes longer to read than a token may be late: it is read beside the event loop.
LARGE_BYTES: Final = 1 << 16
_SEARCH_BYTES: Final = 1 << 20  # at once
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
BodyFields = dict[str, msgspec.Raw]

_BODY: Final = msgspec.json.Decoder(BodyFields)
_XARGS_OBJECT: Final = msgspec.json.Decoder(BodyFields | None)
_TEXT: Final = msgspec.json.Decoder(str)
_FLAG: Final[msgspec.json.Decoder[bool | None]] = msgspec.json.Decoder(bool | None)
_COUNT: Final[msgspec.json.Decoder[int | None]] = msgspec.json.Decoder(int | None)
# One of these is in every body with a field of ours: a key may also be written with escapes.
_MARKS: Final = (KEY.encode(), b"steering_vectors", b"\\u")
_BOM: Final = b"\xef\xbb\xbf"


def check_json(body: bytes, bounds: JsonBounds) -> None:
    """RequestError if the text of a JSON body may not be handed to a parser."""
    check_text(body)
    check_bounds(body, bounds)


def check_text(body: bytes) -> None:
    """RequestError unless a JSON body is plain UTF-8.

    Python's json, and so vLLM, also reads UTF-16 and UTF-32, where no search for a key finds it.
    JSON has no byte 0 in UTF-8, and has one wherever those two write an ASCII character.
    """
    is_plain = b"\0" not in body and not body.startswith(_BOM)
    if not is_plain or not _is_utf8(body):
        raise RequestError("the body is not UTF-8; encode JSON as UTF-8, without a byte order mark")


def _is_utf8(body: bytes) -> bool:
    if body.isascii():
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def may_have_fields(body: bytes) -> bool:
    """False for most bodies without fields of ours, without reading them; of a checked text."""
    return any(_is_in(mark, body) for mark in _MARKS)


def _is_in(mark: bytes, body: bytes) -> bool:
    """`mark in body`, in steps: a search through megabytes keeps Python's lock."""
    for begin in range(0, len(body), _SEARCH_BYTES):
        if body.find(mark, begin, begin + _SEARCH_BYTES + len(mark) - 1) >= 0:
            return True
        end_step()
    return False


def has_our_keys(body: bytes, bounds: JsonBounds) -> bool:
    """True if a key of ours stands in the outermost object, however it is written.

    RequestError if a key stands there twice and one of them is ours or `vllm_xargs`: parsers differ
    in which one counts.
    """
    return not OUR_KEYS.isdisjoint(checked_keys(body, bounds))


def checked_keys(body: bytes, bounds: JsonBounds) -> frozenset[str]:
    """The keys of the outermost object; RequestError as of `has_our_keys`."""
    keys = outermost_keys(body, bounds)
    found = frozenset(keys)
    if not found.isdisjoint((*OUR_KEYS, XARGS)) and len(found) < len(keys):
        raise RequestError("a key of the body is there twice; send each once")
    return found


def move_beside(fields: BodyFields, bounds: JsonBounds) -> BodyFields:
    """The body with our fields beside `vllm_xargs`, although they stood in it as JSON text.

    So whoever judges the fields finds all of them; RequestError if they stand in both places.
    """
    if XARGS not in fields:
        return fields
    try:
        xargs = _XARGS_OBJECT.decode(fields[XARGS]) or {}
    except UNREADABLE:
        return fields  # vLLM refuses it
    inside = OUR_KEYS & xargs.keys()
    if not inside:
        return fields
    check_unique_keys(fields[XARGS], XARGS, bounds)
    if any(name in fields for name in OUR_KEYS):
        raise RequestError(
            f"the request has fields of clairai both beside vllm_xargs and in it ({min(inside)}); "
            "send all of them beside it"
        )
    moved = {name: _read_text(xargs[name], name, bounds) for name in sorted(inside)}
    left = {name: raw for name, raw in xargs.items() if name not in inside}
    return {**fields, XARGS: msgspec.Raw(msgspec.json.encode(left)), **moved}


def _read_text(raw: msgspec.Raw, name: str, bounds: JsonBounds) -> msgspec.Raw:
    """JSON that stands in a string, judged as the body is."""
    try:
        text = msgspec.Raw(_TEXT.decode(raw).encode())
        check_json(bytes(text), bounds)
        msgspec.json.decode(text)
    except (*UNREADABLE, UnicodeEncodeError):
        raise RequestError(
            f"{name} in vllm_xargs must be JSON as text; or send it beside"
        ) from None
    check_unique_keys(text, name, bounds)
    return text


def refuse_our_keys(body: bytes) -> None:
    """RequestError if a field of ours stands in the body of a route that reads none.

    Of a checked text. `vllm_xargs`, and the `extra_args` of sampling parameters, reach the engine
    from wherever they stand.
    """
    if not may_have_fields(body):
        return
    try:
        read = msgspec.json.decode(body)
    except UNREADABLE:
        raise RequestError("the body is not strict JSON; leave out NaN and Infinity") from None
    for fields in (read, *_engine_arguments(read)):
        found = OUR_KEYS.intersection(fields if isinstance(fields, dict) else ())
        if found:
            raise _unread_field(min(found))


def _engine_arguments(read: object) -> Iterator[object]:
    """What vLLM hands to the engine as it is, at any depth."""
    left = [read]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (value[name] for name in (XARGS, "extra_args") if name in value)
            left += value.values()
        elif isinstance(value, list):
            left += value


def refuse_form_names(names: Iterable[str]) -> None:
    """RequestError if a part of a form is named as a field that can hold ours."""
    found = {*OUR_KEYS, XARGS}.intersection(names)
    if found:
        raise _unread_field(min(found))


def _unread_field(name: str) -> RequestError:
    return RequestError(
        f"this route does not read {name}; leave it out, or send the request to "
        "/v1/chat/completions, /v1/completions or /v1/responses"
    )


def check_unique_keys(raw: msgspec.Raw, where: str, bounds: JsonBounds) -> None:
    """RequestError if a key of this object is there twice."""
    keys = outermost_keys(bytes(raw), bounds)
    if len(set(keys)) < len(keys):
        raise RequestError(f"a key under {where} is there twice; send each once")


def decode_body(body: bytes) -> BodyFields:
    """Raises one of UNREADABLE if the body is not a JSON object."""
    found = _BODY.decode(body)
    end_step()
    return found


def has_value(fields: BodyFields, name: str) -> bool:
    return bytes(fields.get(name, b"null")) != b"null"


def steering_vector_fields(fields: BodyFields) -> BodyFields:
    """The `steering_vectors` fields that stand beside `vllm_xargs`."""
    return {name: fields[name] for name in FIELD_PHASES if has_value(fields, name)}


def read_flag(fields: BodyFields, name: str) -> bool | None:
    """RequestError for what only vLLM's lax parser reads as true or false, such as "yes"."""
    if name not in fields:
        return None
    try:
        return _FLAG.decode(fields[name])
    except UNREADABLE:
        raise RequestError(f"{name} must be true or false, got {_quote(fields[name])}") from None


def read_count(fields: BodyFields, name: str) -> int | None:
    """RequestError for what only vLLM's lax parser reads as a whole number, such as "100"."""
    if name not in fields:
        return None
    try:
        return _COUNT.decode(fields[name])
    except UNREADABLE:
        raise RequestError(f"{name} must be a whole number, got {_quote(fields[name])}") from None


def _quote(raw: msgspec.Raw) -> str:
    return quote(bytes(memoryview(raw)[:64]).decode("utf-8", "replace"))
