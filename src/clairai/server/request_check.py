"""Middleware that refuses completion requests with wrong clairai fields, and says why.

Runs in: the API server, behind vLLM's key check. The engine core refuses such a request too, but
then vLLM does not tell the client why (response_writer.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.errors import ClairaiError, RequestError
from clairai.fields.json_outline import JsonBounds
from clairai.fields.positions import Positions
from clairai.fields.request_body import (
    LARGE_BYTES,
    OUR_KEYS,
    UNREADABLE,
    XARGS,
    BodyFields,
    check_text,
    check_unique_keys,
    decode_body,
    has_our_keys,
    has_value,
    may_have_fields,
    read_flag,
    steering_vector_fields,
)
from clairai.fields.request_fields import (
    FRESH_STREAM_HEADER,
    KEY,
    RequestFields,
    decode_fields,
    new_stream_id,
    parse_fields,
)
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.fields.turns import run_in_turns
from clairai.server import chat_positions
from clairai.server.core_cache import CoreCache
from clairai.server.engine_rpc import (
    EngineRpc,
    RouteRefusal,
    error_response,
    find_engine,
    route_refusal_response,
)
from clairai.server.response_fields import ResponseFields
from clairai.server.response_writer import ResponseWriter
from clairai.server.steering_preview import SteeringPreview, preview_steering

COMPLETION_PATHS: Final = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/chat/completions/batch", "/invocations"),
    )
)
# Routes that read these words in a way of their own.
_OUR_PREFIXES: Final = tuple(
    f"/v1/{name}" for name in ("clairai", "probes", "steering", "captures", "weights")
)
# A part of a form that is named as a field of ours.
_FORM_PART: Final = re.compile(
    rb"name\*?=[\"']?(?:" + b"|".join(name.encode() for name in sorted(OUR_KEYS)) + rb")\b"
)
_BOUNDS: Final = JsonBounds()
_FRESH_STREAM: Final = FRESH_STREAM_HEADER.lower().encode()
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_XARGS_OBJECT: Final = msgspec.json.Decoder(dict[str, Any] | None)


@dataclass(frozen=True)
class CheckedRequest:
    """The body of a completion request, and the clairai fields in it."""

    fields: RequestFields
    body: BodyFields
    xargs: Mapping[str, Any]  # with the steering_vectors fields, wherever they stood
    asked: Mapping[str, Any]  # the `clairai` object
    is_changed: bool  # vLLM must get another body: a field was moved, or positions resolved

    @property
    def is_single(self) -> bool:
        """True if it makes one request in the engine; several would share one stream id."""
        return not any(_has_many(self.body.get(name)) for name in ("prompt", "messages"))

    @property
    def has_our_fields(self) -> bool:
        return not {KEY, *FIELD_PHASES}.isdisjoint(self.xargs)

    @property
    def asks_for_capture(self) -> bool:
        """False does not mean that nothing is captured: the engine's setting may capture all."""
        return self.fields.capture is not None and self.fields.capture.is_wanted

    @property
    def names_messages(self) -> bool:
        capture = self.fields.capture
        return capture is not None and chat_positions.names_messages(capture.positions)

    def with_positions(self, positions: Positions) -> CheckedRequest:
        assert self.fields.capture is not None
        capture = replace(self.fields.capture, positions=positions)
        return replace(self, fields=replace(self.fields, capture=capture), is_changed=True)

    def encode(self, stream: int | None, pins: tuple[str | None, ...]) -> bytes:
        """The body with this stream id, the request's own or one that was drawn for it, and with
        digests for the vectors that are named."""
        asked = dict(self.asked)
        if any(pins):
            # Entries of steering_vectors fields come last and have no name to pin.
            pairs = zip(asked.get("steer", ()), pins, strict=False)
            asked["steer"] = [entry | ({"digest": pin} if pin else {}) for entry, pin in pairs]
        if stream is not None and stream != self.fields.stream:
            asked |= {"stream": stream, "drawn": True}
        if self.fields.capture is not None:
            asked["capture"] = self.fields.capture.to_json()
        xargs = {**self.xargs, KEY: msgspec.json.encode(asked).decode()}
        kept = {name: raw for name, raw in self.body.items() if name not in FIELD_PHASES}
        return msgspec.json.encode({**kept, XARGS: xargs})


def read_completion(raw: bytes) -> CheckedRequest | None:
    """RequestError if our fields are wrong; None if it has none and vLLM may refuse the body."""
    is_ours = has_our_keys(raw, _BOUNDS)
    try:
        body = decode_body(raw)
    except UNREADABLE:
        if is_ours or XARGS.encode() in raw:
            raise RequestError("the body is not strict JSON; leave out NaN and Infinity") from None
        return None
    xargs = _read_xargs(body)
    if has_value(body, KEY):
        raise RequestError(
            "vLLM itself does not read a `clairai` field; "
            'give it as "vllm_xargs": {"clairai": "{...}"}'
        )
    beside = steering_vector_fields(body)
    if twice := beside.keys() & xargs.keys():
        raise RequestError(f"{min(twice)} stands beside vllm_xargs and in it; send it once")
    xargs |= {name: bytes(value).decode() for name, value in beside.items()}
    decoded = decode_fields(xargs)
    fields = parse_fields(decoded)
    request = CheckedRequest(fields, body, xargs, decoded[KEY], bool(beside))
    _check_possible(request)
    return request


def _read_xargs(body: BodyFields) -> dict[str, Any]:
    if XARGS not in body:
        return {}
    check_unique_keys(body[XARGS], XARGS, _BOUNDS)
    try:
        return dict(_XARGS_OBJECT.decode(body[XARGS]) or {})
    except UNREADABLE:
        raise RequestError(f"{XARGS} must be an object of texts and numbers") from None


def refuse_unread_fields(raw: bytes, *, is_form: bool) -> None:
    """RequestError if a route that does not read our fields gets one, and would ignore it."""
    if is_form:
        has_ours = _FORM_PART.search(raw) is not None
    else:
        check_text(raw)
        has_ours = may_have_fields(raw) and has_our_keys(raw, _BOUNDS)
    if has_ours:
        raise RequestError(
            "this route does not read fields of clairai; leave them out, or send the request to "
            "/v1/chat/completions or /v1/completions"
        )


def _check_possible(request: CheckedRequest) -> None:
    """Refuse what vLLM would answer as if our fields were not there."""
    fields = request.fields
    is_bound = bool(fields.steer or fields.stop or request.asks_for_capture)
    if is_bound and read_flag(request.body, "use_beam_search"):
        # Beam search makes requests of its own without extra_args:
        # generate/beam_search/online.py, 0.32:62.
        raise RequestError(
            "beams are neither steered, stopped nor captured; leave out use_beam_search"
        )
    if request.asks_for_capture and not request.is_single:
        raise RequestError(
            "several prompts in one request would be captured as one; send one prompt in each"
        )


def _has_many(raw: msgspec.Raw | None) -> bool:
    """Several prompts or conversations; one prompt's ids, or one's messages, are a list too."""
    try:
        items = _LIST.decode(b"[]" if raw is None else raw)
    except UNREADABLE:
        return False
    return bool(items) and bytes(memoryview(items[0])[:1]) in (b"[", b'"')


class RequestCheck:
    """ASGI middleware: reads the body of a completion request once, and watches its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = _body_kind(scope)
        engine = find_engine(scope["app"]) if kind is not None else None
        if engine is None:
            return await self._app(scope, receive, send)
        messages = await _read_messages(receive)
        raw = b"".join(one.get("body", b"") for one in messages)
        try:
            if kind != "completion":
                await asyncio.to_thread(refuse_unread_fields, raw, is_form=kind == "form")
                return await self._app(scope, _replay(messages, receive), send)
            checked = await _read_and_preview(raw, engine.core_cache)
            if checked is not None and checked[0].asks_for_capture:
                await engine.check_capture()
            if checked is not None and checked[0].names_messages:
                checked = (await self._resolve_messages(checked[0], scope), checked[1])
        except ClairaiError as error:
            return await error_response(error)(scope, receive, send)
        except RouteRefusal as error:  # the engine core does not answer
            return await route_refusal_response(error)(scope, receive, send)
        if checked is None:
            return await self._app(scope, _replay(messages, receive), send)
        return await self._forward(engine, *checked, messages, scope, receive, send)

    async def _resolve_messages(self, request: CheckedRequest, scope: Scope) -> CheckedRequest:
        """Positions of tokens in the place of messages of the chat."""
        capture = request.fields.capture
        assert capture is not None
        assert capture.positions is not None
        path = chat_positions.CHAT_PATH
        if scope["path"].removeprefix(scope.get("root_path", "")) != path:
            raise RequestError(f"only a chat has messages: POST {path}; or give from and to")
        tokenize = chat_positions.tokenize_through(self._app, scope)
        positions = await chat_positions.resolve_messages(capture.positions, request.body, tokenize)
        return request.with_positions(positions)

    async def _forward(
        self,
        engine: EngineRpc,
        request: CheckedRequest,
        preview: SteeringPreview,
        messages: list[Message],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Pass the request to vLLM; add our fields to the response, or the reason of a refusal."""
        asked = request.fields.stream
        stream = new_stream_id() if asked is None and request.is_single else asked
        if stream != asked or request.is_changed or any(preview.pins):
            body = request.encode(stream, preview.pins)
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            scope = {**scope, "headers": _with_length(scope["headers"], len(body))}

        fields = ResponseFields(
            engine,
            stream,
            preview,
            asks_for_capture=request.asks_for_capture,
            label=request.fields.label,
        )
        is_fresh = stream is not None and (asked is None or _is_fresh(scope["headers"]))
        writer = ResponseWriter(
            scope, receive, send, fields, can_be_refused=not (is_fresh and fields.is_empty)
        )
        try:
            with engine.weight_versions.waiting(stream):
                await self._app(scope, _replay(messages, receive), writer)
        except Exception:
            if not await writer.is_refused():
                raise
        finally:
            await fields.close()


async def _read_and_preview(
    raw: bytes, cache: CoreCache
) -> tuple[CheckedRequest, SteeringPreview] | None:
    """None if nothing of ours is in the body and nothing steers every request."""
    check_text(raw)
    if not cache.has_global_steering and not may_have_fields(raw):
        return None
    is_large = len(raw) > LARGE_BYTES
    read = partial(read_completion, raw)
    request = await asyncio.to_thread(run_in_turns, read) if is_large else read()
    if request is None or not (cache.has_global_steering or request.has_our_fields):
        return None
    if not (cache.has_global_steering or request.fields.steer or request.fields.stop):
        return request, SteeringPreview()
    try:
        preview = preview_steering(request.fields, await cache.view())
    except ClairaiError:
        # A name may be new, or mean something else by now.
        preview = preview_steering(request.fields, await cache.refresh())
    if not request.is_single:  # without a stream id the core cannot say why it refuses
        await asyncio.to_thread(preview.check_numbers)
    return request, preview


def _body_kind(scope: Scope) -> Literal["completion", "json", "form"] | None:
    """What is to be looked for in the body; None: nothing, so that it is not read here."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path in COMPLETION_PATHS:
        return "completion"
    if path.startswith(_OUR_PREFIXES):
        return None
    media_type = Headers(scope=scope).get("content-type", "").lower()
    if media_type.startswith("multipart/form-data"):
        return "form"
    return "json" if "json" in media_type else None  # vLLM reads no other kind


def _is_fresh(headers: Any) -> bool:
    """True if the sender says that it has drawn the stream id for this request."""
    return any(name == _FRESH_STREAM for name, _ in headers)


def _with_length(headers: Any, nbytes: int) -> list[tuple[bytes, bytes]]:
    kept = [pair for pair in headers if pair[0] not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(nbytes).encode())]


async def _read_messages(receive: Receive) -> list[Message]:
    """All messages of the body, or those that came before the client hung up."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def receive_again() -> Message:
        # After the body vLLM waits here for the client to hang up.
        message = next(left, None)
        return await receive() if message is None else message

    return receive_again
