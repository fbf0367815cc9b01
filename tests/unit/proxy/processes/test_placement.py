"""Which process answers a request, from its head alone."""

from __future__ import annotations

import pytest

from clairai.proxy.access_keys import AccessKey
from clairai.proxy.completions.named_runs import NamedRuns, process_of_run
from clairai.proxy.processes.placement import Place, place_request
from clairai.proxy.proxy_settings import ProxySettings

KEY = "a-key-of-somebody"
OPEN = ProxySettings("http://127.0.0.1:8000")
LOCKED = ProxySettings("http://127.0.0.1:8000", keys=(AccessKey.of(KEY, name="me"),))


def place(line: str, *headers: str, settings: ProxySettings = OPEN) -> Place:
    head = "\r\n".join([f"{line} HTTP/1.1", "Host: a", *headers])
    return place_request(f"{head}\r\n\r\nbody".encode("latin-1"), settings)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions?a=b", "/v1/responses", "/v1/messages"),
        *("/v1/embeddings", "/v1/audio/transcriptions", "/v1/chat/%63ompletions"),
    ],
)
def test_completions_are_for_completion_processes(path: str) -> None:
    assert place(f"POST {path}").kind == "completion"


@pytest.mark.parametrize(
    "line",
    [
        *("GET /health", "GET /metrics", "GET /", "PUT /v1/probes/a", "GET /v1/models"),
        *("GET /v1/chat/completions", "POST /v1/chat/completions/", "POST /tokenize"),
        *("POST /collective_rpc", "GET /v1/responses/resp_1", "POST /v1/responses/x/cancel"),
        *("GET /v1/runs/abc", "GET /v1/runs/", "POST /v1/scores/x", "GET /v1/scores/a/b"),
    ],
)
def test_everything_else_is_for_the_first_process(line: str) -> None:
    assert place(line).kind == "first"


@pytest.mark.parametrize("number", [0, 1, 31])
def test_a_run_is_found_by_its_id_which_nobody_can_guess(number: int) -> None:
    run, another = (NamedRuns(OPEN, number).new().id for _ in range(2))
    assert (len(run), len({run[:30], another[:30]})) == (32, 2)
    for line in (f"GET /v1/runs/{run}?after=3", f"DELETE /v1/runs/{run}"):
        assert place(line) == Place("run", number)
    assert place(f"POST /v1/runs/{run}/steering") == Place("run", number)


def test_the_runs_of_one_process_have_ids_of_128_random_bits() -> None:
    ends = {NamedRuns(OPEN).new().id[-2:] for _ in range(64)}
    assert len(ends) > 8
    assert process_of_run("x" * 32) is None


def test_scores_are_looked_for_with_the_rights_of_the_caller() -> None:
    found = place("GET /v1/scores/chatcmpl-1", f"aUTHORIZATION:  Bearer {KEY} ", settings=LOCKED)
    assert (found.kind, found.id) == ("scores", "chatcmpl-1")
    assert found.caller is not None
    assert found.caller.name == "me"
    for wrong in ("X-Authorization: Bearer a", "Authorization: Bearer wrong", f"A: {KEY}"):
        assert place("GET /v1/scores/chatcmpl-1", wrong, settings=LOCKED).kind == "first"
