"""Takes a reason to say no; gives an answer in OpenAI's shape, with fixed words of our own."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from clairai.errors import ClairaiError


class Refused(Exception):
    """A request that ends in this status, and why; says nothing of paths, addresses or code."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """What an OpenAI client reads the message from."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(error: ClairaiError, *, param: str | None = None) -> Refused:
    """One of our own errors, as the client's mistake that it is."""
    return Refused(HTTPStatus.BAD_REQUEST, error.reason, code=error.code, param=param)


def answer(refused: Refused) -> Response:
    return Response(
        msgspec.json.encode(refused.body),
        refused.status,
        {**refused.headers},
        media_type="application/json",
    )
