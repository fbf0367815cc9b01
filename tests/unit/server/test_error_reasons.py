"""A failure of vLLM's server names its kind and place, if its exception has no text."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from clairai.server.error_reasons import ErrorReasons


async def answer_as_vllm(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, 500)


def fail(error: Exception) -> None:
    raise error


def client_of(error: Exception) -> TestClient:
    app = FastAPI()
    app.exception_handler(Exception)(answer_as_vllm)
    app.add_middleware(ErrorReasons)
    app.get("/fails")(lambda: fail(error))
    return TestClient(app, raise_server_exceptions=False)


def test_an_exception_without_text_is_named_with_its_place() -> None:
    answer = client_of(AssertionError()).get("/fails")
    error = answer.json()["error"]
    assert answer.status_code == 500
    assert "AssertionError in test_error_reasons.py:" in error["message"]
    assert "/" not in error["message"]


def test_an_exception_with_text_is_answered_as_vllm_does() -> None:
    answer = client_of(RuntimeError("the reason")).get("/fails")
    assert answer.json() == {"error": {"message": "the reason"}}


def test_the_servers_own_log_still_gets_the_exception() -> None:
    app = client_of(AssertionError()).app
    with pytest.raises(AssertionError), TestClient(app) as client:
        client.get("/fails")


def test_a_stream_that_has_begun_is_left_alone() -> None:
    def parts() -> object:
        yield b"some"
        raise AssertionError

    app = FastAPI()
    app.add_middleware(ErrorReasons)
    app.get("/fails")(lambda: StreamingResponse(parts()))  # type: ignore[arg-type]
    with pytest.raises(AssertionError), TestClient(app) as client:
        client.get("/fails")
