"""One function for each route of the table, by its name there; takes a call, gives the answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from clairai.stream import reading
from clairai.stream.complete import complete
from clairai.stream.proxy import Proxy
from clairai.stream.refusal import Refused
from clairai.stream.relay import relay, relay_parts, relay_upload
from clairai.stream.shape import check_shape
from clairai.stream.site import Site


@dataclass(frozen=True)
class Call:
    """A request that was let in, and its body."""

    proxy: Proxy
    site: Site
    examples: bytes
    request: Request
    body: bytes | None


Handler = Callable[[Call], Coroutine[Any, Any, Response]]


async def chat(call: Call) -> Response:
    return await complete(call.proxy, call.request, call.body or b"", "/v1/chat/completions")


async def completions(call: Call) -> Response:
    return await complete(call.proxy, call.request, call.body or b"", "/v1/completions")


async def resume(call: Call) -> Response:
    """Events after the last one the client has; never a second generation."""
    run = call.proxy.runs.get(call.request.path_params["run"])
    after = _after(call.request)
    if after > run.last:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            f"the run is at event {run.last}; give one that it had",
        )
    if not run.reaches(after):
        raise Refused(HTTPStatus.GONE, "the events after that one are no longer held")
    if run.is_over and after == run.last:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # an EventSource asks no more
    return call.proxy.runs.answer(run, after)


async def stop(call: Call) -> Response:
    call.proxy.runs.stop(call.proxy.runs.get(call.request.path_params["run"]))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def amend(call: Call) -> Response:
    """A run's request goes on steered otherwise."""
    run = call.proxy.runs.get(call.request.path_params["run"])
    if run.is_over:
        raise Refused(HTTPStatus.CONFLICT, "the run has ended; nothing of it is left to steer")
    return await _checked_relay(call, f"/v1/steering/requests/{run.stream}")


async def models(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/models")


async def tokenize(call: Call) -> Response:
    return await _checked_relay(call, "/tokenize")


async def detokenize(call: Call) -> Response:
    return await _checked_relay(call, "/detokenize")


async def list_probes(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/probes")


async def put_probe(call: Call) -> Response:
    answer = await relay(call.proxy, call.request, call.body, _probe_path(call.request))
    call.proxy.knowledge.forget_bank()
    return answer


async def remove_probe(call: Call) -> Response:
    answer = await relay(call.proxy, call.request, None, _probe_path(call.request))
    call.proxy.knowledge.forget_bank()
    return answer


async def get_steering(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/steering")


async def set_steering(call: Call) -> Response:
    return await _checked_relay(call, "/v1/steering")


async def list_vectors(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/steering/vectors")


async def get_vector(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, _vector_path(call.request))


async def put_vector(call: Call) -> Response:
    return await relay(call.proxy, call.request, call.body, _vector_path(call.request))


async def remove_vector(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, _vector_path(call.request))


async def list_captures(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/captures")


async def get_capture(call: Call) -> Response:
    """As it comes: rows of a long request are gigabytes."""
    name = quote(call.request.path_params["id"], safe="")
    return await relay_parts(call.proxy, call.request, f"/v1/captures/{name}")


async def get_weights(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/weights")


async def list_tensors(call: Call) -> Response:
    return await relay(call.proxy, call.request, None, "/v1/weights/tensors")


async def check_weights(call: Call) -> Response:
    return await relay(call.proxy, call.request, call.body, "/v1/weights/check")


async def plan_weights(call: Call) -> Response:
    return await relay(call.proxy, call.request, call.body, "/v1/weights/plan")


async def put_buffer(call: Call) -> Response:
    """A part of new weights, of any size; the engine knows how large it may be."""
    asked = [call.request.path_params[name] for name in ("transfer", "index")]
    transfer, index = (quote(part, safe="") for part in asked)
    return await relay_upload(call.proxy, call.request, f"/v1/weights/buffers/{transfer}/{index}")


async def commit_weights(call: Call) -> Response:
    """The engine brings it to its end, also if the client hangs up meanwhile."""
    return await relay(call.proxy, call.request, call.body, "/v1/weights/commit")


async def describe(call: Call) -> Response:
    return await reading.describe(call.proxy, call.request)


async def examples(call: Call) -> Response:
    return Response(call.examples, media_type=reading.JSON)


async def health(call: Call) -> Response:
    return await reading.health(call.proxy)


async def metrics(call: Call) -> Response:
    return await reading.metrics(call.proxy)


async def openapi(call: Call) -> Response:
    body = msgspec.json.encode(call.request.app.openapi())
    return Response(body, media_type=reading.JSON)


async def page(call: Call) -> Response:
    return call.site.page()


async def asset(call: Call) -> Response:
    return call.site.asset(call.request.path_params["path"])


async def _checked_relay(call: Call, path: str) -> Response:
    check_shape(call.body or b"", call.proxy.settings.limits)
    return await relay(call.proxy, call.request, call.body, path)


def _probe_path(request: Request) -> str:
    return f"/v1/probes/{_name(request, 'probe')}"


def _vector_path(request: Request) -> str:
    return f"/v1/steering/vectors/{_name(request, 'vector')}"


def _name(request: Request, kind: str) -> str:
    name = request.path_params["name"]
    if ".." in name:
        raise Refused(HTTPStatus.BAD_REQUEST, f"no {kind}'s name holds ..", code=kind)
    return quote(name, safe="")


def _after(request: Request) -> int:
    """A browser that comes back says it in a header; others may say it in the address."""
    given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not given.isascii() or not given.isdecimal() or len(given) > 18:
        raise Refused(HTTPStatus.BAD_REQUEST, "the number of an event is a whole number from 0 on")
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
