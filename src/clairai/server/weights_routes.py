"""Routes under /v1/weights: describe, check, plan and commit a transfer of new weights.

Runs in: the API server. Only manifests come this way. The weights themselves go over the worker's
private socket or, where that cannot be reached, to weights_upload.py.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Final, get_args

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai.errors import WeightsBusyError, WeightsError, WeightsTornError, quote
from clairai.server import weights_upload
from clairai.server.engine_rpc import Drain, EngineRpc, RouteRefusal, read_body, require_engine
from clairai.server.weights_upload import uploads_of
from clairai.weights.manifest import MAX_MANIFEST_BYTES, Manifest, changes_model, parse_manifest
from clairai.wire.weights_messages import (
    CheckWeights,
    CommitWeights,
    DescribeWeights,
    ListTensors,
    PlanWeights,
    Tensors,
    VerifyWeights,
    WeightsCommitted,
    WeightsPlanned,
    WeightsState,
)

DRAIN_S: Final = 300.0  # requests that run longer keep the old weights serving
_JSON: Final = "application/json"


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/weights", describe, methods=["GET"])
    router.add_api_route("/weights/tensors", list_tensors, methods=["GET"])
    router.add_api_route("/weights/check", check, methods=["POST"])
    router.add_api_route("/weights/plan", plan, methods=["POST"])
    router.add_api_route("/weights/commit", commit, methods=["POST"])
    weights_upload.add_routes(router)


async def describe(request: Request) -> Response:
    engine = require_engine(request.app)
    return _json_response(await engine.ask(DescribeWeights(), WeightsState))


async def list_tensors(request: Request) -> Response:
    engine = require_engine(request.app)
    found = await engine.ask(ListTensors(), Tensors)
    return Response(msgspec.json.encode({"data": found.tensors}), media_type=_JSON)


async def check(request: Request) -> Response:
    """A dry run: say whether the engine would accept these weights."""
    engine, (raw, _) = require_engine(request.app), await _read_manifest(request)
    return _json_response(await engine.ask(CheckWeights(raw), WeightsPlanned))


async def plan(request: Request) -> Response:
    """Check a manifest; the worker and the upload route accept its buffers from now on."""
    engine, (raw, manifest) = require_engine(request.app), await _read_manifest(request)
    planned = await engine.ask(PlanWeights(raw), WeightsPlanned)
    uploads_of(request.app).plan(manifest)
    return _json_response(planned)


async def commit(request: Request) -> Response:
    """Serve with the transferred weights; each request is answered by the old or the new ones."""
    drain = request.query_params.get("drain", "wait")
    if drain not in get_args(Drain):
        raise WeightsError(f"drain is {quote(drain)}; give wait or abort")
    engine, (raw, manifest) = require_engine(request.app), await _read_manifest(request)
    if changes_model(manifest):
        committing = _commit_model(engine, raw, drain)  # type: ignore[arg-type]
    else:
        committing = _commit_banks(engine, raw)
    # In a task of its own: the client may hang up, but a commit must not stop half-way.
    task = asyncio.create_task(uploads_of(request.app).keep_until(manifest.transfer, committing))
    return _json_response(await asyncio.shield(task))


async def _commit_banks(engine: EngineRpc, raw: bytes) -> WeightsCommitted:
    """Probes and vectors alone: no request has to wait."""
    async with engine.changing, engine.alone():
        return await engine.ask(CommitWeights(raw), WeightsCommitted)


async def _commit_model(engine: EngineRpc, raw: bytes, drain: Drain) -> WeightsCommitted:
    async with engine.changing:
        await engine.ask(VerifyWeights(raw), WeightsPlanned)
        return await _commit_when_idle(engine, raw, drain)


async def _commit_when_idle(engine: EngineRpc, raw: bytes, drain: Drain) -> WeightsCommitted:
    deadline_s = time.monotonic() + DRAIN_S
    while True:
        await _pause(engine, drain, max(deadline_s - time.monotonic(), 0))
        try:
            # To resume, too: what another API server has found idle must stay so until it commits.
            async with engine.alone():
                return await _commit_paused(engine, raw)
        except WeightsBusyError:
            # A pause does not wait for preempted requests: they run first when it ends.
            if time.monotonic() > deadline_s:
                raise


async def _commit_paused(engine: EngineRpc, raw: bytes) -> WeightsCommitted:
    try:
        committed = await engine.ask(CommitWeights(raw), WeightsCommitted)
        await engine.name_weights(str(committed.version))
    except WeightsTornError:
        raise  # the model is half old, half new: stay paused until a whole set has come
    except BaseException:
        await engine.resume()
        raise
    await engine.resume()
    return committed


async def _pause(engine: EngineRpc, drain: Drain, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(engine.pause(drain), timeout_s)
    except TimeoutError:
        async with engine.alone():
            await engine.resume()
        reason = f"requests still run after {DRAIN_S:.0f} s; send again, or with drain=abort"
        raise RouteRefusal(HTTPStatus.CONFLICT, WeightsError.code, reason) from None


async def _read_manifest(request: Request) -> tuple[bytes, Manifest]:
    """The body, parsed here so that the engine does not interrupt its steps for a wrong one."""
    body = await read_body(request, MAX_MANIFEST_BYTES, WeightsError.code, "a manifest")
    return body, await asyncio.to_thread(parse_manifest, body)


def _json_response(reply: msgspec.Struct) -> Response:
    content = msgspec.to_builtins(reply)
    for name in ("type", "socket"):  # of no use to HTTP clients
        content.pop(name, None)
    return Response(msgspec.json.encode(content), media_type=_JSON)
