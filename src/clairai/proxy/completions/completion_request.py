"""Reads what a completion request asks of clairai, and makes the body that upstream gets.

A body without the key `clairai`, and without those of `fields/steering_vectors.py`, goes upstream
byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from clairai.errors import RequestError, quote
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
    # The engine decodes and judges entries and rules; vectors among them take megabytes.
    steer: msgspec.Raw = _NONE
    stop: list[Any] = []
    capture: bool | dict[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The probes in the order of the request; None for the whole bank."""
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


_OPTIONS: Final = msgspec.json.Decoder(ClairaiOptions)


@dataclass(frozen=True)
class ScoredRequest:
    """A completion request that asks something of clairai."""

    options: ClairaiOptions
    keeps_token_ids: bool  # the client asked for token ids itself
    _fields: BodyFields  # without ours
    _steering_vectors: BodyFields
    _xargs: BodyFields

    @property
    def is_steered(self) -> bool:
        rules = (rule for rule in self.options.stop if isinstance(rule, dict))
        has_steering_rule = any(rule.get("steer") for rule in rules)
        return has_steering_rule or self.options.is_steered or bool(self._steering_vectors)

    @property
    def needs_echo(self) -> bool:
        """True if an engine without clairai would silently leave out what is asked."""
        return self.is_steered or bool(self.options.stop) or self.options.is_captured

    def body(self, stream: int) -> bytes:
        """What upstream gets; fields that are not ours keep their bytes."""
        options = self.options
        asked: dict[str, Any] = {"stream": stream}
        asked |= {"prompt_scores": True} if options.prompt_scores else {}
        asked |= {"steer": options.steer} if options.is_steered else {}
        asked |= {"stop": options.stop} if options.stop else {}
        asked |= {} if options.capture is None else {"capture": options.capture}
        ours = {KEY: msgspec.json.encode(asked).decode()}
        vectors = {name: bytes(raw).decode() for name, raw in self._steering_vectors.items()}
        xargs = {**self._xargs, **ours, **vectors}
        fields: dict[str, Any] = {**self._fields, XARGS: xargs, "return_token_ids": True}
        if options.is_named:
            fields["stream"] = True
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)


def read_request(body: bytes, limits: Limits) -> ScoredRequest | None:
    """None if the request asks nothing of clairai; RequestError if it asks the impossible."""
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
    options = _read_options(fields.pop(KEY, msgspec.Raw(b"{}")))
    _check_keys(_without_vectors(options.steer, body))
    _check_supported(fields, limits)
    fields = {name: raw for name, raw in fields.items() if name not in FIELD_PHASES}
    keeps_token_ids = is_true(fields.get("return_token_ids"))
    return ScoredRequest(options, keeps_token_ids, fields, steering_vectors, _read_xargs(fields))


def _refuse_lax_json(body: bytes) -> None:
    """Refuse a body that only vLLM's laxer parser reads, if it has a key of ours.

    Any other body that is not JSON goes upstream, which refuses it.
    """
    try:
        lax = json.loads(body)
    except (ValueError, RecursionError):
        return
    if isinstance(lax, dict) and {KEY, *FIELD_PHASES} & lax.keys():
        raise RequestError("the body is not strict JSON in UTF-8; leave out NaN and Infinity")


def _without_vectors(steer: msgspec.Raw, body: bytes) -> bytes:
    """The body without megabytes of vectors, whose keys the engine checks itself."""
    if len(steer) < LARGE_BYTES:
        return body
    given = bytes(steer)
    # Searching for all of it would cost more than reading it, so only its beginning is searched.
    at = body.find(given[:_HEAD_BYTES])
    is_found = at >= 0 and body.startswith(given, at)
    return body[:at] + b"0" + body[at + len(given) :] if is_found else body


def _check_keys(body: bytes) -> None:
    """RequestError if a key that concerns us occurs twice: parsers differ in which one counts."""
    pairs = json.loads(body, object_pairs_hook=list)
    _check_unique(pairs, "of the body")
    for name, value in pairs:
        if name in (KEY, XARGS):
            _check_within(value, name)


def _check_within(value: Any, name: str) -> None:
    """Objects are lists of pairs here; a pair is a tuple, which decoded JSON has nowhere else."""
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
        options = _OPTIONS.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(f"clairai: {str(error)[:200]}") from None
    if bytes(memoryview(options.steer)[:1]) != b"[":
        raise RequestError("clairai: steer must be a list of entries")
    if options.names is not None and len(set(options.names)) < len(options.names):
        raise RequestError("clairai.probes names a probe twice; name each once")
    return options


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
                f"the request has fields of clairai both beside vllm_xargs and in it ({name}); "
                "send all of them beside it"
            )
    return dict(found)


def _check_supported(fields: BodyFields, limits: Limits) -> None:
    """Refuse a request whose answer would change because scores are asked for."""
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
        raise RequestError("include_reasoning=false hides token ids that scores need; leave it out")
    prompt = decode_value(fields.get("prompt"))
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        raise RequestError(f"{len(prompt)} prompts in one request; send one prompt in each")
