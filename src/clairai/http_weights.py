"""Takes requests under /v1/weights of vLLM's API server; gives the engine new weights, whole.

Manifests come this way. The weights themselves go over the worker's private socket; from where that
cannot be reached they come to http_uploads.py.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Final, get_args

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from clairai import http_uploads, wire_weights
from clairai.errors import WeightsBusyError, WeightsError, WeightsTornError
from clairai.http_engine import Drain, Engine, Unanswered, bounded_body, engine_of
from clairai.http_uploads import uploads_of
from clairai.points import quote
from clairai.weights.manifest import MAX_MANIFEST_BYTES, Manifest, changes_model, parse

DRAIN_S: Final = 300.0  # requests that run longer keep the old weights serving
_JSON: Final = "application/json"


def add_routes(router: APIRouter) -> None:
    router.add_api_route("/weights", describe, methods=["GET"])
    router.add_api_route("/weights/tensors", list_tensors, methods=["GET"])
    router.add_api_route("/weights/check", check, methods=["POST"])
    router.add_api_route("/weights/plan", plan, methods=["POST"])
    router.add_api_route("/weights/commit", commit, methods=["POST"])
    http_uploads.add_routes(router)


async def describe(request: Request) -> Response:
    engine = engine_of(request.app)
    return _json(await engine.ask(wire_weights.DescribeWeights(), wire_weights.WeightsState))


async def list_tensors(request: Request) -> Response:
    engine = engine_of(request.app)
    found = await engine.ask(wire_weights.ListTensors(), wire_weights.Tensors)
    return Response(msgspec.json.encode({"data": found.tensors}), media_type=_JSON)


async def check(request: Request) -> Response:
    """A dry run: would this be taken?"""
    engine, (raw, _) = engine_of(request.app), await _manifest(request)
    return _json(await engine.ask(wire_weights.CheckWeights(raw), wire_weights.WeightsPlanned))


async def plan(request: Request) -> Response:
    """As check; the worker now takes the buffers of this manifest, and so does http_uploads.py."""
    engine, (raw, manifest) = engine_of(request.app), await _manifest(request)
    planned = await engine.ask(wire_weights.PlanWeights(raw), wire_weights.WeightsPlanned)
    uploads_of(request.app).plan(manifest)
    return _json(planned)


async def commit(request: Request) -> Response:
    """Serve with what has come: a request is answered by the old weights or by the new ones."""
    drain = request.query_params.get("drain", "wait")
    if drain not in get_args(Drain):
        raise WeightsError(f"drain is {quote(drain)}; give wait or abort")
    engine, (raw, manifest) = engine_of(request.app), await _manifest(request)
    take = _swap if changes_model(manifest) else _install
    # In a task of its own: who asked may hang up, and what has begun is brought to its end.
    taking = asyncio.create_task(
        uploads_of(request.app).until(manifest.transfer, take(engine, raw, drain))  # type: ignore[arg-type]
    )
    return _json(await asyncio.shield(taking))


async def _install(engine: Engine, raw: bytes, _: Drain) -> wire_weights.WeightsCommitted:
    """Probes and vectors alone make nobody wait."""
    async with engine.changing:
        return await engine.ask(wire_weights.CommitWeights(raw), wire_weights.WeightsCommitted)


async def _swap(engine: Engine, raw: bytes, drain: Drain) -> wire_weights.WeightsCommitted:
    async with engine.changing:
        await engine.ask(wire_weights.VerifyWeights(raw), wire_weights.WeightsPlanned)
        return await _when_idle(engine, raw, drain)


async def _when_idle(engine: Engine, raw: bytes, drain: Drain) -> wire_weights.WeightsCommitted:
    deadline_s = time.monotonic() + DRAIN_S
    while True:
        await _pause(engine, drain, max(deadline_s - time.monotonic(), 0))
        try:
            return await _taken(engine, raw)
        except WeightsBusyError:
            # A pause does not wait for what was preempted: that goes on, before all others.
            if time.monotonic() > deadline_s:
                raise


async def _taken(engine: Engine, raw: bytes) -> wire_weights.WeightsCommitted:
    """Nobody runs: load, and let them go on."""
    try:
        committed = await engine.ask(wire_weights.CommitWeights(raw), wire_weights.WeightsCommitted)
        await engine.name_weights(str(committed.version))
    except WeightsTornError:
        raise  # nobody is served by half of each: it stays paused until a whole set has come
    except BaseException:
        await engine.resume()
        raise
    await engine.resume()
    return committed


async def _pause(engine: Engine, drain: Drain, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(engine.pause(drain), timeout_s)
    except TimeoutError:
        await engine.resume()
        reason = f"requests still run after {DRAIN_S:.0f} s; send again, or with drain=abort"
        raise Unanswered(HTTPStatus.CONFLICT, WeightsError.code, reason) from None


async def _manifest(request: Request) -> tuple[bytes, Manifest]:
    """The body; what is no manifest never reaches the engine, whose steps would wait for it."""
    body = await bounded_body(request, MAX_MANIFEST_BYTES, WeightsError.code, "a manifest")
    return body, await asyncio.to_thread(parse, body)


def _json(reply: msgspec.Struct) -> Response:
    content = msgspec.to_builtins(reply)
    for name in ("type", "socket"):  # of no use to who asks over HTTP
        content.pop(name, None)
    return Response(msgspec.json.encode(content), media_type=_JSON)
