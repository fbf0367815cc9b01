"""Route for weights from other machines: passes buffers of a planned transfer to the engine.

Runs in: the API server. A body is a safetensors file with the buffer's tensors in the plan's order.
This process holds one buffer at a time, in shared memory that the engine then reads in place.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from clairai.errors import WeightsError, quote
from clairai.server.engine_rpc import EngineRpc, RouteRefusal, require_engine
from clairai.weights.manifest import Manifest
from clairai.weights.upload import SafetensorsUpload, UploadRelay
from clairai.wire.weights_messages import DescribeWeights, WeightsState

ATTRIBUTE: Final = "clairai_uploads"  # of the app's state
BEGIN_S: Final = 30.0
MIN_BYTES_PER_S: Final = 1 << 20  # a slower sender would keep others from sending
IDLE_S: Final = 60.0  # without a next buffer or a commit the transfer is given up
_TRANSFER: Final = re.compile(r"[0-9a-f]{32}")
_INDEX: Final = re.compile(r"[0-9]{1,4}")
CommitResult = TypeVar("CommitResult")


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/weights/buffers/{transfer}/{index}", put_buffer, methods=["PUT"])


class BufferUploads:
    """Lets one transfer at a time use the relay to the engine."""

    def __init__(self, engine: EngineRpc) -> None:
        self._engine = engine
        self._relay = UploadRelay()
        self._planned: Manifest | None = None
        self._busy = asyncio.Lock()
        self._idle_timer: asyncio.TimerHandle | None = None

    def plan(self, manifest: Manifest) -> None:
        """The engine accepted this plan; its buffers may come here or to the worker's socket."""
        self._planned = manifest

    async def receive(self, transfer: str, index: int, pieces: AsyncIterator[bytes]) -> None:
        """Pass on one buffer; an error gives up the whole transfer."""
        async with self._busy:
            await self._begin(transfer)
            upload = await asyncio.to_thread(self._relay.begin_upload, transfer, index)
            self._cancel_timer()
            try:
                await _fill(upload, pieces)
                await asyncio.to_thread(self._relay.deliver, index, upload)
            except BaseException:
                await asyncio.to_thread(self._relay.forget)
                raise
            finally:
                upload.close()
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(IDLE_S, self._give_up, transfer)

    async def keep_until(self, transfer: str, commit: Awaitable[CommitResult]) -> CommitResult:
        """Keep the buffers until the commit is done, however long running requests take."""
        if self._relay.transfer != transfer:  # its buffers came to the worker's socket
            return await commit
        self._cancel_timer()
        try:
            return await commit
        finally:
            await self._end(transfer)

    async def _end(self, transfer: str) -> None:
        async with self._busy:
            if self._relay.transfer == transfer:
                self._cancel_timer()
                await asyncio.to_thread(self._relay.forget)

    async def _begin(self, transfer: str) -> None:
        """The first buffer of a plan ends the transfer before it."""
        planned = self._planned
        if planned is None or planned.transfer != transfer:
            return
        self._planned = None
        await asyncio.to_thread(self._relay.forget)
        state = await self._engine.ask(DescribeWeights(), WeightsState)
        self._relay.expect(planned, Path(state.socket).parent, state.ranks)

    def _cancel_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _give_up(self, transfer: str) -> None:
        # Kept: the event loop itself holds tasks only weakly.
        self._ending = asyncio.get_running_loop().create_task(self._end(transfer))


async def _fill(upload: SafetensorsUpload, pieces: AsyncIterator[bytes]) -> None:
    deadline_s = BEGIN_S + upload.nbytes / MIN_BYTES_PER_S
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in pieces:
                upload.feed(piece)
    except TimeoutError:
        reason = f"{upload.nbytes} bytes did not come within {deadline_s:.0f} s; send it again"
        raise RouteRefusal(HTTPStatus.REQUEST_TIMEOUT, WeightsError.code, reason) from None
    except ClientDisconnect:
        raise WeightsError("the sender hung up in the middle of a buffer") from None


def uploads_of(app: FastAPI) -> BufferUploads:
    """The uploads of this server, made when first asked for."""
    found = getattr(app.state, ATTRIBUTE, None)
    if found is None:
        found = BufferUploads(require_engine(app))
        setattr(app.state, ATTRIBUTE, found)
    assert isinstance(found, BufferUploads)
    return found


async def put_buffer(request: Request, transfer: str, index: str) -> Response:
    """One buffer, as a safetensors file."""
    uploads = uploads_of(request.app)
    if not _TRANSFER.fullmatch(transfer) or not _INDEX.fullmatch(index):
        raise WeightsError(
            f"{quote(f'{transfer}/{index}')} names no buffer; give the plan's transfer and a number"
        )
    await uploads.receive(transfer, int(index), request.stream())
    return Response(status_code=HTTPStatus.NO_CONTENT)
