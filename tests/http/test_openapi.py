"""The OpenAPI document: true of every route, for whatever a client makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from clairai.proxy import schema as models
from clairai.proxy.app import create_app
from clairai.proxy.proxy_settings import ProxySettings
from clairai.proxy.routes import ROUTES
from tests.http.answers import CHAT, asking, events
from tests.http.world import World

DOCUMENT: dict[str, Any] = create_app(ProxySettings("http://127.0.0.1:8000")).openapi()
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
schema = schemathesis.openapi.from_dict(DOCUMENT)


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_whatever_is_sent_the_answer_is_one_of_those_promised(
    shared: World, case: Case[Any]
) -> None:
    case.call_and_validate(base_url=shared.url, checks=CHECKS, timeout=20)


def test_every_route_of_the_table_is_in_the_document() -> None:
    found = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }
    assert found == {(route.method, route.path.replace(":path", "")) for route in ROUTES}


def test_the_module_prints_the_document_that_the_proxy_serves(w: World) -> None:
    command = [sys.executable, "-m", "clairai.proxy.schema"]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=50).stdout
    with w.client() as client:
        assert json.loads(printed) == client.get("/openapi.json").json() == DOCUMENT


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("token", models.TokenEvent),
        ("probe_update", models.ProbeUpdateEvent),
        ("probe_final", models.ProbeFinalEvent),
        ("done", models.DoneEvent),
    ],
)
def test_events_are_as_their_models_say(w: World, name: str, model: Any) -> None:
    body = asking(events="named", prompt_scores=True)
    with w.client() as client:
        found = events(client.post(CHAT, json=body).content)
    told = [event.data for event in found if event.name == name]
    assert told
    for data in told:
        msgspec.convert(data, model)
        assert model.__name__ in DOCUMENT["components"]["schemas"]


def test_scores_in_choices_are_as_their_models_say(w: World) -> None:
    body = {**asking(prompt_scores=True), "stream": False}
    with w.client() as client:
        choice = client.post(CHAT, json=body).json()["choices"][0]
    msgspec.convert(choice["probe_scores"], models.ProbeScores)
    msgspec.convert(choice["prompt_scores"], models.PromptScores)
