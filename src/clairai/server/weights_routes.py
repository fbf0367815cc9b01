"""Takes requests under /v1/weights of vLLM's API server; gives the engine new weights, whole.

Manifests come this way. The weights themselves go over the worker's private socket; from where that
cannot be reached they come to server/weights_upload.py.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Final, get_args

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai.errors import WeightsBusyError, WeightsError, WeightsTornError
from clairai.points import quote
from clairai.server import weights_upload
from clairai.server.engine_rpc import Drain, EngineRpc, HttpRefusal, read_body, require_engine
from clairai.server.weights_upload import uploads_of
from clairai.weights.manifest import MAX_MANIFEST_BYTES, Manifest, changes_model, parse_manifest
from clairai.wire import weights_messages

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
    return _json_response(
        await engine.ask(weights_messages.DescribeWeights(), weights_messages.WeightsState)
    )


async def list_tensors(request: Request) -> Response:
    engine = require_engine(request.app)
    found = await engine.ask(weights_messages.ListTensors(), weights_messages.Tensors)
    return Response(msgspec.json.encode({"data": found.tensors}), media_type=_JSON)


async def check(request: Request) -> Response:
    """A dry run: would this be taken?"""
    engine, (raw, _) = require_engine(request.app), await _read_manifest(request)
    return _json_response(
        await engine.ask(weights_messages.CheckWeights(raw), weights_messages.WeightsPlanned)
    )


async def plan(request: Request) -> Response:
    """Check a manifest; the worker and the upload route accept its buffers from now on."""
    engine, (raw, manifest) = require_engine(request.app), await _read_manifest(request)
    planned = await engine.ask(weights_messages.PlanWeights(raw), weights_messages.WeightsPlanned)
    uploads_of(request.app).plan(manifest)
    return _json_response(planned)


async def commit(request: Request) -> Response:
    """Serve with what has come: a request is answered by the old weights or by the new ones."""
    drain = request.query_params.get("drain", "wait")
    if drain not in get_args(Drain):
        raise WeightsError(f"drain is {quote(drain)}; give wait or abort")
    engine, (raw, manifest) = require_engine(request.app), await _read_manifest(request)
    take = _swap if changes_model(manifest) else _install
    # In a task of its own: who asked may hang up, and what has begun is brought to its end.
    taking = asyncio.create_task(
        uploads_of(request.app).until(manifest.transfer, take(engine, raw, drain))  # type: ignore[arg-type]
    )
    return _json_response(await asyncio.shield(taking))


async def _install(engine: EngineRpc, raw: bytes, _: Drain) -> weights_messages.WeightsCommitted:
    """Probes and vectors alone make nobody wait."""
    async with engine.changing:
        return await engine.ask(
            weights_messages.CommitWeights(raw), weights_messages.WeightsCommitted
        )


async def _swap(engine: EngineRpc, raw: bytes, drain: Drain) -> weights_messages.WeightsCommitted:
    async with engine.changing:
        await engine.ask(weights_messages.VerifyWeights(raw), weights_messages.WeightsPlanned)
        return await _when_idle(engine, raw, drain)


async def _when_idle(
    engine: EngineRpc, raw: bytes, drain: Drain
) -> weights_messages.WeightsCommitted:
    deadline_s = time.monotonic() + DRAIN_S
    while True:
        await _pause(engine, drain, max(deadline_s - time.monotonic(), 0))
        try:
            return await _commit_idle(engine, raw)
        except WeightsBusyError:
            # A pause does not wait for what was preempted: that goes on, before all others.
            if time.monotonic() > deadline_s:
                raise


async def _commit_idle(engine: EngineRpc, raw: bytes) -> weights_messages.WeightsCommitted:
    """Nobody runs: load, and let them go on."""
    try:
        committed = await engine.ask(
            weights_messages.CommitWeights(raw), weights_messages.WeightsCommitted
        )
        await engine.name_weights(str(committed.version))
    except WeightsTornError:
        raise  # nobody is served by half of each: it stays paused until a whole set has come
    except BaseException:
        await engine.resume()
        raise
    await engine.resume()
    return committed


async def _pause(engine: EngineRpc, drain: Drain, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(engine.pause(drain), timeout_s)
    except TimeoutError:
        await engine.resume()
        reason = f"requests still run after {DRAIN_S:.0f} s; send again, or with drain=abort"
        raise HttpRefusal(HTTPStatus.CONFLICT, WeightsError.code, reason) from None


async def _read_manifest(request: Request) -> tuple[bytes, Manifest]:
    """The body; what is no manifest never reaches the engine, whose steps would wait for it."""
    body = await read_body(request, MAX_MANIFEST_BYTES, WeightsError.code, "a manifest")
    return body, await asyncio.to_thread(parse_manifest, body)


def _json_response(reply: msgspec.Struct) -> Response:
    content = msgspec.to_builtins(reply)
    for name in ("type", "socket"):  # of no use to who asks over HTTP
        content.pop(name, None)
    return Response(msgspec.json.encode(content), media_type=_JSON)
