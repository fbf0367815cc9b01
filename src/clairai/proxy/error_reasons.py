"""Gives a reason to errors of upstream that have none.

vLLM (0.32) answers with the text of an exception (create_error_response,
entrypoints/serve/exception_handling/error_response.py:14), which may be empty. A client then reads
"500" and nothing else.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

_FIELDS: Final = msgspec.json.Decoder(dict[str, Any])
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
ERROR_FRAME: Final = b'data: {"error"'
_ERROR_EVENT: Final = b"event: error\ndata: {"


def explain(body: bytes, status: int, request_id: str | None = None) -> bytes:
    """The body of an error, with a reason if it has none; `request_id` is that of vLLM's log."""
    if not body.strip():
        made = {"message": _reason(status, request_id), "type": _kind(status)}
        return msgspec.json.encode({"error": {**made, "param": None, "code": status}})
    try:
        fields = _FIELDS.decode(body)
    except _UNREADABLE:
        return body  # it says something
    error = fields.get("error")
    if not isinstance(error, dict) or str(error.get("message") or "").strip():
        return body
    error["message"] = _reason(status, request_id)
    return msgspec.json.encode(fields)


def explain_frame(frame: bytes, request_id: str | None = None) -> bytes:
    """The same of a frame in a stream, with a name (/v1/messages) or without."""
    if not frame.startswith((ERROR_FRAME, _ERROR_EVENT)):
        return frame
    name, _, data = frame.rstrip().rpartition(b"data: ")
    explained = explain(data, HTTPStatus.INTERNAL_SERVER_ERROR, request_id)
    return frame if explained == data else name + b"data: " + explained + b"\n\n"


def _reason(status: int, request_id: str | None) -> str:
    where = "" if request_id is None else f", under the request id {request_id}"
    return f"vLLM answered with status {status} and gave no reason; its log may have more{where}"


def _kind(status: int) -> str:
    is_server = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return "InternalServerError" if is_server else "BadRequestError"
