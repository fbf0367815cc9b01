"""What a client sends: bodies and headers at the proxy's door, bodies at the API server's door."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from clairai.errors import ClairaiError
from clairai.fields.request_body import check_text
from clairai.fields.request_fields import KEY
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.proxy.completions.completion_request import read_request
from clairai.proxy.proxy_settings import Limits, ProxySettings
from clairai.proxy.request_guard import check_access, check_header_text, check_headers
from clairai.proxy.responses import HttpRefusal
from clairai.proxy.routes import ROUTES
from clairai.server.request_check import read_completion
from tests.fuzz.spans import JSON_VALUES, json_spans
from tests.fuzz.target import Target
from tests.fuzz.targets.requests import asked_objects, dump, plain_body, steering_vectors

STREAM = 7
LIMITS = Limits()
SETTINGS = ProxySettings("http://127.0.0.1:1", api_key="secret")
CHANGING = next(route for route in ROUTES if route.changes and route.right == "admin")


def targets() -> list[Target]:
    refusals = (ClairaiError, HttpRefusal)
    shared: dict[str, Any] = {"find_spans": json_spans, "values": JSON_VALUES}
    return [
        Target("proxy_body", parse_at_proxy, _proxy_bodies(), refusals, share=0.5, **shared),
        Target("server_body", parse_at_server, _server_bodies(), share=0.5, **shared),
        Target("request_headers", parse_headers, _headers(), refusals, share=2.0),
    ]


def _proxy_bodies() -> list[bytes]:
    bodies = [dump(plain_body() | {KEY: asked | {"probes": ["a"]}}) for asked in asked_objects()]
    bodies += [
        dump(plain_body() | {KEY: {"events": "named", "probes": "all"}, "vllm_xargs": {"x": 1}})
    ]
    bodies += [
        dump({"prompt": "a", "steering_vectors": steering_vectors(), "return_token_ids": True})
    ]
    bodies += [
        dump({"prompt": [1, 2], "echo": False, "decode_steering_vectors": steering_vectors()})
    ]
    bodies += [dump({"prompt": "a", KEY: {}, "use_beam_search": False, "n": 1})]
    # As laxer parsers read them, for which no search finds a key.
    return [*bodies, *(bodies[0].decode().encode(name) for name in ("utf-16", "utf-32-be"))]


def _server_bodies() -> list[bytes]:
    bodies = [plain_body() | {"vllm_xargs": {KEY: json.dumps(asked)}} for asked in asked_objects()]
    bodies += [plain_body() | {"vllm_xargs": {KEY: asked, "other": 1}} for asked in asked_objects()]
    bodies += [{"prompt": ["a", "b"], "prefill_steering_vectors": steering_vectors()}]
    bodies += [{"prompt": "a", "vllm_xargs": {"steering_vectors": json.dumps(steering_vectors())}}]
    return [dump(body) for body in bodies]


def _headers() -> list[bytes]:
    return [
        b"authorization: Bearer secret\norigin: http://localhost:6969\nhost: localhost:6969",
        b"host: [::1]:6969\norigin: https://[::1]:6969\nauthorization: bearer secret",
        b"host: 127.0.0.1\nsec-fetch-site: cross-site\norigin: null\nx-request-id: a",
        b"origin: http://[\nhost: [",
    ]


def parse_at_proxy(data: bytes) -> None:
    """What the proxy accepts the API server reads, and both see the same in it."""
    scored = read_request(data, LIMITS)
    if scored is None:
        assert not _has_fields_for_vllm(data), "fields of ours go upstream unread"
        return
    try:
        server = read_completion(scored.body(STREAM))
    except ClairaiError:
        return
    assert server is not None, "the API server cannot read what the proxy sends"
    assert server.fields.stream == STREAM
    assert scored.is_steered or not server.fields.steer
    assert scored.options.has_rules or not server.fields.stop
    assert server.asks_for_capture == scored.options.is_captured


def _has_fields_for_vllm(data: bytes) -> bool:
    """Whether a laxer parser, such as vLLM's, finds fields of ours that stand beside its own."""
    if len(data) > 4096:
        return False
    try:
        lax = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(lax, dict) and bool({KEY, *FIELD_PHASES} & {k for k, v in lax.items() if v})


def parse_at_server(data: bytes) -> None:
    """What is accepted reads as the same once it is written again, with its stream."""
    check_text(data)
    request = read_completion(data)
    if request is None:
        return
    again = read_completion(request.encode(STREAM, ()))
    assert again is not None
    is_drawn = request.fields.drawn or request.fields.stream != STREAM
    assert (
        again.fields.to_json() == replace(request.fields, stream=STREAM, drawn=is_drawn).to_json()
    )


def parse_headers(data: bytes) -> None:
    pairs = [line.partition(b":")[::2] for line in data.split(b"\n")]
    headers = [(name.strip().lower(), value.strip()) for name, value in pairs]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    request = Request(scope)
    check_headers(request.headers, LIMITS)
    check_header_text(request.headers)
    caller = check_access(request, CHANGING, SETTINGS)
    assert caller is not None
