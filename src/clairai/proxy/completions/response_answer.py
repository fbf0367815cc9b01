"""Reads the answers of OpenAI's Responses API, and adds scores to them.

vLLM (0.32) tells the token ids of a response only at its end, as `input_messages` and
`output_messages`, and only if `enable_response_messages` asks for them
(entrypoints/openai/responses/serving.py:816). Until then rows are held. Runs in: the proxy, on the
event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

import aiohttp
import msgspec

from clairai.errors import UnsupportedError
from clairai.proxy.completions.chunk import ChoiceView, ChunkView
from clairai.proxy.completions.error_frames import RESPONSES, write_error_frame
from clairai.proxy.completions.merger import MAX_FRAME_BYTES
from clairai.proxy.completions.request_scores import RequestScores
from clairai.proxy.completions.sse import FrameSplitter, FrameTooLong, frame_data
from clairai.proxy.completions.stream_writers import OpenAIStreamWriter
from clairai.proxy.upstream import UpstreamGone, decode_answer
from clairai.proxy.upstream_connection import ResponseContent

_NULL: Final = msgspec.Raw(b"null")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES: Final = ("input_messages", "output_messages")
_BEGIN: Final = b"event: response.created\n"
_ENDS: Final = (b"event: response.completed\n", b"event: response.incomplete\n")
# OpenAI's status of a response, as the finish reason of a choice.
_FINISH_REASONS: Final = {"completed": "stop", "incomplete": "length"}


class NoTokenIds(UpstreamGone):
    """Upstream does not tell the tokens of a response, without which no score finds its own."""

    code = UnsupportedError.code
    message = (
        "the engine does not tell the tokens of this response, so that it cannot be scored; ask "
        "/v1/chat/completions, or leave out clairai"
    )


class _Message(msgspec.Struct):
    tokens: list[int] | None = None


class _ResponseView(msgspec.Struct):
    """The fields of a response that the proxy reads."""

    id: str | None = None
    model: str | None = None
    status: str | None = None
    input_messages: list[_Message] | None = None
    output_messages: list[_Message] | None = None
    clairai: msgspec.Raw = _NULL

    def token_ids(self) -> tuple[list[int], list[int]]:
        """Of the prompt and of the answer."""
        found = [_one_message(one) for one in (self.input_messages, self.output_messages)]
        prompt, answer = found
        if prompt is None or answer is None:
            raise NoTokenIds
        return prompt, answer


def _one_message(messages: list[_Message] | None) -> list[int] | None:
    """None unless it is the whole as one message; an answer without a token has none."""
    if messages is None or len(messages) > 1:
        return None
    return messages[0].tokens if messages else []


class _Event(msgspec.Struct):
    response: _ResponseView
    clairai: msgspec.Raw = _NULL


class ResponseAnswer:
    """One response: its tokens go to `scores`, and their scores into the response."""

    def __init__(self, scores: RequestScores, writer: OpenAIStreamWriter) -> None:
        self._scores = scores
        self._writer = writer
        self._choice = ChoiceView()

    def read(self, body: bytes) -> None:
        """Read a whole response; UpstreamGone if its tokens are not in it."""
        view = decode_answer(body, _ResponseView, what="/v1/responses")
        self._read(view, view.clairai)

    def write(self, body: bytes) -> bytes:
        """The response with its scores, and with token ids only if they were asked for."""
        fields: dict[str, Any] = _FIELDS.decode(body)
        if not self._writer.keeps_token_ids:
            fields |= {name: None for name in _MESSAGES if name in fields}
        return msgspec.json.encode({**fields, **self._writer.take_fields(self._choice)})

    def _read(self, view: _ResponseView, echo: msgspec.Raw) -> None:
        prompt_ids, token_ids = view.token_ids()
        finish_reason = _FINISH_REASONS.get(view.status or "", view.status or "stop")
        self._choice = ChoiceView(token_ids=token_ids, finish_reason=finish_reason)
        self._scores.read_response(
            ChunkView(view.id, view.model, [self._choice], prompt_ids, clairai=echo)
        )
        self._scores.read_choice(self._choice)


class ResponseStream(ResponseAnswer):
    """The same of a stream, whose last event has the response."""

    def __init__(self, scores: RequestScores, writer: OpenAIStreamWriter) -> None:
        super().__init__(scores, writer)
        self._num_frames = 0

    def is_last(self, frame: bytes) -> bool:
        """Read a frame; True for the last one, which `write_last` writes when rows are there."""
        self._num_frames += 1
        if frame.startswith(_BEGIN):
            event = self._decode(frame)
            view = ChunkView(event.response.id, event.response.model, [self._choice])
            view.clairai = event.clairai
            self._scores.read_response(view)
        if not frame.startswith(_ENDS):
            return False
        event = self._decode(frame)
        self._read(event.response, event.clairai)
        return True

    def write_last(self, frame: bytes) -> bytes:
        name = frame.partition(b"\n")[0]
        fields: dict[str, Any] = _FIELDS.decode(frame_data(frame) or b"{}")
        fields["response"] = msgspec.Raw(self.write(bytes(fields["response"])))
        return name + b"\ndata: " + msgspec.json.encode(fields) + b"\n\n"

    def write_error(self, gone: UpstreamGone) -> bytes:
        """The event `error`, as OpenAI's clients read it; then it is the last event."""
        return write_error_frame(RESPONSES, gone.code, gone.message, number=self._num_frames)

    def _decode(self, frame: bytes) -> _Event:
        return decode_answer(frame_data(frame) or b"", _Event, what="/v1/responses")


async def read_frames(content: ResponseContent) -> AsyncGenerator[bytes, None]:
    """The frames of a stream; UpstreamGone if it breaks off."""
    splitter = FrameSplitter(MAX_FRAME_BYTES)
    try:
        while raw := await content.readany():
            for frame in splitter.feed(raw):
                yield frame
    except (aiohttp.ClientError, FrameTooLong, OSError) as error:
        raise UpstreamGone(type(error).__name__) from error
