"""Takes ProxySettings; gives the proxy as an ASGI app: the routes of the table and no others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from clairai.stream import schema
from clairai.stream.health import Health
from clairai.stream.observe import Exposition, Observer
from clairai.stream.settings import ProxySettings
from clairai.stream.table import TABLE

Handler = Callable[..., Awaitable[Response]]


class Proxy:
    """What the handlers share; `app.state.proxy`."""

    def __init__(
        self,
        settings: ProxySettings,
        observers: Sequence[Observer],
        metrics: Exposition | None,
    ) -> None:
        self.settings = settings
        self.observers = (*observers, *(() if metrics is None else (metrics,)))
        self.metrics = metrics
        self.health = Health()


def create_app(
    settings: ProxySettings,
    *,
    observers: Sequence[Observer] = (),
    metrics: Exposition | None = None,
) -> FastAPI:
    """`metrics` observes too, and answers GET /metrics."""
    app = FastAPI(title="clairai", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.proxy = Proxy(settings, observers, metrics)
    for route in TABLE:
        app.add_api_route(
            route.path,
            _unanswered,
            methods=[route.method],
            name=route.handler,
            **DOCUMENTED.get(route.handler, {}),
        )
    made = app.openapi
    app.openapi = lambda: _with_parts(made())  # type: ignore[method-assign]
    return app


async def _unanswered(request: Request) -> Response:
    del request
    return Response(status_code=501)


def _with_parts(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in schema.PARTS:
        made = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(made.pop("$defs", {}))
        schemas[model.__name__] = made
    return document


DOCUMENTED: Final[dict[str, dict[str, Any]]] = {
    "list_probes": {"response_model": schema.ProbeList},
    "put_probe": {"response_model": schema.ProbeList},
    "remove_probe": {"response_model": schema.ProbeList},
    "describe": {"response_model": schema.EngineDescription},
    "examples": {"response_model": schema.ExampleList},
    "health": {"response_model": schema.Health, "responses": {503: {"model": schema.Health}}},
    "chat": {"responses": {400: {"model": schema.ErrorBody}}},
}
