"""The `clairai` fields of a request: parsed, checked and written.

Runs in: the caller's process (`clairai.request`), the API server, and the engine core, which
trusts no caller.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clairai.errors import RequestError, quote
from clairai.fields.capture import CaptureSpec, parse_capture
from clairai.fields.json_fields import decode_json
from clairai.fields.rules import StopRule, parse_rules
from clairai.fields.steer import MAX_ENTRIES, SteerEntry, parse_entries
from clairai.fields.steering_vectors import FIELD_PHASES, parse_steering_vectors

KEY: Final = "clairai"
MAX_STREAM: Final = 2**64 - 1
MAX_LABEL: Final = 128
# Of a request to the API server whose stream id was drawn for it alone (`new_stream_id`): the core
# will not refuse it as used, so the response need not wait until the core has admitted it.
FRESH_STREAM_HEADER: Final = "X-Clairai-Fresh-Stream"
_KNOWN: Final = ("stream", "prompt_scores", "steer", "stop", "capture", "label", "owner", "drawn")
_OWNER: Final = re.compile(r"[a-z0-9._-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class RequestFields:
    """What one request asks of clairai."""

    stream: int | None = None
    prompt_scores: bool = False
    steer: tuple[SteerEntry, ...] = ()
    stop: tuple[StopRule, ...] = ()
    capture: CaptureSpec | None = None  # None: the request does not say
    label: str | None = None  # the caller's own name for the request, which decides nothing
    owner: str | None = None  # name of the API key that sent it; the proxy says so
    drawn: bool = False  # `stream` was drawn for it alone: the proxy or the API server says so

    def __post_init__(self) -> None:
        if self.stream is not None and (
            type(self.stream) is not int or not 1 <= self.stream <= MAX_STREAM
        ):
            raise RequestError(
                f"stream must be a whole number from 1 to 2**64 - 1, got {quote(self.stream)}; "
                f"leave it out to have one made"
            )
        if type(self.prompt_scores) is not bool:
            raise RequestError(
                f"prompt_scores must be true or false, got {quote(self.prompt_scores)}"
            )
        if type(self.drawn) is not bool:
            raise RequestError(f"drawn must be true or false, got {quote(self.drawn)}")
        if self.label is not None and not is_label(self.label):
            raise RequestError(
                f"label must be 1 to {MAX_LABEL} printable characters, got {quote(self.label)}"
            )
        if self.owner is not None and not is_owner(self.owner):
            raise RequestError(f"owner must be the name of an API key, got {quote(self.owner)}")

    def to_json(self) -> dict[str, Any]:
        """What `parse_fields` reads as equal fields."""
        fields: dict[str, Any] = {"prompt_scores": True} if self.prompt_scores else {}
        if self.stream is not None:
            fields["stream"] = self.stream
        if self.drawn:
            fields["drawn"] = True
        if self.steer:
            fields["steer"] = [entry.to_json() for entry in self.steer]
        if self.stop:
            fields["stop"] = [rule.to_json() for rule in self.stop]
        if self.capture is not None:
            fields["capture"] = self.capture.to_json()
        named = {"label": self.label, "owner": self.owner}
        return fields | {name: value for name, value in named.items() if value is not None}


def is_label(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_LABEL and value.isprintable()


def is_owner(value: object) -> bool:
    """True for what can be the name of an API key."""
    return isinstance(value, str) and _OWNER.fullmatch(value) is not None


def request(
    *,
    stream: int | None = None,
    prompt_scores: bool = False,
    steer: Sequence[Mapping[str, Any]] = (),
    stop: Sequence[Mapping[str, Any]] = (),
    capture: bool | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`extra_args` for vLLM's SamplingParams.

    `stream` names the request to readers of the ring: a 64-bit number that no other unfinished
    request uses; without it the engine makes one. `prompt_scores` has the whole prompt forwarded,
    even where the prefix cache could serve it, so that every prompt token is scored. `steer` and
    `stop` are described in docs/steering.md; a `vector` may be a Vector, which then travels with
    the request. `capture` is described in docs/capture.md: True captures what the engine's setting
    says, False nothing.
    """
    entries, rules = parse_entries(steer, what="steer"), parse_rules(stop, what="stop")
    fields = RequestFields(stream, prompt_scores, entries, rules, parse_capture(capture))
    return {KEY: fields.to_json()}


def decode_fields(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our fields among a request's extra arguments, with JSON text decoded.

    vLLM's HTTP API passes each of them as text, under `vllm_xargs`.
    """
    extra = extra_args or {}
    found: dict[str, Any] = {KEY: _decode(f"the {KEY} field", extra.get(KEY, {}))}
    for name in FIELD_PHASES:
        if extra.get(name) is not None:
            found[name] = _decode(name, extra[name])
    return found


def parse_fields(extra_args: Mapping[str, Any] | None) -> RequestFields:
    """The `clairai` object, and the `steering_vectors` fields beside it, as objects or as text."""
    decoded = decode_fields(extra_args)
    given = decoded[KEY]
    if not isinstance(given, dict):
        raise RequestError(f"the clairai field must be an object, got {type(given).__name__}")
    unknown = next((key for key in given if key not in _KNOWN), None)
    if unknown is not None:
        raise RequestError(
            f"unknown clairai request field {quote(unknown)}; known: {', '.join(_KNOWN)}"
        )
    entries = parse_entries(given.get("steer", ()), what="steer")
    for name in FIELD_PHASES:
        if name in decoded:
            entries += parse_steering_vectors(decoded[name], what=name)
    if len(entries) > MAX_ENTRIES:
        raise RequestError(
            f"steer and steering_vectors together: over {MAX_ENTRIES} entries; give fewer"
        )
    rules = parse_rules(given.get("stop", ()), what="stop")
    capture = parse_capture(given.get("capture"))
    return RequestFields(**{**given, "steer": entries, "stop": rules, "capture": capture})


def new_stream_id() -> int:
    return secrets.randbelow(MAX_STREAM) + 1


def _decode(what: str, given: object) -> Any:
    return decode_json(given, what=what) if isinstance(given, str) else given
