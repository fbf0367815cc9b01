"""The last frame of a stream that cannot go on, as the clients of each API read it.

OpenAI's clients of chats and completions look for `error` in the data, those of /v1/responses and
Anthropic's for an event of that name, and skip what has none.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from clairai.proxy.completions.sse import data_frame

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"


def write_error_frame(
    path: str, code: str, message: str, *, number: int = 0, is_named: bool = False
) -> bytes:
    """`number` is that of the frames before it, `is_named` true for the events of a named run."""
    about = {"type": "server_error", "param": None, "code": code}
    fields: dict[str, Any] = {"error": {"message": message, **about}}
    if is_named:
        return _event(fields)
    if path == MESSAGES:  # as vLLM writes it: anthropic/serving.py, 0.32
        return _event({"type": "error", "error": {"type": code, "message": message}})
    if path == RESPONSES:
        # `error` besides OpenAI's own fields: its clients raise for that, and hand out the rest as
        # one event among others.
        own = {"code": code, "message": message, "param": None, "sequence_number": number}
        return _event({"type": "error", **own, **fields})
    return data_frame(msgspec.json.encode(fields))


def _event(fields: dict[str, Any]) -> bytes:
    return b"event: error\n" + data_frame(msgspec.json.encode(fields))
