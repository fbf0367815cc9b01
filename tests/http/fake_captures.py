"""The routes under /v1/captures of a fake engine: one file, and ranges of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.http.fake import refusal

ID = "00000000000000ab"
FILE = bytes(range(256)) * 40
PART_NBYTES = 1 << 16
OFF = "this engine does not capture"


def handle(id: str = ID, **more: Any) -> dict[str, Any]:
    return {"id": id, "state": "kept", "rows": 6, "lost": 0, "discarded": 0, **more}


@dataclass
class Captures:
    """The routes; `is_on` is whether the engine was started to capture."""

    is_on: bool = True
    ends_early: bool = False  # the engine dies in the middle of a file
    consumer: dict[str, Any] = field(default_factory=dict)  # what differs from a good one
    dropped: int = 0
    dropping_since: float | None = None
    large_nbytes: int = 0  # of a file that is sent instead
    sent_nbytes: int = 0
    is_stuck: bool = False  # nobody takes more of it now
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def forget(self) -> None:
        self.is_on, self.ends_early = True, False
        self.consumer, self.dropped, self.dropping_since = {}, 0, None
        self.large_nbytes, self.sent_nbytes, self.is_stuck = 0, 0, False
        self.asked.clear()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/clairai/capture", self._describe)
        app.router.add_get("/v1/captures", self._list)
        app.router.add_get("/v1/captures/{id}", self._get)

    async def _list(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, dict(request.headers)))
        if not self.is_on:
            return refusal(409, OFF, code="capture-off")
        line = handle(points=["post_block.1"], encoder="raw", answers=1)
        memory = {"stash_nbytes": 1, "staging_nbytes": 2, "pending_nbytes": 0}
        return web.json_response({"data": [line], **self._counts(), "memory": memory})

    async def _describe(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, dict(request.headers)))
        if not self.is_on:
            return refusal(409, OFF, code="capture-off")
        return web.json_response({**self._counts(), "dropping_since": self.dropping_since})

    def _counts(self) -> dict[str, Any]:
        good = {"name": "fs", "state": "writing", "reason": "", "since": 1.0}
        consumer = {**good, "refused": 0, "lost": 0, "free_nbytes": 1 << 30, **self.consumer}
        return {"consumers": [consumer], "rows": 6, "dropped": self.dropped, "discarded": 0}

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path_qs, dict(request.headers)))
        if self.large_nbytes:
            return await self._get_large(request)
        if not self.is_on or request.match_info["id"] != ID:
            return refusal(404, "no capture has this id", code="store")
        is_part = "Range" in request.headers
        try:
            chosen = request.http_range
        except ValueError:  # a range that is none is passed over, as the engine does it
            chosen, is_part = slice(None), False
        data = FILE[chosen]
        headers = {"ETag": '"tag"', "Accept-Ranges": "bytes", "X-Clairai-Lost": "0"}
        if is_part:
            first = (chosen.start or 0) % len(FILE)
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{len(FILE)}"
        made = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        made.content_type, made.content_length = "application/octet-stream", len(data)
        await made.prepare(request)
        await made.write(data[: len(data) // 2])
        if self.ends_early:
            assert request.transport is not None
            request.transport.abort()
            return made
        await made.write(data[len(data) // 2 :])
        return made

    async def _get_large(self, request: web.Request) -> web.StreamResponse:
        """Zeros, sent as fast as they are taken."""
        made = web.StreamResponse()
        made.content_length = self.large_nbytes
        await made.prepare(request)
        while self.sent_nbytes < self.large_nbytes:
            await made.write(bytes(PART_NBYTES))
            self.sent_nbytes += PART_NBYTES
            assert request.transport is not None
            self.is_stuck = request.transport.get_write_buffer_size() > 0
        return made
