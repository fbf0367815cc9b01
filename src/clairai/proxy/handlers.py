"""The function that answers each route; `HANDLERS` has them by the names in `routes.py`.

Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from clairai.errors import ConfigError, RequestError, WeightsTornError
from clairai.fields.request_body import (
    BodyFields,
    check_json,
    refuse_form_names,
    refuse_our_keys,
)
from clairai.proxy.caller import Caller
from clairai.proxy.completions.complete import complete, complete_elsewhere
from clairai.proxy.completions.named_runs import NamedRun
from clairai.proxy.dashboard import Dashboard
from clairai.proxy.host_paths import hide_roots
from clairai.proxy.observe.vllm_metrics import fetch_metrics, join_metrics
from clairai.proxy.proxy import Proxy
from clairai.proxy.relay import forwarded_headers, read_whole, relay, relay_parts, relay_upload
from clairai.proxy.responses import HttpRefusal, bad_request
from clairai.proxy.routes import VLLM_ROUTES
from clairai.proxy.schema import ExampleList, Health, Liveness, ReaderState, Readiness
from clairai.proxy.upstream import UpstreamGone, decode_answer

_JSON: Final = "application/json"
_FORMS: Final = "/v1/audio/"
_FORM_PART_BYTES: Final = 1 << 16


class _Error(msgspec.Struct):
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


@dataclass(frozen=True)
class HandlerCall:
    """A request that has passed the guard, and its body."""

    proxy: Proxy
    dashboard: Dashboard
    examples: bytes
    request: Request
    caller: Caller
    body: bytes | None


Handler = Callable[[HandlerCall], Coroutine[Any, Any, Response]]


# Completions and named runs


async def chat(call: HandlerCall) -> Response:
    return await _complete(call, "/v1/chat/completions")


async def completions(call: HandlerCall) -> Response:
    return await _complete(call, "/v1/completions")


async def responses(call: HandlerCall) -> Response:
    return await _complete(call, "/v1/responses")


async def get_scores(call: HandlerCall) -> Response:
    """The scores of an answer so far, by the id that its client was given."""
    kept = call.proxy.kept_scores.copy(call.request.path_params["id"], call.caller)
    try:
        texts = await call.proxy.engine_facts.token_texts()
    except (HttpRefusal, UpstreamGone):
        texts = None  # the engine has ended, or has no route for them: ids are there
    # Millions of scores take longer to write than a token may be late.
    return await asyncio.to_thread(lambda: _json_response(kept.describe(texts)))


async def resume(call: HandlerCall) -> Response:
    """Stream the events after the last one that the client has; nothing is generated again."""
    run = _own_run(call)
    after = _last_event(call.request)
    if after > run.last:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            f"the run is at event {run.last}; give one that it had",
        )
    if not run.has_events_after(after):
        raise HttpRefusal(HTTPStatus.GONE, "the events after that one are no longer held")
    if run.is_over and after == run.last:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # an EventSource does not ask again
    return call.proxy.runs.respond(run, after)


async def stop(call: HandlerCall) -> Response:
    call.proxy.runs.stop(_own_run(call))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def amend(call: HandlerCall) -> Response:
    """Change the steering of the request of a run."""
    run = _own_run(call)
    if run.is_over:
        raise HttpRefusal(HTTPStatus.CONFLICT, "the run has ended; nothing of it is left to steer")
    return await _relay_json(call, f"/v1/steering/requests/{run.stream}")


# Requests that are passed on


async def relay_unchanged(call: HandlerCall) -> Response:
    """Pass the request on to the same path. It must have no parameters."""
    return await relay(call.proxy, call.request, call.body, call.request.scope["path"])


async def models(call: HandlerCall) -> Response:
    """Upstream's models, without the folders that they were loaded from."""
    proxy = call.proxy
    headers = forwarded_headers(proxy, call.request, is_edited=True)
    async with proxy.upstream.ask("GET", "/v1/models", headers=headers) as response:
        answer = await read_whole(proxy.upstream, response)
    if answer.status_code == HTTPStatus.OK:
        answer.body = hide_roots(bytes(answer.body))
        answer.headers["content-length"] = str(len(answer.body))
    return answer


async def relay_json(call: HandlerCall) -> Response:
    """As `relay_unchanged`, with a check of the JSON body."""
    return await _relay_json(call, call.request.scope["path"])


async def relay_vllm(call: HandlerCall) -> Response:
    """A route of vLLM's own: pass it on, and its answer or stream back."""
    path = quote(call.request.scope["path"], safe="/")
    if call.body is None:
        return await relay(call.proxy, call.request, None, path)
    await _refuse_our_fields(call, call.body)
    return await complete_elsewhere(call.proxy, call.request, call.caller, call.body, path)


async def change_probe(call: HandlerCall) -> Response:
    path = f"/v1/probes/{_quote_name(call.request, 'probe')}"
    try:
        return await relay(call.proxy, call.request, call.body, path)
    finally:  # one that was not answered may have happened
        call.proxy.engine_facts.note_change()


async def relay_vector(call: HandlerCall) -> Response:
    path = f"/v1/steering/vectors/{_quote_name(call.request, 'vector')}"
    return await relay(call.proxy, call.request, call.body, path)


async def get_vector(call: HandlerCall) -> Response:
    """Pass the file on as it comes: many readers at once would hold many of them here."""
    path = f"/v1/steering/vectors/{_quote_name(call.request, 'vector')}"
    return await relay_parts(call.proxy, call.request, path)


async def get_capture(call: HandlerCall) -> Response:
    """Pass rows on as they come: those of a long request are gigabytes."""
    name = quote(call.request.path_params["id"], safe="")
    return await relay_parts(call.proxy, call.request, f"/v1/captures/{name}")


async def commit_weights(call: HandlerCall) -> Response:
    """Pass it on; an engine whose load stopped half-way answers nobody, and health says so."""
    answer = await relay_unchanged(call)
    is_torn = _error_code(bytes(answer.body)) == WeightsTornError.code
    if is_torn or answer.status_code == HTTPStatus.OK:
        call.proxy.health.note_commit(is_torn=is_torn)
    return answer


async def put_buffer(call: HandlerCall) -> Response:
    """Pass on a part of new weights, of any size; the engine knows how large it may be."""
    given = [call.request.path_params[name] for name in ("transfer", "index")]
    transfer, index = (quote(part, safe="") for part in given)
    return await relay_upload(call.proxy, call.request, f"/v1/weights/buffers/{transfer}/{index}")


# What the proxy answers itself


async def describe(call: HandlerCall) -> Response:
    """Upstream's description, and how this proxy reads its ring."""
    proxy = call.proxy
    headers = forwarded_headers(proxy, call.request, is_edited=True)
    async with proxy.upstream.ask("GET", "/v1/clairai", headers=headers) as response:
        answer = await read_whole(proxy.upstream, response)
    if answer.status_code != HTTPStatus.OK:
        return answer
    fields: dict[str, Any] = decode_answer(bytes(answer.body), BodyFields, what="/v1/clairai")
    ring = (await proxy.total_counts()).counts.ring
    fields["reader"] = ReaderState(
        delivered=ring.records_delivered,
        lost=ring.records_lost,
        lag=ring.lag,
        orphaned=ring.orphaned,
        attached=ring.attached,
    )
    return _json_response(fields)


async def examples(call: HandlerCall) -> Response:
    return Response(call.examples, media_type=_JSON)


async def health(call: HandlerCall) -> Response:
    found = await call.proxy.health.status()
    model = call.proxy.health.model
    is_serving = found.status in ("ready", "degraded")
    return _json_response(
        Health(
            *(found.status, found.reason, found.since, model, version("clairai")),
            call.proxy.settings.replica,
        ),
        HTTPStatus.OK if is_serving else HTTPStatus.SERVICE_UNAVAILABLE,
    )


async def live(_: HandlerCall) -> Response:
    """That this is answered says it: only the event loop has to turn."""
    return _json_response(Liveness(live=True))


async def ready(call: HandlerCall) -> Response:
    obstacle = await call.proxy.find_obstacle()
    if obstacle is None:
        return _json_response(Readiness(ready=True, reason=None))
    response = _json_response(
        Readiness(ready=False, reason=obstacle.reason), HTTPStatus.SERVICE_UNAVAILABLE
    )
    response.headers["Retry-After"] = str(obstacle.retry_after_s)
    return response


async def metrics(call: HandlerCall) -> Response:
    observer = call.proxy.metrics
    if observer is None:
        raise HttpRefusal(HTTPStatus.NOT_FOUND, "this proxy keeps no metrics")
    # At once: an engine that hangs takes each of them to its limit, and a scrape has ten seconds.
    _, _, others = await asyncio.gather(
        call.proxy.capture_watch.look(),
        call.proxy.health.recent(),
        fetch_metrics(call.proxy.upstream),
    )
    totals = await call.proxy.total_counts()
    format_text = observer.snapshot(totals.counts, totals.times)
    text = await asyncio.to_thread(lambda: join_metrics(format_text(), others))
    return Response(text, headers={"Content-Type": observer.content_type})


async def openapi(call: HandlerCall) -> Response:
    return _json_response(call.request.app.openapi())


async def page(call: HandlerCall) -> Response:
    return call.dashboard.page()


async def asset(call: HandlerCall) -> Response:
    return call.dashboard.asset(call.request.path_params["path"])


HANDLERS: Final[dict[str, Handler]] = {
    **{
        handler.__name__: handler
        for handler in (
            *(chat, completions, responses, get_scores, resume, stop, amend, models, get_vector),
            *(get_capture, put_buffer, commit_weights),
            *(describe, examples, health, live, ready, metrics, openapi, page, asset),
        )
    },
    **{route.handler: relay_vllm for route in VLLM_ROUTES},
    **dict.fromkeys(("put_probe", "remove_probe"), change_probe),
    **dict.fromkeys(("put_vector", "remove_vector"), relay_vector),
    **dict.fromkeys(("tokenize", "detokenize", "set_steering"), relay_json),
    **dict.fromkeys(
        (
            *("list_probes", "get_steering", "list_vectors", "list_captures"),
            *("get_weights", "list_tensors", "check_weights", "plan_weights"),
        ),
        relay_unchanged,
    ),
}


def load_examples(path: Path | None) -> bytes:
    """The answer of GET /v1/examples; ConfigError if the file has no examples."""
    if path is None:
        return msgspec.json.encode(ExampleList(data=[]))
    try:
        return msgspec.json.encode(msgspec.json.decode(path.read_bytes(), type=ExampleList))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} has no examples: {error}") from None


async def _complete(call: HandlerCall, path: str) -> Response:
    return await complete(call.proxy, call.request, call.caller, call.body or b"", path)


def _own_run(call: HandlerCall) -> NamedRun:
    return call.proxy.runs.get(call.request.path_params["run"], call.caller)


async def _relay_json(call: HandlerCall, path: str) -> Response:
    body, bounds = call.body or b"", call.proxy.settings.limits.json_bounds
    try:
        await call.proxy.large_bodies.run(body, lambda: check_json(body, bounds))
    except RequestError as error:
        raise bad_request(error) from None
    return await relay(call.proxy, call.request, call.body, path)


async def _refuse_our_fields(call: HandlerCall, body: bytes) -> None:
    bounds = call.proxy.settings.limits.json_bounds

    def check() -> None:
        check_json(body, bounds)
        refuse_our_keys(body)

    try:
        if call.request.scope["path"].startswith(_FORMS):
            refuse_form_names(await _form_names(call.request, body))
        elif body:
            await call.proxy.large_bodies.run(body, check)
    except RequestError as error:
        raise bad_request(error, param="clairai") from None


async def _form_names(request: Request, body: bytes) -> list[str]:
    """The names of a form's parts, as vLLM's own parser reads them."""

    async def parts() -> AsyncGenerator[bytes, None]:
        for begin in range(0, len(body), _FORM_PART_BYTES):
            yield body[begin : begin + _FORM_PART_BYTES]

    try:
        form = await MultiPartParser(request.headers, parts()).parse()
    except (MultiPartException, KeyError, ValueError):
        raise RequestError("the body is no form; send multipart/form-data") from None
    try:
        return [name for name, _ in form.multi_items()]
    finally:
        await form.close()


def _error_code(body: bytes) -> str | int | None:
    """Of an error in OpenAI's shape; None for anything else."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if error is None else error.code


def _json_response(body: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=_JSON)


def _quote_name(request: Request, kind: str) -> str:
    name = request.path_params["name"]
    if ".." in name:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"no {kind}'s name holds ..", code=kind)
    return quote(name, safe="")


def _last_event(request: Request) -> int:
    """A browser that resumes gives it in a header; others may give it in the query."""
    given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not given.isascii() or not given.isdecimal() or len(given) > 18:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, "the number of an event is a whole number from 0 on"
        )
    return int(given)
