"""Takes vLLM's answer to GET /v1/models; gives it with the version of the weights that serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.server.weight_versions import WeightVersions

MODELS: Final = "/v1/models"
_CARDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CARD: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class HasWeightVersions(Protocol):
    """The engine core, as it is seen from here."""

    weight_versions: WeightVersions


class ModelCards:
    """ASGI middleware: each model of the list says of which weights it is."""

    def __init__(self, app: ASGIApp, *, core_of: Callable[[Any], HasWeightVersions | None]) -> None:
        self._app = app
        self._core_of = core_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._core_of(scope["app"]) if _is_list(scope) else None
        if core is None:
            await self._app(scope, receive, send)
            return
        held: list[Message] = []

        async def holding(message: Message) -> None:
            held.append(message)

        await self._app(scope, receive, holding)
        for message in await _add_versions(held, core.weight_versions):
            await send(message)


async def _add_versions(held: list[Message], weight_versions: WeightVersions) -> list[Message]:
    if held[0].get("status") != 200:  # the key is missing, or the engine is gone
        return held
    state = await weight_versions.state()
    if state is None:
        return held
    about = {"version": state.version, "label": state.label, "digest": state.digest}
    body = _with_weights(b"".join(one.get("body", b"") for one in held[1:]), about)
    MutableHeaders(scope=held[0])["content-length"] = str(len(body))
    return [held[0], {"type": "http.response.body", "body": body, "more_body": False}]


def _with_weights(body: bytes, about: dict[str, Any]) -> bytes:
    """Every other byte of a card stays as it was."""
    fields: dict[str, Any] = _CARDS.decode(body)
    cards: list[dict[str, Any]] = _CARD.decode(fields["data"])
    return msgspec.json.encode(
        {**fields, "data": [{**card, "clairai": {"weights": about}} for card in cards]}
    )


def _is_list(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    return bool(scope["path"].removeprefix(scope.get("root_path", "")) == MODELS)
