"""Takes requests that only look; gives health, the engine's description, examples, metrics."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from clairai.errors import ConfigError
from clairai.stream.proxy import Proxy
from clairai.stream.refusal import Refused
from clairai.stream.relay import headers_of, whole
from clairai.stream.schema import ExampleList

JSON = "application/json"


async def health(proxy: Proxy) -> Response:
    word = await proxy.health.word()
    is_well = word.status in ("ready", "degraded")
    about = {"model": proxy.health.model, "version": version("clairai")}
    body = {"status": word.status, "reason": word.reason, **about}
    return _json(body, HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)


async def describe(proxy: Proxy, request: Request) -> Response:
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
    return _json(fields)


async def metrics(proxy: Proxy) -> Response:
    if proxy.metrics is None:
        raise Refused(HTTPStatus.NOT_FOUND, "this proxy keeps no metrics")
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


def _json(body: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)
