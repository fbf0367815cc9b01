"""An error of upstream reaches the client with a reason, or with its own."""

from __future__ import annotations

import json

import pytest

from clairai.proxy.error_reasons import explain, explain_frame

BLANK = b'{"error":{"message":"","type":"InternalServerError","param":null,"code":500}}'
TOLD = b'{"error":{"message":"no such model","type":"NotFoundError","param":null,"code":404}}'


@pytest.mark.parametrize("body", [BLANK, BLANK.replace(b'""', b'" "'), b"", b" \n"])
def test_an_error_without_a_reason_gets_one(body: bytes) -> None:
    error = json.loads(explain(body, 500, "abc123"))["error"]
    assert "status 500 and gave no reason" in error["message"]
    assert "abc123" in error["message"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)


@pytest.mark.parametrize(
    "body",
    [
        TOLD,
        b"Internal Server Error",
        b'{"detail":"Not Found"}',
        b'{"error":"text"}',
        b"[1]",
        b"\xff",
    ],
)
def test_an_error_with_a_reason_keeps_its_bytes(body: bytes) -> None:
    assert explain(body, 500, "abc123") == body


def test_an_error_in_a_stream_gets_a_reason_too() -> None:
    frame = explain_frame(b"data: " + BLANK + b"\n\n")
    assert frame.endswith(b"}\n\n")
    assert "gave no reason" in json.loads(frame.removeprefix(b"data: "))["error"]["message"]


def test_an_event_of_an_error_gets_a_reason_and_keeps_its_name() -> None:
    blank = (
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":""}}\n\n'
    )
    name, data, *_ = explain_frame(blank).split(b"\n")
    assert name == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert told["type"] == "error"
    assert "gave no reason" in told["error"]["message"]
    assert told["error"]["type"] == "internal_error"
    assert explain_frame(explain_frame(blank)) == explain_frame(blank)


@pytest.mark.parametrize("frame", [b"data: [DONE]\n\n", b"data: " + TOLD + b"\n\n", b": ping\n\n"])
def test_other_frames_keep_their_bytes(frame: bytes) -> None:
    assert explain_frame(frame) == frame
