"""Middleware that gives a reason to failures whose exception has no text.

Runs in: the API server. vLLM (0.32) answers an exception that it did not expect with the text of it
(entrypoints/serve/exception_handling/handlers/exception.py:14), which an assertion does not have:
the client gets status 500 and an empty message. Here the exception itself is known.
"""

from __future__ import annotations

import traceback
from http import HTTPStatus
from pathlib import PurePath

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ErrorReasons:
    """ASGI middleware: names the kind and the place of an exception without a text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if not has_begun and not str(error).strip():
                await _refusal(error)(scope, receive, send)
            raise  # vLLM's server writes it to its log


def _refusal(error: Exception) -> JSONResponse:
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    about = {"type": "InternalServerError", "param": None, "code": status.value}
    return JSONResponse({"error": {"message": describe(error), **about}}, status)


def describe(error: Exception) -> str:
    """Kind and place of an exception: no path of the machine, and nothing that a client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"the server failed with {type(error).__name__}{where}; its log has more"
