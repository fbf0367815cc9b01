"""An upstream that follows a script: it speaks vLLM's HTTP and writes a real ring.

The engine's probes score a row by its own token id and position, so that a score under the wrong
token shows.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from clairai.ring.writer import RingWriter
from clairai.wire import ring_messages
from clairai.wire.ring_messages import Bank, ProbeInfo
from tests.http import vllm_wire

PROMPT = [256, 72, 105, 257]  # <|im_start|>Hi<|im_end|>
NAMES = ("token", "position")
THRESHOLD = 100.0
SPECIAL = (b"<|im_start|>", b"<|im_end|>")
TOKEN_BYTES = [*(bytes([byte]) for byte in range(256)), *SPECIAL]
BANK = Bank(
    1,
    (
        ProbeInfo("token", "pre_attn.0", threshold=THRESHOLD),
        ProbeInfo("position", "post_block.3"),
    ),
)
# The bank after a change: one probe went, one came.
OTHER_BANK = Bank(2, (ProbeInfo("position", "post_block.3"), ProbeInfo("negative", "post_block.3")))


# Banks of an engine that takes weights, before and after it took some.
OLD_WEIGHTS, NEW_WEIGHTS = Bank(3, BANK.probes, 0), Bank(4, BANK.probes, 1)
# And one whose first probe has an activation.
ACTIVATED = Bank(5, (ProbeInfo("token", "pre_attn.0", "relu", THRESHOLD), BANK.probes[1]), 2)


def bank_of(version: int) -> Bank | None:
    banks = (BANK, OTHER_BANK, OLD_WEIGHTS, NEW_WEIGHTS, ACTIVATED)
    return {one.version: one for one in banks}.get(version)


def score(token_id: int, position: int) -> list[float]:
    """What bank 1 gives this row."""
    return [float(token_id), float(position)]


class Ring:
    """The engine's end of a ring; records of one row each unless told otherwise."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer
        self._step = 0

    def rows(
        self,
        stream: int,
        start: int,
        token_ids: Sequence[int],
        *,
        phase: int = ring_messages.DECODE,
        choice: int = 0,
        flags: int = 0,
        bank: int = 1,
    ) -> None:
        """One record: these tokens were forwarded, from position `start` on."""
        made = np.zeros(len(token_ids), ring_messages.ROW)
        made["stream"], made["choice"], made["span"] = stream, choice, 1
        made["phase"], made["flags"] = phase, flags
        made["token_id"] = token_ids
        made["position"] = np.arange(start, start + len(token_ids))
        positions = range(start, start + len(token_ids))
        scores = [score(*row) for row in zip(token_ids, positions, strict=True)]
        if bank == 2:
            scores = [[position, -token] for token, position in scores]
        self._publish(made, np.array(scores, np.float32), bank)

    def mark(self, stream: int, phase: int, *, position: int = 0, span: int = 0) -> None:
        made = np.zeros(1, ring_messages.ROW)
        made["stream"], made["phase"] = stream, phase
        made["position"], made["span"], made["token_id"] = position, span, -1
        self._publish(made, np.full((1, 2), np.nan, np.float32), 1)

    def _publish(self, rows: Any, scores: Any, bank: int) -> None:
        self._step += 1
        self._writer.publish(rows, scores, bank_version=bank, step=self._step)


@dataclass
class Exchange:
    """One completion request as the fake engine sees it."""

    body: Any
    raw: bytes
    headers: dict[str, str]
    is_chat: bool
    ring: Ring | None
    http: web.Request
    response: web.StreamResponse | None = None
    echo: dict[str, Any] | None = None  # what the first of the answer says under `clairai`
    last: dict[str, Any] | None = None  # and what a chunk of its own says at the end
    was_cancelled: bool = False
    ended_s: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Ours, as the engine reads them."""
        xargs = (self.body.get("vllm_xargs") if isinstance(self.body, dict) else None) or {}
        made = json.loads(xargs.get("clairai", "{}"))
        assert isinstance(made, dict)
        seeds = [name for name in xargs if name.endswith("steering_vectors")]
        return made | {name: json.loads(xargs[name]) for name in seeds}

    @property
    def stream(self) -> int:
        return int(self.fields["stream"])

    @property
    def is_scored(self) -> bool:
        return self.ring is not None and "clairai" in (self.body.get("vllm_xargs") or {})

    @property
    def shows_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    def rows(self, start: int, token_ids: Sequence[int], **more: Any) -> None:
        if self.is_scored:
            assert self.ring is not None
            self.ring.rows(self.stream, start, token_ids, **more)

    def prefill(self, *, choice: int = 0, prompt: list[int] | None = None) -> None:
        ids = PROMPT if prompt is None else prompt
        self.rows(0, ids, phase=ring_messages.PREFILL, choice=choice)

    async def send(self, raw: bytes) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8"}
            self.response = web.StreamResponse(headers=headers)
            await self.response.prepare(self.http)
        await self.response.write(raw)

    async def say(self, data: dict[str, Any]) -> None:
        await self.send(vllm_wire.frame(self.echoed(data)))

    def echoed(self, data: dict[str, Any]) -> dict[str, Any]:
        """The first thing that is said, with what is applied in front."""
        echo, self.echo = self.echo, None
        return data if echo is None else {"clairai": echo, **data}

    async def begin(self, *, choices: int = 1) -> None:
        """The first chunks of a chat; a completion has none of its own."""
        for choice in range(choices if self.is_chat else 0):
            await self.say(vllm_wire.role_chunk(choice, PROMPT if self.shows_ids else None))

    def chunk(
        self,
        token_ids: list[int],
        *,
        choice: int = 0,
        finish: str | None = None,
        stop_reason: str | int | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        ids = token_ids if self.shows_ids else None
        if self.is_chat:
            delta = {"content": text_of(token_ids)}
            return vllm_wire.chat_chunk(choice, ids, delta, finish=finish, stop_reason=stop_reason)
        prompt = PROMPT if first and self.shows_ids else None
        return vllm_wire.text_chunk(
            choice,
            ids,
            text_of(token_ids),
            prompt_ids=prompt,
            finish=finish,
            stop_reason=stop_reason,
        )

    async def tokens(self, token_ids: list[int], **more: Any) -> None:
        await self.say(self.chunk(token_ids, **more))

    async def end(self, *, num_generated: int = 0) -> None:
        options = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            chunk = vllm_wire.usage_chunk(len(PROMPT), num_generated, is_chat=self.is_chat)
            await self.say(chunk)
        if self.last is not None:
            chunk = vllm_wire.usage_chunk(len(PROMPT), num_generated, is_chat=self.is_chat)
            del chunk["usage"]
            await self.say({**chunk, "clairai": self.last})
        await self.send(b"data: [DONE]\n\n")

    async def end_when(self, event: threading.Event) -> None:
        """Go on when the test says so."""
        assert await asyncio.to_thread(event.wait, 60)

    async def forever(self) -> None:
        """Go on until somebody hangs up."""
        await asyncio.Event().wait()

    async def send_half(self) -> None:
        """The first bytes of an answer that is not streamed."""
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await self.response.prepare(self.http)
        await self.response.write(b'{"id":')

    def refuse(self, status: int, message: str) -> web.Response:
        return refusal(status, message)

    def die(self) -> None:
        """As a process that is killed: the connection is gone in the middle."""
        assert self.http.transport is not None
        self.http.transport.abort()


Script = Callable[[Exchange], Awaitable[web.StreamResponse | None]]


def text_of(token_ids: Sequence[int]) -> str:
    """What a client reads: special tokens are left out."""
    plain = b"".join(TOKEN_BYTES[token] for token in token_ids if token < 256)
    return plain.decode(errors="ignore")


def answering(
    *answers: list[int],
    at_once: int = 1,
    finish: str = "length",
    stop_reason: str | int | None = None,
) -> Script:
    """Generates these tokens, `at_once` to a chunk, all choices in turn; streamed or not."""
    end = {"finish": finish, "stop_reason": stop_reason}

    async def script(exchange: Exchange) -> web.StreamResponse | None:
        if exchange.http.path == "/v1/responses":
            return await responding(answers[0])(exchange)
        for choice in range(len(answers)):
            exchange.prefill(choice=choice)
        if not exchange.body.get("stream"):
            return _whole(exchange, list(answers), end)
        await exchange.begin(choices=len(answers))
        longest = max(map(len, answers))
        for at in range(0, longest, at_once):
            for choice, ids in enumerate(answers):
                await _step(exchange, choice, ids, slice(at, at + at_once), end)
        await exchange.end(num_generated=sum(map(len, answers)))
        return None

    return script


def responding(token_ids: list[int], *, status: str = "completed") -> Script:
    """Answers /v1/responses with these tokens; streamed or not."""

    async def script(exchange: Exchange) -> web.StreamResponse | None:
        exchange.prefill()
        shows_ids = bool(exchange.body.get("enable_response_messages"))
        whole = vllm_wire.response(
            PROMPT, token_ids, text_of(token_ids), status=status, shows_ids=shows_ids
        )
        if not exchange.body.get("stream"):
            exchange.rows(len(PROMPT), token_ids[:-1])
            made = vllm_wire.dumps(exchange.echoed(whole))
            return web.Response(body=made, content_type="application/json")
        await _stream_response(exchange, token_ids, whole)
        return None

    return script


async def _stream_response(exchange: Exchange, token_ids: list[int], whole: dict[str, Any]) -> None:
    begun = vllm_wire.response(PROMPT, [], "", status="in_progress", shows_ids=False)
    event = vllm_wire.response_event
    await exchange.send(event("response.created", 0, exchange.echoed({"response": begun})))
    await exchange.send(event("response.in_progress", 1, {"response": begun}))
    for at, token_id in enumerate(token_ids):
        if at:
            exchange.rows(len(PROMPT) + at - 1, [token_ids[at - 1]])
        delta = {"delta": text_of([token_id]), "item_id": "msg_1", "output_index": 0}
        await exchange.send(event("response.output_text.delta", at + 2, delta))
    number = len(token_ids) + 2
    await exchange.send(event("response.completed", number, {"response": whole}))


async def _step(
    exchange: Exchange, choice: int, ids: list[int], step: slice, end: dict[str, Any]
) -> None:
    part, at = ids[step], step.start
    if not part:
        return
    is_last = step.stop >= len(ids)
    # The engine forwards a token in the step that samples the next; the last is never forwarded.
    forwarded = ids[max(at - 1, 0) : at + len(part) - 1]
    if forwarded:
        exchange.rows(len(PROMPT) + max(at - 1, 0), forwarded, choice=choice)
    await exchange.tokens(part, choice=choice, first=at == 0, **(end if is_last else {}))


def _whole(exchange: Exchange, answers: list[list[int]], end: dict[str, Any]) -> web.Response:
    for choice, ids in enumerate(answers):
        if len(ids) > 1:
            exchange.rows(len(PROMPT), ids[:-1], choice=choice)
    texts = [text_of(ids) for ids in answers]
    body = vllm_wire.whole(
        answers, texts, PROMPT, is_chat=exchange.is_chat, shows_ids=exchange.shows_ids
    )
    for choice in body["choices"]:
        choice |= {"finish_reason": end["finish"], "stop_reason": end["stop_reason"]}
    made = vllm_wire.dumps(exchange.echoed(body))
    return web.Response(body=made, content_type="application/json")


def refusal(status: int, message: str, code: str | None = None) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
