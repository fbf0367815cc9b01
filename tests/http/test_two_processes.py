"""A proxy with two completion processes answers as one without.

Every test of these modules that takes the shared proxy runs here once more, with another proxy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import httpx
import pytest

from tests.http import (
    test_guard,
    test_named_stream,
    test_pass_through,
    test_plain_rows,
    test_plain_stream,
    test_responses,
    test_scores_by_id,
    test_steering,
    test_trouble,
    test_vllm_routes,
)
from tests.http.answers import CHAT, TEXT, asking, chunks, collect_scores
from tests.http.fake import answering
from tests.http.world import World, world
from tests.support.ring_engine import until

MODULES: Final = (
    *(test_guard, test_named_stream, test_pass_through, test_plain_rows, test_plain_stream),
    *(test_responses, test_scores_by_id, test_steering, test_trouble, test_vllm_routes),
)


def _shared_tests(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        f"{name}_of_{module.__name__.rpartition('.')[2]}": test
        for name, test in vars(module).items()
        if name.startswith("test_") and _is_from_outside(test)
    }


def _is_from_outside(test: Callable[..., Any]) -> bool:
    """True if it uses the shared proxy alone, and as a client does."""
    names = inspect.signature(test).parameters
    return "w" in names and "guarded" not in names and "w.proxy" not in inspect.getsource(test)


for _module in MODULES:
    globals().update(_shared_tests(_module))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("w"), completion_processes=2) as made:
        processes = made.proxy.processes
        assert processes is not None
        until(lambda: len(processes.ready_pids()) == 2 and made.proxy.is_reading, 60.0)
        yield made


@pytest.fixture
def w(two: World) -> World:
    two.upstream.forget()
    return two


SCORED: Final = {"messages": [], "clairai": {"probes": "all"}}
# Method, path, body and headers; of every kind that a client sends.
REQUESTS: Final[tuple[tuple[str, str, Any, dict[str, str]], ...]] = (
    ("POST", CHAT, SCORED, {}),
    ("POST", CHAT, asking(probes=["token"]), {}),
    ("POST", CHAT, asking(prompt_scores=True), {}),
    ("POST", CHAT, {"messages": []}, {}),
    ("POST", CHAT, {"messages": [], "stream": True}, {}),
    ("POST", CHAT, {"messages": []}, {"X-Clairai-Scores": "all", "X-Request-Id": "mine"}),
    ("POST", TEXT, {"prompt": "Hi", "clairai": {}}, {}),
    ("POST", "/v1/responses", {"input": "Hi", "clairai": {}}, {}),
    ("POST", CHAT, {"messages": [], "clairai": {"bogus": 1}}, {}),
    ("POST", CHAT, {"messages": [], "clairai": {"probes": ["nobody"]}}, {}),
    ("POST", CHAT, {"messages": [], "n": 100, "clairai": {}}, {}),
    ("POST", CHAT, SCORED, {"Origin": "http://elsewhere.example"}),
    ("POST", CHAT, SCORED, {"Host": "elsewhere.example"}),
    ("POST", CHAT, SCORED, {"Content-Encoding": "gzip"}),
    ("GET", CHAT, None, {}),
    ("DELETE", CHAT, None, {}),
    ("POST", "/v1/chat/completion%73", SCORED, {}),
    ("POST", f"{CHAT}?a=b", SCORED, {}),
    ("GET", "/v1/scores/nothing", None, {}),
    ("GET", "/v1/scores/a%2Fb", None, {}),
    ("GET", "/v1/runs/nothing", None, {}),
    ("GET", f"/v1/runs/{'0' * 30}01", None, {}),
    ("DELETE", f"/v1/runs/{'0' * 30}02", None, {}),
    ("POST", f"/v1/runs/{'0' * 30}7f/steering", {"steer": []}, {}),
    ("POST", "/v1/messages", {"messages": []}, {}),
    ("POST", "/v1/messages", {"messages": [], "clairai": {}}, {}),
    ("POST", "/tokenize", {"prompt": "Hi"}, {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/v1/probes", None, {}),
    ("GET", "/v1/steering", None, {}),
    ("GET", "/v1/examples", None, {}),
    ("GET", "/openapi.json", None, {}),
    ("GET", "/health/live", None, {}),
    ("GET", "/health/ready", None, {}),
    ("GET", "/nothing", None, {}),
    ("GET", "/", None, {}),
)
_VARYING: Final = re.compile(rb'"(?:created|expires|since)":[0-9.]+')


def _read(client: httpx.Client, request: tuple[str, str, Any, dict[str, str]]) -> Any:
    method, path, body, headers = request
    answer = client.request(method, path, json=body, headers=headers)
    # A refusal closes the connection if it comes before the body.
    unlike = ("date", "connection")
    kept = {name: value for name, value in answer.headers.items() if name not in unlike}
    is_streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    # When a score comes in a stream depends on the moment: see the next test.
    content = None if is_streamed else _VARYING.sub(b"", answer.content)
    return answer.status_code, kept, content


def test_every_kind_of_request_is_answered_alike(w: World, shared: World) -> None:
    for made in (w, shared):
        made.upstream.script = answering([72, 105])
    with w.client() as with_two, shared.client() as with_one:
        for request in REQUESTS:
            assert _read(with_two, request) == _read(with_one, request), request


def test_the_streams_of_one_connection_are_alike(w: World, shared: World) -> None:
    for made in (w, shared):
        made.upstream.script = answering([72, 105, 33], [66, 121])
    with w.client() as with_two, shared.client() as with_one:
        for body in (asking(), asking(prompt_scores=True), asking(probes=["position"])):
            found = [
                collect_scores(chunks(one.post(CHAT, json=body).content))
                for one in (with_two, with_one)
            ]
            assert found[0] == found[1]
