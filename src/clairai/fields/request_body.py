"""Finds the clairai fields in the JSON body of a completion request, and leaves the rest encoded.

Runs in: the proxy and the API server. vLLM passes on what is under `vllm_xargs`; there the
`clairai` object and the `steering_vectors` fields are JSON text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.fields.request_fields import KEY
from clairai.fields.steering_vectors import FIELD_PHASES

XARGS: Final = "vllm_xargs"
# A larger body takes longer to read than a token may be late: it is read beside the event loop.
LARGE_BYTES: Final = 1 << 16
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
BodyFields = dict[str, msgspec.Raw]

_BODY: Final = msgspec.json.Decoder(BodyFields)
# One of these is in every body with a field of ours: a key may also be written with escapes.
_MARKS: Final = (KEY.encode(), b"steering_vectors", b"\\u")
# What pydantic, and so vLLM, reads as true.
_TRUE: Final = frozenset(("1", "on", "t", "true", "y", "yes"))


def may_have_fields(body: bytes) -> bool:
    """False for most bodies without fields of ours, without reading them."""
    return any(mark in body for mark in _MARKS)


def decode_body(body: bytes) -> BodyFields:
    """Raises one of UNREADABLE if the body is not a JSON object."""
    return _BODY.decode(body)


def has_value(fields: BodyFields, name: str) -> bool:
    return bytes(fields.get(name, b"null")) != b"null"


def steering_vector_fields(fields: BodyFields) -> BodyFields:
    """The `steering_vectors` fields that stand beside `vllm_xargs`."""
    return {name: fields[name] for name in FIELD_PHASES if has_value(fields, name)}


def decode_value(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


def is_true(raw: msgspec.Raw | None) -> bool:
    value = decode_value(raw)
    return value == 1 or (isinstance(value, str) and value.lower() in _TRUE)
