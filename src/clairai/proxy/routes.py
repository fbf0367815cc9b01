"""Every route of the proxy: who may call it, what it may cost, what it takes and answers.

The app and the OpenAPI document are built from this table. A route that is not here does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from clairai.proxy import schema
from clairai.proxy.caller import PUBLIC, Access
from clairai.proxy.proxy_settings import Limits
from clairai.weights.manifest import Manifest
from clairai.wire import weights_messages

Method = Literal["GET", "POST", "PUT", "DELETE"]
BodyKind = Literal["none", "json", "form", "probe", "vector", "manifest", "file"]
Struct = type[msgspec.Struct]
Content = dict[str, Any]  # schemas by media type

_STRING: Final = {"type": "string"}
_NUMBER: Final[dict[str, Any]] = {"type": "integer", "minimum": 0}
_FRAME: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"id": _STRING, "event": _STRING, "data": _STRING},
    "required": ["data"],
}
_STREAM: Final[Content] = {"text/event-stream": {"schema": _FRAME}}
_OBJECT: Final[Content] = {"application/json": {"schema": {"type": "object"}}}
_TEXT: Final[Content] = {"text/plain": {"schema": _STRING}}
_HTML: Final[Content] = {"text/html": {"schema": _STRING}}
_BINARY: Final = {"type": "string", "format": "binary"}
_FORM: Final[Content] = {"multipart/form-data": {"schema": {"type": "object"}}}
_FILE: Final[Content] = {"application/octet-stream": {"schema": _BINARY}}
_ANYTHING: Final[Content] = {"*/*": {"schema": {}}}
_ANY_FILE: Final[Content] = {"*/*": {"schema": _BINARY}}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a route, as OpenAPI describes it."""

    name: str
    place: Literal["path", "query", "header"]
    schema: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        is_required = self.place == "path"
        return {"name": self.name, "in": self.place, "required": is_required, "schema": self.schema}


_NAME: Final = Parameter("name", "path", _STRING)
_RUN: Final = Parameter("run", "path", _STRING)
_CAPTURE: Final = (
    Parameter("id", "path", {"type": "string", "pattern": "^[0-9a-f]{16}$"}),
    Parameter("point", "query", {"type": "array", "items": _STRING}),
    Parameter("choice", "query", {**_NUMBER, "maximum": 65535}),
    Parameter("Range", "header", _STRING),
    Parameter("If-Range", "header", _STRING),
    Parameter("If-None-Match", "header", _STRING),
)


@dataclass(frozen=True)
class Route:
    """One route; `path` as FastAPI writes it, `handler` the name of its function in handlers.py.

    A route that changes something refuses pages of other sites. `takes` describes its body,
    `answers` its response: None for one that answers with its status alone. `right` is what a key
    must have, if the proxy has keys; there is no default, so that no route is open by oversight.
    """

    method: Method
    path: str
    handler: str
    summary: str
    right: Access = field(kw_only=True)
    body: BodyKind = "none"
    changes: bool = False
    takes: Struct | Content | None = None
    answers: Struct | Content | None = None
    parameters: tuple[Parameter, ...] = ()
    # Statuses besides that of success, each with its description.
    also: tuple[tuple[int, str], ...] = ()

    @property
    def needs_key(self) -> bool:
        return self.right != PUBLIC

    def body_limit(self, limits: Limits) -> int:
        """The most bytes that are read; none of a file, which is passed on as it comes."""
        if self.body == "json":
            return limits.body_bytes
        sizes = {
            "none": 0,
            "file": 0,
            "form": limits.form_bytes,
            "probe": limits.probe_bytes,
            "vector": limits.vector_bytes,
            "manifest": limits.manifest_bytes,
        }
        return sizes[self.body]


def _pass_on(
    method: Method, path: str, *, right: Access = "read", body: BodyKind = "none"
) -> Route:
    """A route of vLLM's own, whatever it answers; a server without it answers 404."""
    is_inference = method == "POST" and body != "none" and right == "read"
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    return Route(
        *(method, path, f"vllm_{name}"),
        "vLLM's own route",
        right=right,
        body=body,
        changes=method != "GET",
        takes={"json": _OBJECT, "form": _FORM}.get(body),
        answers={**_ANYTHING, **_STREAM} if is_inference else _ANYTHING,
        parameters=tuple(Parameter(one, "path", _STRING) for one in re.findall(r"{(\w+)}", path)),
    )


# Of vLLM 0.32 (entrypoints/*/api_router.py); which of them a server has depends on its model and
# on its settings. They read no fields of ours.
VLLM_ROUTES: Final = (
    *(_pass_on("GET", path) for path in ("/version", "/load", "/ping", "/tokenizer_info")),
    _pass_on("POST", "/ping"),
    _pass_on("GET", "/v1/responses/{response_id}"),
    _pass_on("POST", "/v1/responses/{response_id}/cancel"),
    *(
        _pass_on("POST", path, body="json")
        for path in (
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions/batch"),
            *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"),
            *("/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/systemone"),
            *("/invocations", "/inference/v1/generate", "/cohere/v2/chat"),
            *("/cohere/v2/chat/render", "/v1/chat/completions/render", "/v1/completions/render"),
            *("/v1/messages/render", "/v1/responses/render"),
            *("/v1/chat/completions/derender", "/v1/completions/derender"),
        )
    ),
    *(
        _pass_on("POST", path, body="form")
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations")
    ),
    # What changes the engine for everybody, or tells how it is run.
    *(
        _pass_on("GET", path, right="admin")
        for path in (
            *("/is_paused", "/is_sleeping", "/server_info", "/get_world_size", "/weight_info"),
            *("/fault_tolerance/status", "/kv_event_sources"),
        )
    ),
    *(
        _pass_on("POST", path, right="admin")
        for path in (
            *("/start_profile", "/stop_profile", "/pause", "/resume", "/sleep", "/wake_up"),
            *("/release_kv_cache_memory", "/reset_prefix_cache", "/reset_mm_cache"),
            *("/reset_encoder_cache", "/is_scaling_elastic_ep", "/finish_weight_update"),
            "/shutdown_weight_transfer_engine",
        )
    ),
    *(
        _pass_on("POST", path, right="admin", body="json")
        for path in (
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_requests"),
            *("/inference/v1/abort_requests", "/collective_rpc", "/scale_elastic_ep"),
            *("/fault_tolerance/apply", "/init_weight_transfer_engine", "/start_weight_update"),
            *("/start_draft_weight_update", "/update_weights", "/update_weight_version"),
            "/weight_checker",
        )
    ),
)
_CREATED: Final = (201, "Created")
_UNCHANGED: Final = (304, "The client has it: If-None-Match names its ETag")

ROUTES: Final = (
    Route(
        *("POST", "/v1/chat/completions", "chat"),
        "OpenAI chat completion; with `clairai`, with scores",
        right="read",
        body="json",
        changes=True,
        takes=schema.ChatRequest,
        answers={**_OBJECT, **_STREAM},
    ),
    Route(
        *("POST", "/v1/completions", "completions"),
        "OpenAI completion; with `clairai`, with scores",
        right="read",
        body="json",
        changes=True,
        takes=schema.CompletionRequest,
        answers={**_OBJECT, **_STREAM},
    ),
    Route(
        *("POST", "/v1/responses", "responses"),
        "OpenAI response; with `clairai`, with scores",
        right="read",
        body="json",
        changes=True,
        takes=schema.ResponsesRequest,
        answers={**_OBJECT, **_STREAM},
    ),
    Route(
        *("GET", "/v1/scores/{id}", "get_scores"),
        "The scores of an answer by its id, also while it runs",
        right="read",
        answers=schema.AnswerScores,
        parameters=(Parameter("id", "path", _STRING),),
    ),
    Route(
        *("GET", "/v1/runs/{run}", "resume"),
        "The events of a named run, from where the client was",
        right="read",
        answers=_STREAM,
        parameters=(
            _RUN,
            Parameter("after", "query", _NUMBER),
            Parameter("Last-Event-ID", "header", _NUMBER),
        ),
        also=((204, "The run has ended and the client has all of it"),),
    ),
    Route(
        *("DELETE", "/v1/runs/{run}", "stop"),
        "Stop a named run",
        right="read",
        changes=True,
        parameters=(_RUN,),
    ),
    Route(
        *("POST", "/v1/runs/{run}/steering", "amend"),
        "Change the steering of the rest of a named run",
        right="steer",
        body="json",
        changes=True,
        takes=schema.Amendment,
        answers=schema.Amended,
        parameters=(_RUN,),
    ),
    Route("GET", "/v1/models", "models", "The engine's models", right="read", answers=_OBJECT),
    Route(
        *("POST", "/tokenize", "tokenize"),
        "The engine's tokens of a text",
        right="read",
        body="json",
        changes=True,
        takes=_OBJECT,
        answers=_OBJECT,
    ),
    Route(
        *("POST", "/detokenize", "detokenize"),
        "The text of some tokens",
        right="read",
        body="json",
        changes=True,
        takes=_OBJECT,
        answers=_OBJECT,
    ),
    Route(
        *("GET", "/v1/probes", "list_probes"),
        "The bank of probes",
        right="read",
        answers=schema.ProbeList,
    ),
    Route(  # the name of a probe may hold slashes
        *("PUT", "/v1/probes/{name:path}", "put_probe"),
        "Create or replace a probe; the body is a probe file",
        right="admin",
        body="probe",
        changes=True,
        takes=_FILE,
        answers=schema.ProbeList,
        parameters=(_NAME,),
        also=(_CREATED,),
    ),
    Route(
        *("DELETE", "/v1/probes/{name:path}", "remove_probe"),
        "Remove a probe from the bank",
        right="admin",
        changes=True,
        answers=schema.ProbeList,
        parameters=(_NAME,),
    ),
    Route(
        *("GET", "/v1/steering", "get_steering"),
        "What steers every request",
        right="read",
        answers=schema.Tiers,
    ),
    Route(
        *("POST", "/v1/steering", "set_steering"),
        "Change what steers every request from now on",
        right="admin",
        body="json",
        changes=True,
        takes=schema.TiersChange,
        answers=schema.Tiers,
    ),
    Route(
        *("GET", "/v1/steering/vectors", "list_vectors"),
        "The named steering vectors",
        right="read",
        answers=schema.VectorList,
    ),
    Route(  # the name of a vector may hold slashes
        *("GET", "/v1/steering/vectors/{name:path}", "get_vector"),
        "A steering vector as a safetensors file",
        right="read",
        answers=_FILE,
        parameters=(_NAME,),
        also=(_UNCHANGED,),
    ),
    Route(
        *("PUT", "/v1/steering/vectors/{name:path}", "put_vector"),
        "Name a steering vector; the body is safetensors, GGUF or JSON",
        right="admin",
        body="vector",
        changes=True,
        takes=_FILE,
        answers=schema.VectorList,
        parameters=(_NAME,),
        also=(_CREATED,),
    ),
    Route(
        *("DELETE", "/v1/steering/vectors/{name:path}", "remove_vector"),
        "Forget a steering vector; running requests keep it",
        right="admin",
        changes=True,
        answers=schema.VectorList,
        parameters=(_NAME,),
    ),
    Route(
        *("GET", "/v1/captures", "list_captures"),
        "The newest captures, and the state of their consumers",
        right="capture",
        answers=schema.CaptureList,
        parameters=(
            Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 1000}),
        ),
    ),
    Route(
        *("GET", "/v1/captures/{id}", "get_capture"),
        "A request's captured rows as a safetensors file, or a range of its bytes",
        right="capture",
        answers=_FILE,
        parameters=_CAPTURE,
        also=((206, "The range that was asked for"), _UNCHANGED),
    ),
    Route(
        *("GET", "/v1/weights", "get_weights"),
        "Which weights serve",
        right="weights",
        answers=weights_messages.WeightsState,
    ),
    Route(
        *("GET", "/v1/weights/tensors", "list_tensors"),
        "What can be sent as new weights",
        right="weights",
        answers=schema.TensorList,
    ),
    Route(
        *("POST", "/v1/weights/check", "check_weights"),
        "Would these weights be taken?",
        right="weights",
        body="manifest",
        changes=True,
        takes=Manifest,
        answers=weights_messages.WeightsPlanned,
    ),
    Route(
        *("POST", "/v1/weights/plan", "plan_weights"),
        "The same; the engine then takes their buffers",
        right="weights",
        body="manifest",
        changes=True,
        takes=Manifest,
        answers=weights_messages.WeightsPlanned,
    ),
    Route(
        *("PUT", "/v1/weights/buffers/{transfer}/{index}", "put_buffer"),
        "A buffer of a planned transfer, as a safetensors file",
        right="weights",
        body="file",
        changes=True,
        takes=_FILE,
        parameters=(
            Parameter("transfer", "path", {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
            Parameter("index", "path", {**_NUMBER, "maximum": 4095}),
        ),
    ),
    Route(
        *("POST", "/v1/weights/commit", "commit_weights"),
        "Serve with the weights that were sent",
        right="weights",
        body="manifest",
        changes=True,
        takes=Manifest,
        answers=weights_messages.WeightsCommitted,
        parameters=(Parameter("drain", "query", {"type": "string", "enum": ["wait", "abort"]}),),
    ),
    Route(
        *("GET", "/v1/clairai", "describe"),
        "The engine, and how this proxy reads its ring",
        right="read",
        answers=schema.EngineDescription,
    ),
    Route(
        "GET",
        "/v1/examples",
        "examples",
        "Prompts to try",
        right="read",
        answers=schema.ExampleList,
    ),
    Route(
        *("GET", "/health", "health"),
        "Whether requests are answered and scored",
        right="public",
        answers=schema.Health,
        also=((503, "Not now"),),
    ),
    Route(
        *("GET", "/health/live", "live"),
        "Whether the proxy's event loop turns",
        right="public",
        answers=schema.Liveness,
    ),
    Route(
        *("GET", "/health/ready", "ready"),
        "Whether a completion that is sent now is answered",
        right="public",
        answers=schema.Readiness,
        also=((503, "Not now; Retry-After says when to ask again"),),
    ),
    Route(
        "GET",
        "/metrics",
        "metrics",
        "Counts and histograms for Prometheus",
        right="read",
        answers=_TEXT,
    ),
    Route("GET", "/openapi.json", "openapi", "This document", right="read", answers=_OBJECT),
    Route("GET", "/", "page", "The dashboard", right="public", answers=_HTML),
    Route(
        *("GET", "/assets/{path:path}", "asset"),
        "A file of the dashboard",
        right="public",
        answers=_ANY_FILE,
        parameters=(Parameter("path", "path", _STRING),),
    ),
    *VLLM_ROUTES,
)


def describe_route(route: Route) -> dict[str, Any]:
    """What FastAPI needs to know about a route besides its path and method."""
    extra: dict[str, Any] = {
        "parameters": [
            {
                "name": one.name,
                "in": one.place,
                "required": one.place == "path",
                "schema": one.schema,
            }
            for one in route.parameters
        ]
    }
    if route.takes is not None:
        extra["requestBody"] = {"required": True, "content": _content(route.takes)}
    return {
        "name": route.handler,
        "operation_id": route.handler,
        "summary": route.summary,
        "response_class": Response,
        "response_model": None,
        "responses": _responses(route),
        "openapi_extra": extra,
    }


def openapi_document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        document["components"] = {"schemas": schema.make_components()}
        app.openapi_schema = document
    return app.openapi_schema


def _content(kind: Struct | Content) -> Content:
    if isinstance(kind, dict):
        return kind
    return {
        "application/json": {
            "schema": {"$ref": schema.REF.format(name=schema.component_name(kind))}
        }
    }


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    answer = {} if route.answers is None else {"content": _content(route.answers)}
    success = 204 if route.answers is None else 200
    made: dict[int | str, dict[str, Any]] = {success: {"description": "As asked", **answer}}
    for status, description in route.also:
        has_body = status not in (204, 304)
        made[status] = {"description": description, **(answer if has_body else {})}
    made["default"] = {"description": "Refused, and why", "content": _content(schema.ErrorBody)}
    return made
