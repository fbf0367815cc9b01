"""Middleware that adds the version of the serving weights to vLLM's answer to GET /v1/models.

Runs in: the API server.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.server.engine_rpc import find_engine
from clairai.server.weight_versions import WeightVersions

MODELS_PATH: Final = "/v1/models"
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CARDS: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class ModelCards:
    """ASGI middleware: each model of the list names its weights."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = find_engine(scope["app"]) if _is_model_list(scope) else None
        if engine is None:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, collect)
        for message in await _add_weights(messages, engine.weight_versions):
            await send(message)


async def _add_weights(messages: list[Message], versions: WeightVersions) -> list[Message]:
    if messages[0].get("status") != 200:  # the key is missing, or the engine is gone
        return messages
    state = await versions.state()
    if state is None:
        return messages
    weights = {"version": state.version, "label": state.label, "digest": state.digest}
    body = _with_weights(b"".join(one.get("body", b"") for one in messages[1:]), weights)
    MutableHeaders(scope=messages[0])["content-length"] = str(len(body))
    return [messages[0], {"type": "http.response.body", "body": body, "more_body": False}]


def _with_weights(body: bytes, weights: dict[str, Any]) -> bytes:
    """Every other byte of a card stays as it was."""
    fields: dict[str, Any] = _OBJECT.decode(body)
    cards: list[dict[str, Any]] = _CARDS.decode(fields["data"])
    return msgspec.json.encode(
        {**fields, "data": [{**card, "clairai": {"weights": weights}} for card in cards]}
    )


def _is_model_list(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    return bool(scope["path"].removeprefix(scope.get("root_path", "")) == MODELS_PATH)
