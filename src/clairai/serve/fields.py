"""Takes every completion request on its way into vLLM; stops one whose clairai fields are wrong.

The engine core refuses such a request too, but vLLM tells the client only "Internal server error"
(_raise_if_error, entrypoints/generate/base/serving.py, 0.32:207). Here the reason can be given.
Runs in the API server, behind vLLM's key check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai import wanted
from clairai.errors import RequestError

Refuse = Callable[[RequestError], ASGIApp]
IsOn = Callable[[Any], bool]
_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class _Body(msgspec.Struct):
    """The parts of a request that can concern us; everything else is skipped unread."""

    vllm_xargs: dict[str, Any] | None = None
    clairai: Any = None


_DECODER: Final = msgspec.json.Decoder(_Body)


def check(body: bytes) -> None:
    """RequestError if the engine would refuse the fields; what is not ours to judge passes."""
    if wanted.KEY.encode() not in body:
        return
    try:
        request = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # vLLM says what is wrong with it
    if request.clairai is not None:
        raise RequestError(
            "vLLM itself does not read a `clairai` field; "
            'give it as "vllm_xargs": {"clairai": "{...}"}'
        )
    wanted.parse(request.vllm_xargs)


class FieldCheck:
    """ASGI middleware: reads the body once and hands it on unaltered."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse, is_on: IsOn) -> None:
        self._app = app
        self._refuse = refuse
        self._is_on = is_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_completion(scope) or not self._is_on(scope["app"]):
            return await self._app(scope, receive, send)
        messages = await _whole(receive)
        try:
            check(b"".join(message.get("body", b"") for message in messages))
        except RequestError as error:
            return await self._refuse(error)(scope, receive, send)
        return await self._app(scope, _replayed(messages, receive), send)


def _is_completion(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in _PATHS


async def _whole(receive: Receive) -> list[Message]:
    """All messages of the body, or all that came before the client hung up."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def again() -> Message:
        # After the body vLLM listens here for the client to hang up.
        message = next(left, None)
        return await receive() if message is None else message

    return again
