"""Every route of the proxy: who may call it, what it may cost. Takes nothing; gives the table.

A route that is not here does not exist: the app is built from this table, and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from clairai.proxy import schema
from clairai.proxy import schema as schema_capture
from clairai.proxy import schema as schema_steering
from clairai.proxy import schema as schema_weights
from clairai.proxy.proxy_settings import Limits

Method = Literal["GET", "POST", "PUT", "DELETE"]
BodyKind = Literal["none", "json", "probe", "vector", "manifest", "file"]


@dataclass(frozen=True)
class Route:
    """`path` as FastAPI writes it. One that changes something refuses other sites' pages."""

    method: Method
    path: str
    handler: str
    needs_key: bool = True
    body: BodyKind = "none"
    changes: bool = False

    def body_limit(self, limits: Limits) -> int:
        """Bytes it reads at most; of a file none: it is passed on as it comes."""
        sizes = {
            "none": 0,
            "file": 0,
            "json": limits.body_bytes,
            "probe": limits.probe_bytes,
            "vector": limits.vector_bytes,
            "manifest": limits.manifest_bytes,
        }
        return sizes[self.body]


ROUTES: Final = (
    Route("POST", "/v1/chat/completions", "chat", body="json", changes=True),
    Route("POST", "/v1/completions", "completions", body="json", changes=True),
    Route("GET", "/v1/runs/{run}", "resume"),
    Route("DELETE", "/v1/runs/{run}", "stop", changes=True),
    Route("POST", "/v1/runs/{run}/steering", "amend", body="json", changes=True),
    Route("GET", "/v1/models", "models"),
    Route("POST", "/tokenize", "tokenize", body="json", changes=True),
    Route("POST", "/detokenize", "detokenize", body="json", changes=True),
    Route("GET", "/v1/probes", "list_probes"),
    # A probe's name may hold slashes.
    Route("PUT", "/v1/probes/{name:path}", "put_probe", body="probe", changes=True),
    Route("DELETE", "/v1/probes/{name:path}", "remove_probe", changes=True),
    Route("GET", "/v1/steering", "get_steering"),
    Route("POST", "/v1/steering", "set_steering", body="json", changes=True),
    Route("GET", "/v1/steering/vectors", "list_vectors"),
    # So may a vector's.
    Route("GET", "/v1/steering/vectors/{name:path}", "get_vector"),
    Route("PUT", "/v1/steering/vectors/{name:path}", "put_vector", body="vector", changes=True),
    Route("DELETE", "/v1/steering/vectors/{name:path}", "remove_vector", changes=True),
    Route("GET", "/v1/captures", "list_captures"),
    Route("GET", "/v1/captures/{id}", "get_capture"),
    Route("GET", "/v1/weights", "get_weights"),
    Route("GET", "/v1/weights/tensors", "list_tensors"),
    Route("POST", "/v1/weights/check", "check_weights", body="manifest", changes=True),
    Route("POST", "/v1/weights/plan", "plan_weights", body="manifest", changes=True),
    Route("PUT", "/v1/weights/buffers/{transfer}/{index}", "put_buffer", body="file", changes=True),
    Route("POST", "/v1/weights/commit", "commit_weights", body="manifest", changes=True),
    Route("GET", "/v1/clairai", "describe"),
    Route("GET", "/v1/examples", "examples"),
    Route("GET", "/health", "health", needs_key=False),
    Route("GET", "/metrics", "metrics"),
    Route("GET", "/openapi.json", "openapi"),
    Route("GET", "/", "page", needs_key=False),
    Route("GET", "/assets/{path:path}", "asset", needs_key=False),
)


# MERGED
# Takes the route table; gives the OpenAPI document: what each route takes and answers.


_REF: Final = "#/components/schemas/{model}"
_LINE: Final = {"type": "string"}
_FRAME: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"id": _LINE, "event": _LINE, "data": _LINE},
    "required": ["data"],
}
_STREAM: Final[dict[str, Any]] = {"text/event-stream": {"schema": _FRAME}}
_OBJECT: Final[dict[str, Any]] = {"application/json": {"schema": {"type": "object"}}}
_TEXT: Final[dict[str, Any]] = {"text/plain": {"schema": {"type": "string"}}}
_FILE: Final[dict[str, Any]] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}
_NAME: Final = ("name", "path", _LINE)
_NUMBER: Final[dict[str, Any]] = {"type": "integer", "minimum": 0}
_SUMMARIES: Final = {
    "chat": "OpenAI chat completion; with `clairai`, with scores",
    "completions": "OpenAI completion; with `clairai`, with scores",
    "resume": "The events of a named run, from where the client was",
    "stop": "Stop a named run",
    "amend": "Steer the rest of a named run otherwise",
    "models": "The engine's models",
    "tokenize": "The engine's tokens of a text",
    "detokenize": "The text of some tokens",
    "list_probes": "The bank of probes",
    "put_probe": "Create or replace a probe; the body is a probe file",
    "remove_probe": "Take a probe out of the bank",
    "get_steering": "What steers every request",
    "set_steering": "Change what steers every request from now on",
    "list_vectors": "The steering vectors that have a name",
    "get_vector": "A steering vector as a safetensors file",
    "put_vector": "Name a steering vector; the body is safetensors, GGUF or the seeds' JSON",
    "remove_vector": "Forget a steering vector; running requests keep it",
    "list_captures": "What was captured last, and how its consumers are",
    "get_capture": "A request's captured rows as a safetensors file, or a range of its bytes",
    "get_weights": "Which weights serve",
    "list_tensors": "What can be sent as new weights",
    "check_weights": "Would these weights be taken?",
    "plan_weights": "The same; their buffers may now come to the engine",
    "put_buffer": "A buffer of a planned hand-over, as a safetensors file",
    "commit_weights": "Serve with the weights that have come",
    "describe": "The engine, and how this proxy reads its ring",
    "examples": "Prompts to try",
    "health": "Whether requests are answered and scored",
    "metrics": "Counts and histograms for Prometheus",
    "openapi": "This document",
    "page": "The dashboard",
    "asset": "A file of the dashboard",
}
_MODELS: Final[dict[str, type[BaseModel]]] = {
    "list_probes": schema.ProbeList,
    "put_probe": schema.ProbeList,
    "remove_probe": schema.ProbeList,
    "amend": schema_steering.Amended,
    "get_steering": schema_steering.Tiers,
    "set_steering": schema_steering.Tiers,
    "list_vectors": schema_steering.VectorList,
    "put_vector": schema_steering.VectorList,
    "remove_vector": schema_steering.VectorList,
    "list_captures": schema_capture.CaptureList,
    "get_weights": schema_weights.WeightsState,
    "list_tensors": schema_weights.TensorList,
    "check_weights": schema_weights.WeightsPlanned,
    "plan_weights": schema_weights.WeightsPlanned,
    "commit_weights": schema_weights.WeightsCommitted,
    "describe": schema.EngineDescription,
    "examples": schema.ExampleList,
    "health": schema.Health,
}
_WITHOUT_BODY: Final = ("stop", "put_buffer")  # they answer with their status alone
_CONTENT: Final[dict[str, dict[str, Any]]] = {
    "chat": {**_OBJECT, **_STREAM},
    "completions": {**_OBJECT, **_STREAM},
    "resume": _STREAM,
    "get_vector": _FILE,
    "get_capture": _FILE,
    "metrics": _TEXT,
    "page": {"text/html": {"schema": {"type": "string"}}},
    "asset": {"*/*": {"schema": {"type": "string", "format": "binary"}}},
}
_MANIFEST: Final[dict[str, Any]] = {
    "application/json": {"schema": {"$ref": _REF.format(model="WeightsManifest")}}
}
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"application/json": {"schema": {"$ref": _REF.format(model="ChatRequest")}}},
    "completions": {
        "application/json": {"schema": {"$ref": _REF.format(model="CompletionRequest")}}
    },
    "tokenize": _OBJECT,
    "detokenize": _OBJECT,
    "put_probe": _FILE,
    "put_vector": _FILE,
    "amend": {"application/json": {"schema": {"$ref": _REF.format(model="Amendment")}}},
    "set_steering": {"application/json": {"schema": {"$ref": _REF.format(model="TiersChange")}}},
    "check_weights": _MANIFEST,
    "plan_weights": _MANIFEST,
    "commit_weights": _MANIFEST,
    "put_buffer": _FILE,
}
_PARAMETERS: Final[dict[str, list[tuple[str, str, dict[str, Any]]]]] = {
    "resume": [
        ("run", "path", {"type": "string"}),
        ("after", "query", _NUMBER),
        ("Last-Event-ID", "header", _NUMBER),
    ],
    "stop": [("run", "path", {"type": "string"})],
    "amend": [("run", "path", {"type": "string"})],
    "put_probe": [_NAME],
    "remove_probe": [_NAME],
    "get_vector": [_NAME],
    "put_vector": [_NAME],
    "remove_vector": [_NAME],
    "list_captures": [("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000})],
    "get_capture": [
        ("id", "path", {"type": "string", "pattern": "^[0-9a-f]{16}$"}),
        ("point", "query", {"type": "array", "items": _LINE}),
        ("choice", "query", {**_NUMBER, "maximum": 65535}),
        ("Range", "header", _LINE),
        ("If-Range", "header", _LINE),
        ("If-None-Match", "header", _LINE),
    ],
    "put_buffer": [
        ("transfer", "path", {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
        ("index", "path", {**_NUMBER, "maximum": 4095}),
    ],
    "commit_weights": [("drain", "query", {"type": "string", "enum": ["wait", "abort"]})],
    "asset": [("path", "path", {"type": "string"})],
}


def describe_route(route: Route) -> dict[str, Any]:
    """What FastAPI is told of a route besides its path and method."""
    name = route.handler
    extra: dict[str, Any] = {
        "parameters": [_parameter(*given) for given in _PARAMETERS.get(name, ())]
    }
    if name in _BODIES:
        extra["requestBody"] = {"required": True, "content": _BODIES[name]}
    return {
        "name": name,
        "operation_id": name,
        "summary": _SUMMARIES[name],
        "response_class": Response,
        "response_model": None,
        "responses": _responses(route),
        "openapi_extra": extra,
    }


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The document, with the parts of streams that no route answers whole."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        models = [(model, "validation") for model in (*schema.PARTS, schema.ErrorBody)]
        _, found = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
        made.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        app.openapi_schema = made
    return app.openapi_schema


def _parameter(name: str, place: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": kind}


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    name = route.handler
    good: dict[str, Any] = {"description": "As asked"}
    if name in _MODELS:
        good["model"] = _MODELS[name]
    elif name not in _WITHOUT_BODY:
        good["content"] = _CONTENT.get(name, _OBJECT)
    made: dict[int | str, dict[str, Any]] = {204 if name in _WITHOUT_BODY else 200: good}
    if name == "resume":
        made[204] = {"description": "The run has ended and the client has all of it"}
    if name in ("put_probe", "put_vector"):
        made[201] = {**good, "description": "Created"}
    if name == "get_capture":
        made[206] = {**good, "description": "The range that was asked for"}
    if name in ("get_vector", "get_capture"):
        made[304] = {"description": "The client has it: If-None-Match names its ETag"}
    if name == "health":
        made[503] = {"description": "Not now", "model": schema.Health}
    made["default"] = {"description": "Refused, and why", "model": schema.ErrorBody}
    return made
