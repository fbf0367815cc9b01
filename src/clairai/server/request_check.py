"""Takes every completion request on its way into vLLM; stops one whose clairai fields are wrong.

The engine core refuses such a request too, but vLLM tells the client nothing of why (reply.py).
Here the reason can be given. Runs in the API server, behind vLLM's key check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clairai.errors import ClairaiError, RequestError
from clairai.fields import request_fields as ours
from clairai.fields.positions import Positions
from clairai.fields.request_fields import KEY, RequestFields
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.proxy.completions.completion_request import is_true
from clairai.server import chat_positions
from clairai.server.core_cache import CoreCache
from clairai.server.response_fields import CoreAccess, first_fields, last_fields
from clairai.server.response_writer import Refuse, ResponseWriter
from clairai.server.steering_preview import SteeringPreview, preview_steering

_PATHS: Final = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/chat/completions/batch", "/invocations"),
    )
)
_MARKS: Final = (KEY.encode(), b"steering_vectors", b"\\u")
_XARGS: Final = "vllm_xargs"
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.json.Decoder(dict[str, Any] | None)
# What takes longer to read than a token may be late is read beside the event loop.
_LARGE_BYTES: Final = 1 << 16
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


CoreOf = Callable[[Any], CoreAccess | None]


@dataclass(frozen=True)
class CompletionRequest:
    """What of a body concerns us, or can."""

    wanted: RequestFields
    fields: Mapping[str, msgspec.Raw]
    xargs: Mapping[str, Any]  # the seeds' fields among them, wherever they stood
    is_moved: bool  # one of them stood beside vllm_xargs, or was said otherwise

    @property
    def is_single(self) -> bool:
        """Whether it makes one request of the engine; more would share one stream id."""
        return not any(_has_many(self.fields.get(name)) for name in ("prompt", "messages"))

    @property
    def is_ours(self) -> bool:
        return not {KEY, *FIELD_PHASES}.isdisjoint(self.xargs)

    @property
    def is_captured(self) -> bool:
        """Whether rows were asked for; others may be captured too, as the engine's setting says."""
        return self.wanted.capture is not None and self.wanted.capture.is_wanted

    @property
    def names_messages(self) -> bool:
        wish = self.wanted.capture
        return wish is not None and chat_positions.names_messages(wish.positions)

    def placed(self, positions: Positions) -> CompletionRequest:
        """The same with these positions."""
        assert self.wanted.capture is not None
        wish = replace(self.wanted.capture, positions=positions)
        return replace(self, wanted=replace(self.wanted, capture=wish), is_moved=True)

    def rewritten(self, stream: int | None, pins: tuple[str | None, ...]) -> bytes:
        """The body with a stream id, and with the contents that names stand for."""
        text = self.xargs.get(KEY, {})
        asked = msgspec.json.decode(text) if isinstance(text, str) else dict(text)
        for entry, pin in zip(asked.get("steer", ()), pins, strict=False):
            if pin is not None:
                entry["digest"] = pin
        if stream is not None:
            asked["stream"] = stream
        if self.wanted.capture is not None:
            asked["capture"] = self.wanted.capture.written()
        xargs = {**self.xargs, KEY: msgspec.json.encode(asked).decode()}
        kept = {name: raw for name, raw in self.fields.items() if name not in FIELD_PHASES}
        return msgspec.json.encode({**kept, _XARGS: xargs})


def read_request(body: bytes) -> CompletionRequest | None:
    """RequestError if the fields are wrong; None for what is not ours to judge."""
    try:
        fields = _FIELDS.decode(body)
        xargs = dict(_ANY.decode(fields.get(_XARGS, b"null")) or {})
    except _UNREADABLE:
        return None  # vLLM says what is wrong with it
    if bytes(fields.get(KEY, b"null")) != b"null":
        raise RequestError(
            "vLLM itself does not read a `clairai` field; "
            'give it as "vllm_xargs": {"clairai": "{...}"}'
        )
    moved = {
        name: fields[name] for name in FIELD_PHASES if bytes(fields.get(name, b"null")) != b"null"
    }
    if twice := moved.keys() & xargs.keys():
        raise RequestError(f"{min(twice)} stands beside vllm_xargs and in it; send it once")
    xargs |= {name: bytes(raw).decode() for name, raw in moved.items()}
    wanted = ours.parse_fields(xargs)
    given = CompletionRequest(wanted, fields, xargs, bool(moved))
    _check(given)
    return given


def _check(given: CompletionRequest) -> None:
    """RequestError for what would be answered as if it had not been asked."""
    wanted = given.wanted
    is_bound = bool(wanted.steer or wanted.stop or given.is_captured)
    if is_bound and is_true(given.fields.get("use_beam_search")):
        # Its requests are made anew, without extra_args: generate/beam_search/online.py, 0.32:62.
        raise RequestError(
            "beams are neither steered, stopped nor captured; leave out use_beam_search"
        )
    if given.is_captured and not given.is_single:
        raise RequestError(
            "several prompts in one request would be captured as one; send one prompt in each"
        )


def _has_many(raw: msgspec.Raw | None) -> bool:
    """Prompts or conversations; the ids of one prompt, or one's messages, are a list as well."""
    try:
        items = _LIST.decode(b"[]" if raw is None else raw)
    except _UNREADABLE:
        return False
    return bool(items) and bytes(memoryview(items[0])[:1]) in (b"[", b'"')


class RequestCheck:
    """ASGI middleware: reads the body once; `core_of` gives the app's engine, None without taps."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse, core_of: CoreOf) -> None:
        self._app = app
        self._refuse = refuse
        self._core_of = core_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._core_of(scope["app"]) if _is_completion(scope) else None
        if core is None:
            return await self._app(scope, receive, send)
        messages = await _read_messages(receive)
        try:
            found = await _read_and_judge(
                b"".join(one.get("body", b"") for one in messages), core.core_cache
            )
            if found is not None and found[0].names_messages:
                found = (await self._placed(found[0], scope), found[1])
        except ClairaiError as error:
            return await self._refuse(error)(scope, receive, send)
        if found is None:
            return await self._app(scope, _replay(messages, receive), send)
        return await self._watched(core, found, messages, scope, receive, send)

    async def _placed(self, given: CompletionRequest, scope: Scope) -> CompletionRequest:
        """Messages of a chat have become positions."""
        wish = given.wanted.capture
        assert wish is not None
        assert wish.positions is not None
        if scope["path"].removeprefix(scope.get("root_path", "")) != chat_positions.CHAT_PATH:
            raise RequestError(
                f"only a chat has messages: POST {chat_positions.CHAT_PATH}; or give from and to"
            )
        tokenize = chat_positions.tokenize_through(self._app, scope)
        return given.placed(
            await chat_positions.resolve_messages(wish.positions, given.fields, tokenize)
        )

    async def _watched(
        self,
        core: CoreAccess,
        found: tuple[CompletionRequest, SteeringPreview],
        messages: list[Message],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        given, ruling = found
        asked = given.wanted.stream
        stream = ours.new_stream_id() if asked is None and given.is_single else asked
        if stream != asked or given.is_moved or any(ruling.pins):
            body = given.rewritten(stream, ruling.pins)
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            scope = {**scope, "headers": _with_length(scope["headers"], len(body))}

        async def why() -> ClairaiError | None:
            return None if stream is None else await core.why_refused(stream)

        # In a thread, while the engine is at work.
        echo = asyncio.ensure_future(asyncio.to_thread(ruling.complete)) if ruling.inline else None

        async def told() -> dict[str, Any] | None:
            said = ruling.applied if echo is None else await echo
            return await first_fields(core, stream, said, is_captured=given.is_captured)

        result = None if stream is None or not given.is_captured else last_fields(core, stream)
        reply = ResponseWriter(scope, receive, send, echo=told, why=why, result=result)

        async def sending(message: Message) -> None:
            await reply(message, self._refuse)

        try:
            with core.weight_versions.waiting(stream):
                await self._app(scope, _replay(messages, receive), sending)
        except Exception:
            if not await reply.is_refused(self._refuse):
                raise
        finally:
            if echo is not None:
                await asyncio.gather(echo, return_exceptions=True)


async def _read_and_judge(
    body: bytes, core_cache: CoreCache
) -> tuple[CompletionRequest, SteeringPreview] | None:
    """What is ours in a body, and what will be applied; None where neither has anything to say."""
    # A key may be written with escapes, and only then lack the others' bytes.
    if not core_cache.has_global_steering and not any(mark in body for mark in _MARKS):
        return None
    is_large = len(body) > _LARGE_BYTES
    given = await asyncio.to_thread(read_request, body) if is_large else read_request(body)
    if given is None or not (core_cache.has_global_steering or given.is_ours):
        return None
    if not (core_cache.has_global_steering or given.wanted.steer or given.wanted.stop):
        return given, SteeringPreview()
    try:
        ruling = preview_steering(given.wanted, await core_cache.view())
    except ClairaiError:
        # A name may be new, or mean something else by now.
        ruling = preview_steering(given.wanted, await core_cache.refresh())
    if not given.is_single:  # without a stream id the core cannot be asked
        await asyncio.to_thread(ruling.check_numbers)
    return given, ruling


def _is_completion(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"].removeprefix(scope.get("root_path", "")) in _PATHS


def _with_length(headers: Any, nbytes: int) -> list[tuple[bytes, bytes]]:
    kept = [pair for pair in headers if pair[0] not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(nbytes).encode())]


async def _read_messages(receive: Receive) -> list[Message]:
    """All messages of the body, or all that came before the client hung up."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def again() -> Message:
        # After the body vLLM listens here for the client to hang up.
        message = next(left, None)
        return await receive() if message is None else message

    return again
