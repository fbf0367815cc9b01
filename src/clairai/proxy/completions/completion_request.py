"""Takes the body of a completion request; gives what it asks of clairai, and what upstream gets.

A body without the key `clairai`, and without the seeds' keys for vectors, is none of ours: None,
and it goes upstream byte by byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from clairai.errors import RequestError
from clairai.fields.request_body import (
    LARGE_BYTES,
    UNREADABLE,
    XARGS,
    BodyFields,
    decode_body,
    decode_value,
    is_true,
    may_have_fields,
    steering_vector_fields,
)
from clairai.fields.request_fields import KEY
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.points import quote
from clairai.proxy.proxy_settings import Limits

_MAX_NAMES: Final = 2048
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Names = Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=_MAX_NAMES)]
_XARGS_OBJECT: Final = msgspec.json.Decoder(BodyFields | None)
_HEAD_BYTES: Final = 256
_NONE: Final = msgspec.Raw(b"[]")


class ClairaiOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object under the key `clairai`."""

    probes: Literal["all"] | _Names = "all"
    prompt_scores: bool = False
    events: Literal["named"] | None = None
    # Entries and rules are the engine's to judge; vectors among them are megabytes.
    steer: msgspec.Raw = _NONE
    stop: list[Any] = []
    capture: bool | dict[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The probes in the order they were asked for; None for all of the bank."""
        return None if self.probes == "all" else tuple(self.probes)

    @property
    def is_named(self) -> bool:
        return self.events == "named"

    @property
    def is_steered(self) -> bool:
        return len(self.steer) > 64 or bool(decode_value(self.steer))

    @property
    def is_captured(self) -> bool:
        return self.capture is not None and self.capture is not False


_ASKED: Final = msgspec.json.Decoder(ClairaiOptions)


@dataclass(frozen=True)
class ScoredRequest:
    """A completion request that asks for scores, or to be steered."""

    asked: ClairaiOptions
    keeps_token_ids: bool  # the client itself asked for token ids
    _fields: BodyFields  # without our keys
    _steering_vectors: BodyFields
    _xargs: BodyFields

    @property
    def is_steered(self) -> bool:
        rules = (rule for rule in self.asked.stop if isinstance(rule, dict))
        is_due = any(rule.get("steer") for rule in rules)
        return is_due or self.asked.is_steered or bool(self._steering_vectors)

    @property
    def is_bound(self) -> bool:
        """Whether it asks for what an engine without clairai would leave out in silence."""
        return self.is_steered or bool(self.asked.stop) or self.asked.is_captured

    def body(self, stream: int) -> bytes:
        """What upstream gets; every field that is not ours is as it came, byte by byte."""
        asked = self.asked
        wanted: dict[str, Any] = {"stream": stream}
        wanted |= {"prompt_scores": True} if asked.prompt_scores else {}
        wanted |= {"steer": asked.steer} if asked.is_steered else {}
        wanted |= {"stop": asked.stop} if asked.stop else {}
        wanted |= {} if asked.capture is None else {"capture": asked.capture}
        ours = {KEY: msgspec.json.encode(wanted).decode()}
        vectors = {name: bytes(raw).decode() for name, raw in self._steering_vectors.items()}
        xargs = {**self._xargs, **ours, **vectors}
        made: dict[str, Any] = {**self._fields, XARGS: xargs, "return_token_ids": True}
        if self.asked.is_named:
            made["stream"] = True
            made["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(made)


def read_request(body: bytes, limits: Limits) -> ScoredRequest | None:
    """RequestError if the request asks for what cannot be given."""
    if not may_have_fields(body):
        return None
    try:
        fields = decode_body(body)
    except UNREADABLE:
        _refuse_lax_json(body)
        return None
    steering_vectors = steering_vector_fields(fields)
    if KEY not in fields and not steering_vectors:
        return None
    asked = _read_options(fields.pop(KEY, msgspec.Raw(b"{}")))
    _check_keys(_without_vectors(asked.steer, body))
    _check_supported(fields, limits)
    fields = {name: raw for name, raw in fields.items() if name not in FIELD_PHASES}
    keeps_token_ids = is_true(fields.get("return_token_ids"))
    return ScoredRequest(asked, keeps_token_ids, fields, steering_vectors, _read_xargs(fields))


def _refuse_lax_json(body: bytes) -> None:
    """It is no JSON, and upstream will say so; unless vLLM's laxer parser finds our key in it."""
    try:
        lax = json.loads(body)
    except (ValueError, RecursionError):
        return
    if isinstance(lax, dict) and {KEY, *FIELD_PHASES} & lax.keys():
        raise RequestError("the body is not strict JSON in UTF-8; leave out NaN and Infinity")


def _without_vectors(steer: msgspec.Raw, body: bytes) -> bytes:
    """The body without megabytes of vectors; the engine looks through those itself."""
    if len(steer) < LARGE_BYTES:
        return body
    given = bytes(steer)
    # Its beginning is looked for, as looking for all of it costs more than reading it.
    at = body.find(given[:_HEAD_BYTES])
    is_found = at >= 0 and body.startswith(given, at)
    return body[:at] + b"0" + body[at + len(given) :] if is_found else body


def _check_keys(body: bytes) -> None:
    """RequestError for a key that is there twice, where it concerns us: parsers differ in which
    one counts."""
    pairs = json.loads(body, object_pairs_hook=list)
    _check_unique(pairs, "of the body")
    for name, value in pairs:
        if name in (KEY, XARGS):
            _check_within(value, name)


def _check_within(value: Any, name: str) -> None:
    """An object is a list of pairs here, which no list of JSON is."""
    if not isinstance(value, list):
        return
    is_object = bool(value) and isinstance(value[0], tuple)
    if is_object:
        _check_unique(value, f"under {name}")
    for one in value:
        _check_within(one[1] if is_object else one, name)


def _check_unique(pairs: list[tuple[str, Any]], where: str) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise RequestError(f"a key {where} is there twice; send each once")


def _read_options(raw: msgspec.Raw) -> ClairaiOptions:
    try:
        asked = _ASKED.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(f"clairai: {str(error)[:200]}") from None
    if bytes(memoryview(asked.steer)[:1]) != b"[":
        raise RequestError("clairai: steer must be a list of entries")
    if asked.names is not None and len(set(asked.names)) < len(asked.names):
        raise RequestError("clairai.probes names a probe twice; name each once")
    return asked


def _read_xargs(fields: BodyFields) -> BodyFields:
    try:
        found = _XARGS_OBJECT.decode(fields.get(XARGS, b"null"))
    except msgspec.ValidationError:
        raise RequestError("vllm_xargs must be an object") from None
    if found is None:
        return {}
    for name in (KEY, *FIELD_PHASES):
        if name in found:
            raise RequestError(
                f"the request has both fields of ours and {name} in vllm_xargs; "
                "send all of ours beside it"
            )
    return dict(found)


def _check_supported(fields: BodyFields, limits: Limits) -> None:
    """Refuse what would be answered with other tokens or other text because scores were asked."""
    count = decode_value(fields.get("n"))
    if isinstance(count, int) and count > limits.choices:
        raise RequestError(f"n is {quote(count)}, scored requests have at most {limits.choices}")
    if is_true(fields.get("use_beam_search")):
        raise RequestError("beams are not scored; leave out use_beam_search, or clairai")
    if is_true(fields.get("echo")) and not is_true(fields.get("return_token_ids")):
        raise RequestError(
            "vLLM gives no echoed text beside token ids, which scores need; ask for "
            "clairai.prompt_scores instead of echo, or set return_token_ids too"
        )
    if "include_reasoning" in fields and not is_true(fields["include_reasoning"]):
        raise RequestError(
            "include_reasoning=false hides the token ids that scores are told by; leave it out"
        )
    prompt = decode_value(fields.get("prompt"))
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise RequestError(f"{len(prompt)} prompts in one request; send one prompt in each")
