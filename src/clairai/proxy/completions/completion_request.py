"""Reads what a completion request asks of clairai, and makes the body that upstream gets.

A body without the key `clairai`, and without those of `fields/steering_vectors.py`, goes upstream
byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import msgspec

from clairai.errors import RequestError, printable, quote
from clairai.fields.request_body import (
    OUR_KEYS,
    UNREADABLE,
    XARGS,
    BodyFields,
    check_json,
    check_unique_keys,
    checked_keys,
    decode_body,
    may_have_fields,
    move_beside,
    read_count,
    read_flag,
    steering_vector_fields,
)
from clairai.fields.request_fields import KEY, MAX_LABEL, is_label
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.fields.turns import end_step
from clairai.proxy.proxy_settings import Limits

_MAX_NAMES: Final = 2048
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Names = Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=_MAX_NAMES)]
_XARGS_OBJECT: Final = msgspec.json.Decoder(BodyFields | None)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_LIST_OF_MANY: Final = re.compile(rb"\[[ \t\r\n]*+[\[\"]")
_WHITESPACE: Final = b" \t\r\n"
_MAX_EMPTY: Final = 64  # bytes of a list that may be empty
_Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]
_NONE: Final = msgspec.Raw(b"[]")
_NULL: Final = msgspec.Raw(b"null")
SCORES_HEADER: Final = "X-Clairai-Scores"
MAX_ID: Final = 256  # characters of an answer's id


class _RuleOutline(msgspec.Struct, frozen=True):
    """What the proxy has to know of a rule, which the engine judges."""

    probe: Any = None
    steer: msgspec.Raw = _NULL


_RULES: Final = msgspec.json.Decoder(list[_RuleOutline])


class _ToolOutline(msgspec.Struct):
    type: str = ""


_TOOLS: Final = msgspec.json.Decoder(list[_ToolOutline] | None)
_OWN_TOOLS: Final = ("function", "custom")  # the client runs these, between two requests


class ClairaiOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object under the key `clairai`."""

    probes: Literal["all"] | _Names = "all"
    prompt_scores: bool = False
    events: Literal["named"] | None = None
    # The engine gets these as they were sent, and judges them; vectors among them take megabytes.
    steer: msgspec.Raw = _NONE
    stop: msgspec.Raw = _NONE
    capture: msgspec.Raw = _NULL
    # The client's own name for the request; the id under which rows are found is the proxy's.
    label: _Label | None = None
    stream: Annotated[int, msgspec.Meta(ge=0)] | None = None  # a label too

    @property
    def own_label(self) -> str | None:
        return self.label if self.stream is None else str(self.stream)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The probes in the order of the request; None for the whole bank."""
        return None if self.probes == "all" else tuple(self.probes)

    @property
    def is_named(self) -> bool:
        return self.events == "named"

    @property
    def has_rules(self) -> bool:
        return not _is_empty(self.stop)

    @property
    def rule_probes(self) -> frozenset[str]:
        return frozenset(rule.probe for rule in self._rules() if isinstance(rule.probe, str))

    @property
    def is_steered(self) -> bool:
        if not _is_empty(self.steer):
            return True
        return any(not _is_empty(rule.steer) for rule in self._rules())

    @property
    def is_captured(self) -> bool:
        if self.capture is _NULL:
            return False
        return bytes(memoryview(self.capture)[:5]) not in (b"null", b"false")

    def without_vectors(self) -> ClairaiOptions:
        """What is needed while the request is answered; the rest may be megabytes of its body."""
        if self.steer is _NONE and self.stop is _NONE and self.capture is _NULL:
            return self  # it holds nothing of the body
        rules = [{"probe": probe} for probe in sorted(self.rule_probes)]
        stop = msgspec.Raw(msgspec.json.encode(rules))
        return msgspec.structs.replace(self, steer=_NONE, stop=stop, capture=_NULL)

    def _rules(self) -> list[_RuleOutline]:
        if not self.has_rules:
            return []
        try:
            return _RULES.decode(self.stop)
        except UNREADABLE:
            return []  # the engine says what is wrong with them


_OPTIONS: Final = msgspec.json.Decoder(ClairaiOptions)


def _is_empty(raw: msgspec.Raw) -> bool:
    if raw is _NONE or raw is _NULL:
        return True
    given = bytes(raw) if len(raw) <= _MAX_EMPTY else b""
    return given.translate(None, _WHITESPACE) in (b"[]", b"null")


@dataclass(frozen=True)
class RequestKind:
    """A route of completions: which flag has vLLM tell token ids, and what can be scored there."""

    token_ids_flag: str
    _check: Callable[[BodyFields, ClairaiOptions, Limits], None]

    def check(self, fields: BodyFields, options: ClairaiOptions, limits: Limits) -> None:
        """RequestError if scores would change the answer, or cannot be matched to its tokens."""
        self._check(fields, options, limits)
        read_flag(fields, self.token_ids_flag)  # keeps_token_ids reads it, when it is too late


def _check_completion(fields: BodyFields, options: ClairaiOptions, limits: Limits) -> None:
    del options
    _check_supported(fields, limits)


def _check_response(fields: BodyFields, options: ClairaiOptions, limits: Limits) -> None:
    del limits
    if options.is_named:
        raise RequestError("named events are for chats and completions; leave out clairai.events")
    if read_flag(fields, "background"):
        raise RequestError("a response in the background is not scored; leave out background")
    if len(fields.get("request_id", b"")) > MAX_ID:
        raise RequestError(f"request_id may have {MAX_ID} characters; give a shorter one, or none")
    try:
        tools = _TOOLS.decode(fields.get("tools", b"[]")) or []
    except UNREADABLE:
        return  # vLLM refuses them
    builtin = next((tool.type for tool in tools if tool.type not in _OWN_TOOLS), None)
    if builtin is not None:
        raise RequestError(
            f"a response that calls tools on the server ({quote(builtin)}) makes several requests "
            "in the engine, which are not scored; give functions, or leave out clairai"
        )


COMPLETION: Final = RequestKind("return_token_ids", _check_completion)
RESPONSE: Final = RequestKind("enable_response_messages", _check_response)


@dataclass(frozen=True)
class ScoredRequest:
    """A completion request that asks something of clairai."""

    options: ClairaiOptions
    kind: RequestKind
    _fields: BodyFields  # without ours
    _steering_vectors: BodyFields
    _xargs: BodyFields
    shows_scores: bool = True  # in the answer itself; else they are only kept

    @property
    def keeps_token_ids(self) -> bool:
        """True if the client asked for token ids itself."""
        return read_flag(self._fields, self.kind.token_ids_flag) is True

    @cached_property
    def is_steered(self) -> bool:
        return self.options.is_steered or bool(self._steering_vectors)

    @property
    def features(self) -> tuple[str, ...]:
        """What it asks of clairai, by the names that metrics have for it."""
        options = self.options
        asked = {
            "scores": True,
            "prompt_scores": options.prompt_scores,
            "steering": self.is_steered,
            "rules": options.has_rules,
            "capture": options.is_captured,
            "events": options.is_named,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def needs_echo(self) -> bool:
        """True if an engine without clairai would silently leave out what is asked."""
        return self.is_steered or self.options.has_rules or self.options.is_captured

    def body(self, stream: int, owner: str | None = None) -> bytes:
        """What upstream gets; fields that are not ours keep their bytes.

        `stream` was drawn for this request alone. `owner` is the name of the client's API key,
        which no client can say itself.
        """
        options = self.options
        asked: dict[str, Any] = {"stream": stream, "drawn": True}
        asked |= {"prompt_scores": True} if options.prompt_scores else {}
        asked |= {} if _is_empty(options.steer) else {"steer": options.steer}
        asked |= {"stop": options.stop} if options.has_rules else {}
        asked |= {} if bytes(options.capture) == b"null" else {"capture": options.capture}
        asked |= {} if options.own_label is None else {"label": options.own_label}
        asked |= {} if owner is None else {"owner": owner}
        text = msgspec.json.encode(asked)
        end_step()
        ours = {KEY: text.decode()}
        end_step()
        vectors = {name: bytes(raw).decode() for name, raw in self._steering_vectors.items()}
        xargs = {**self._xargs, **ours, **vectors}
        fields: dict[str, Any] = {**self._fields, XARGS: xargs, self.kind.token_ids_flag: True}
        if options.is_named:
            fields["stream"] = True
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)


def read_request(
    body: bytes, limits: Limits, kind: RequestKind = COMPLETION
) -> ScoredRequest | None:
    """None if the request asks nothing of clairai; RequestError if it asks the impossible."""
    bounds = limits.json_bounds
    check_json(body, bounds)
    if not may_have_fields(body) or checked_keys(body, bounds).isdisjoint((*OUR_KEYS, XARGS)):
        return None
    try:
        fields = decode_body(body)
    except UNREADABLE:
        raise RequestError("the body is not strict JSON; leave out NaN and Infinity") from None
    fields = move_beside(fields, bounds)
    steering_vectors = steering_vector_fields(fields)
    if KEY not in fields and not steering_vectors:
        return None
    for name in (KEY, XARGS):
        if name in fields:
            check_unique_keys(fields[name], name, bounds)
    options = _read_options(fields.pop(KEY, msgspec.Raw(b"{}")))
    end_step()
    kind.check(fields, options, limits)
    fields = {name: raw for name, raw in fields.items() if name not in FIELD_PHASES}
    return ScoredRequest(options, kind, fields, steering_vectors, _read_xargs(fields))


def read_scores_header(given: str | None) -> ClairaiOptions | None:
    """What the header asks for: `all`, names of probes with commas between, or `none`."""
    if given is None or given.strip() == "none":
        return None
    names: str | list[str] = "all"
    if given.strip() != "all":
        names = [name.strip() for name in given.split(",")]
    try:
        return _read_options(msgspec.Raw(msgspec.json.encode({"probes": names})))
    except RequestError:
        raise RequestError(
            f"{SCORES_HEADER} must be all, none, or names of probes with commas between, "
            f"each once; got {quote(given)}"
        ) from None


def make_quiet_request(
    body: bytes, options: ClairaiOptions, limits: Limits, kind: RequestKind = COMPLETION
) -> ScoredRequest:
    """A request whose body, already checked, asks nothing of clairai: its answer stays as it is.

    RequestError if it cannot be scored.
    """
    try:
        fields = decode_body(body)
    except UNREADABLE:
        raise RequestError(
            "the body is not an object of strict JSON, so it is not scored"
        ) from None
    kind.check(fields, options, limits)
    return ScoredRequest(options, kind, fields, {}, _read_xargs(fields), shows_scores=False)


def _read_options(raw: msgspec.Raw) -> ClairaiOptions:
    try:
        options = _OPTIONS.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError(f"clairai: {printable(error)}") from None
    if options.steer is not _NONE and _first(options.steer) != b"[":
        raise RequestError("clairai: steer must be a list of entries")
    if options.stop is not _NONE and _first(options.stop) != b"[":
        raise RequestError("clairai: stop must be a list of rules")
    if options.capture is not _NULL and _first(options.capture) not in b"{tfn":
        raise RequestError("clairai: capture must be true, false or an object")
    if options.label is not None and options.stream is not None:
        raise RequestError("clairai: stream is only a label here; give it, or label, and not both")
    if options.own_label is not None and not is_label(options.own_label):
        raise RequestError(f"clairai: label must be 1 to {MAX_LABEL} printable characters")
    if options.names is not None and len(set(options.names)) < len(options.names):
        raise RequestError("clairai.probes names a probe twice; name each once")
    return options


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _read_xargs(fields: BodyFields) -> BodyFields:
    if XARGS not in fields:
        return {}
    try:
        found = _XARGS_OBJECT.decode(fields[XARGS])
    except msgspec.ValidationError:
        raise RequestError("vllm_xargs must be an object") from None
    return dict(found or {})


def _check_supported(fields: BodyFields, limits: Limits) -> None:
    """Refuse a request whose answer would change because scores are asked for."""
    count = read_count(fields, "n")
    if count is not None and count > limits.choices:
        raise RequestError(f"n is {quote(count)}, scored requests have at most {limits.choices}")
    if read_flag(fields, "use_beam_search"):
        raise RequestError("beams are not scored; leave out use_beam_search, or clairai")
    if read_flag(fields, "echo") and not read_flag(fields, "return_token_ids"):
        raise RequestError(
            "vLLM gives no echoed text beside token ids, which scores need; ask for "
            "clairai.prompt_scores instead of echo, or set return_token_ids too"
        )
    if "include_reasoning" in fields and not read_flag(fields, "include_reasoning"):
        raise RequestError("include_reasoning=false hides token ids that scores need; leave it out")
    num_prompts = _count_prompts(fields.get("prompt"))
    if num_prompts > 1:
        raise RequestError(f"{num_prompts} prompts in one request; send one prompt in each")


def _count_prompts(prompt: msgspec.Raw | None) -> int:
    """One prompt may be a list too, of token ids, which are not decoded here."""
    if prompt is None or not _LIST_OF_MANY.match(memoryview(prompt)):
        return 1
    return len(_LIST.decode(prompt))
