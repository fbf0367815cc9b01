"""Takes a request's clairai fields, from wherever they came; gives them checked, with a stream id.

Runs in the caller's process (`clairai.request`) and in the engine core, which trusts no caller.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Final

from clairai.errors import RequestError
from clairai.points import quote

KEY: Final = "clairai"
MAX_STREAM: Final = 2**64 - 1
_MAX_TEXT: Final = 4096
_KNOWN: Final = ("stream", "prompt_scores")


@dataclass(frozen=True)
class Wanted:
    """What one request asks of clairai."""

    stream: int | None = None
    prompt_scores: bool = False

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


def request(*, stream: int | None = None, prompt_scores: bool = False) -> dict[str, Any]:
    """`extra_args` for vLLM's SamplingParams.

    `stream` names the request to readers of the ring: a 64-bit number that no other unfinished
    request uses; without it the engine makes one. `prompt_scores` has the whole prompt forwarded,
    also where the prefix cache could have served it, so that every prompt token is scored.
    """
    wanted = Wanted(stream, prompt_scores)
    fields: dict[str, Any] = {"prompt_scores": True} if wanted.prompt_scores else {}
    if wanted.stream is not None:
        fields["stream"] = wanted.stream
    return {KEY: fields}


def parse(extra_args: dict[str, Any] | None) -> Wanted:
    """The clairai fields of a request: an object, or its JSON text (vLLM's HTTP `vllm_xargs`)."""
    given = (extra_args or {}).get(KEY, {})
    if isinstance(given, str):
        given = _from_text(given)
    if not isinstance(given, dict):
        raise RequestError(f"the clairai field must be an object, got {type(given).__name__}")
    unknown = sorted(map(quote, set(given) - set(_KNOWN)))
    if unknown:
        raise RequestError(
            f"unknown clairai request field {unknown[0]}; known: {', '.join(_KNOWN)}"
        )
    return Wanted(**given)


def mint() -> int:
    return secrets.randbelow(MAX_STREAM) + 1


def _from_text(text: str) -> Any:
    if len(text) > _MAX_TEXT:
        raise RequestError(f"the clairai field is {len(text)} characters long, at most {_MAX_TEXT}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the clairai field is text, but not JSON") from None
