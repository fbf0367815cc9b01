"""Takes requests that only look; gives health, the engine's description, examples, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from clairai.errors import ConfigError
from clairai.proxy.completions.complete import complete
from clairai.proxy.dashboard import Dashboard
from clairai.proxy.proxy import Proxy
from clairai.proxy.relay import headers_of, relay, relay_parts, relay_upload, whole
from clairai.proxy.request_guard import check_json_shape
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.schema import ExampleList

JSON = "application/json"


async def health_response(proxy: Proxy) -> Response:
    word = await proxy.health.word()
    is_well = word.status in ("ready", "degraded")
    about = {"model": proxy.health.model, "version": version("clairai")}
    body = {"status": word.status, "reason": word.reason, **about}
    return _json_response(body, HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)


async def describe_engine(proxy: Proxy, request: Request) -> Response:
    """Upstream's own description, and how this proxy reads its ring."""
    headers = headers_of(proxy, request, is_edited=True)
    async with proxy.upstream.ask("GET", "/v1/clairai", headers=headers) as response:
        answer = await whole(proxy.upstream, response)
    if answer.status_code != HTTPStatus.OK:
        return answer
    fields: dict[str, Any] = msgspec.json.decode(bytes(answer.body), type=dict[str, msgspec.Raw])
    ring = proxy.numbers().ring
    fields["reader"] = {
        "delivered": ring.records_delivered,
        "lost": ring.records_lost,
        "lag": ring.lag,
        "orphaned": ring.orphaned,
        "attached": ring.attached,
    }
    return _json_response(fields)


async def metrics_response(proxy: Proxy) -> Response:
    if proxy.metrics is None:
        raise HttpRefusal(HTTPStatus.NOT_FOUND, "this proxy keeps no metrics")
    text = await asyncio.to_thread(proxy.metrics.text, proxy.numbers())
    return Response(text, headers={"Content-Type": proxy.metrics.content_type})


def load_examples(path: Path | None) -> bytes:
    """The answer of GET /v1/examples; ConfigError if the file is not one of examples."""
    if path is None:
        return ExampleList(data=[]).model_dump_json().encode()
    try:
        return ExampleList.model_validate_json(path.read_bytes()).model_dump_json().encode()
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} has no examples: {error}") from None


def _json_response(body: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)


# MERGED
# One function for each route of the table, by its name there; takes a call, gives the answer.


@dataclass(frozen=True)
class HandlerCall:
    """A request that was let in, and its body."""

    proxy: Proxy
    site: Dashboard
    examples: bytes
    request: Request
    body: bytes | None


Handler = Callable[[HandlerCall], Coroutine[Any, Any, Response]]


async def chat(call: HandlerCall) -> Response:
    return await complete(call.proxy, call.request, call.body or b"", "/v1/chat/completions")


async def completions(call: HandlerCall) -> Response:
    return await complete(call.proxy, call.request, call.body or b"", "/v1/completions")


async def resume(call: HandlerCall) -> Response:
    """Events after the last one the client has; never a second generation."""
    run = call.proxy.runs.get(call.request.path_params["run"])
    after = _after(call.request)
    if after > run.last:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            f"the run is at event {run.last}; give one that it had",
        )
    if not run.reaches(after):
        raise HttpRefusal(HTTPStatus.GONE, "the events after that one are no longer held")
    if run.is_over and after == run.last:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # an EventSource asks no more
    return call.proxy.runs.answer(run, after)


async def stop(call: HandlerCall) -> Response:
    call.proxy.runs.stop(call.proxy.runs.get(call.request.path_params["run"]))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def amend(call: HandlerCall) -> Response:
    """A run's request goes on steered otherwise."""
    run = call.proxy.runs.get(call.request.path_params["run"])
    if run.is_over:
        raise HttpRefusal(HTTPStatus.CONFLICT, "the run has ended; nothing of it is left to steer")
    return await _checked_relay(call, f"/v1/steering/requests/{run.stream}")


async def models(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/models")


async def tokenize(call: HandlerCall) -> Response:
    return await _checked_relay(call, "/tokenize")


async def detokenize(call: HandlerCall) -> Response:
    return await _checked_relay(call, "/detokenize")


async def list_probes(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/probes")


async def put_probe(call: HandlerCall) -> Response:
    answer = await relay(call.proxy, call.request, call.body, _probe_path(call.request))
    call.proxy.engine_info.forget_bank()
    return answer


async def remove_probe(call: HandlerCall) -> Response:
    answer = await relay(call.proxy, call.request, None, _probe_path(call.request))
    call.proxy.engine_info.forget_bank()
    return answer


async def get_steering(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/steering")


async def set_steering(call: HandlerCall) -> Response:
    return await _checked_relay(call, "/v1/steering")


async def list_vectors(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/steering/vectors")


async def get_vector(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, _vector_path(call.request))


async def put_vector(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, call.body, _vector_path(call.request))


async def remove_vector(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, _vector_path(call.request))


async def list_captures(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/captures")


async def get_capture(call: HandlerCall) -> Response:
    """As it comes: rows of a long request are gigabytes."""
    name = quote(call.request.path_params["id"], safe="")
    return await relay_parts(call.proxy, call.request, f"/v1/captures/{name}")


async def get_weights(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/weights")


async def list_tensors(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/weights/tensors")


async def check_weights(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, call.body, "/v1/weights/check")


async def plan_weights(call: HandlerCall) -> Response:
    return await relay(call.proxy, call.request, call.body, "/v1/weights/plan")


async def put_buffer(call: HandlerCall) -> Response:
    """A part of new weights, of any size; the engine knows how large it may be."""
    asked = [call.request.path_params[name] for name in ("transfer", "index")]
    transfer, index = (quote(part, safe="") for part in asked)
    return await relay_upload(call.proxy, call.request, f"/v1/weights/buffers/{transfer}/{index}")


async def commit_weights(call: HandlerCall) -> Response:
    """The engine brings it to its end, also if the client hangs up meanwhile."""
    return await relay(call.proxy, call.request, call.body, "/v1/weights/commit")


async def describe(call: HandlerCall) -> Response:
    return await describe_engine(call.proxy, call.request)


async def examples(call: HandlerCall) -> Response:
    return Response(call.examples, media_type=JSON)


async def health(call: HandlerCall) -> Response:
    return await health_response(call.proxy)


async def metrics(call: HandlerCall) -> Response:
    return await metrics_response(call.proxy)


async def openapi(call: HandlerCall) -> Response:
    body = msgspec.json.encode(call.request.app.openapi())
    return Response(body, media_type=JSON)


async def page(call: HandlerCall) -> Response:
    return call.site.page()


async def asset(call: HandlerCall) -> Response:
    return call.site.asset(call.request.path_params["path"])


async def _checked_relay(call: HandlerCall, path: str) -> Response:
    check_json_shape(call.body or b"", call.proxy.settings.limits)
    return await relay(call.proxy, call.request, call.body, path)


def _probe_path(request: Request) -> str:
    return f"/v1/probes/{_name(request, 'probe')}"


def _vector_path(request: Request) -> str:
    return f"/v1/steering/vectors/{_name(request, 'vector')}"


def _name(request: Request, kind: str) -> str:
    name = request.path_params["name"]
    if ".." in name:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"no {kind}'s name holds ..", code=kind)
    return quote(name, safe="")


def _after(request: Request) -> int:
    """A browser that comes back says it in a header; others may say it in the address."""
    given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not given.isascii() or not given.isdecimal() or len(given) > 18:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, "the number of an event is a whole number from 0 on"
        )
    return int(given)


HANDLERS: Final[dict[str, Handler]] = {
    handler.__name__: handler
    for handler in (
        *(chat, completions, resume, stop, amend, models, tokenize, detokenize, list_probes),
        put_probe,
        *(remove_probe, get_steering, set_steering, list_vectors, get_vector, put_vector),
        *(list_captures, get_capture),
        *(get_weights, list_tensors, check_weights, plan_weights, put_buffer, commit_weights),
        *(remove_vector, describe, examples, health, metrics, openapi, page, asset),
    )
}
