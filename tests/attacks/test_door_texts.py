"""Texts of clients where they could be read as something else: headers, logs, the host's paths."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from clairai.proxy.observe.log_lines import FIELDS, JsonLines, TextLines, access_fields
from clairai.proxy.observe.observer import CompletionEnd
from tests.http.answers import CHAT, asking
from tests.http.fake import Exchange
from tests.http.fake_server import ROOT
from tests.http.world import World, world

FORGED = "chatcmpl-a\x1b[2Jb status=200 outcome=done\nerror: 0 \u202egnp.exe" + "x" * 60_000


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("w")) as made:
        yield made


def sent(w: World, *lines: bytes) -> int:
    """The status that a request with these header lines gets."""
    host, port = w.url.removeprefix("http://").split(":")
    body = json.dumps(asking()).encode()
    head = [f"POST {CHAT} HTTP/1.1".encode(), b"Host: localhost", *lines]
    head += [b"Content-Length: %d" % len(body), b"Connection: close"]
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(b"\r\n".join([*head, b"", body]))
        return int(sock.recv(1 << 16).split()[1])


@pytest.mark.attack(210)
@pytest.mark.parametrize(
    "value",
    [
        b"a b",
        b"a=b",
        b"a\x1b[31m",
        b"x" * 129,
        b"x" * 60_000,
        "é".encode(),
        b"",
        b'"',
        b"a/b",
        b"a:b",
    ],
)
def test_a_request_id_that_is_no_label_is_refused(w: World, value: bytes) -> None:
    w.upstream.forget()
    assert sent(w, b"X-Request-Id: " + value) == 400
    assert sent(w, b"X-Request-Id: a", b"X-Request-Id: b") == 400
    assert w.upstream.seen == []
    assert sent(w, b"X-Request-Id: job-7_a.b") == 200
    headers = {name.lower(): value for name, value in w.upstream.last.headers.items()}
    assert headers["x-request-id"] != "job-7_a.b"  # vLLM's id is the proxy's own


@pytest.mark.attack(211)
@pytest.mark.parametrize("byte", [b"\x1b", b"\x01", b"\x07", b"\x7f", b"\x0b", b"\x0c"])
def test_a_control_character_in_a_header_is_refused(w: World, byte: bytes) -> None:
    assert sent(w, b"X-Any: a" + byte + b"b") == 400


@pytest.mark.attack(212)
@pytest.mark.parametrize(
    "origin",
    [b"http://[", b"http://]", b"http://[::1", b"//[", b"http://a:b:c", b"\xff", b"http://"],
)
def test_an_origin_that_is_none_is_refused_as_foreign(w: World, origin: bytes) -> None:
    assert sent(w, b"Origin: " + origin) == 403


@pytest.mark.attack(213)
@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"deflate, gzip", b"zstd", b"x"])
def test_a_compressed_body_is_refused(w: World, encoding: bytes) -> None:
    assert sent(w, b"Content-Encoding: " + encoding) == 415
    assert sent(w, b"Content-Encoding: identity") == 200


@pytest.mark.attack(214)
def test_a_text_of_a_client_forges_no_field_and_no_line_of_a_log() -> None:
    end = CompletionEnd(FORGED, "m", CHAT, "error", 1.0, ())
    record = logging.LogRecord("clairai.access", logging.INFO, "", 0, "completion", None, None)
    setattr(record, FIELDS, access_fields(end))
    text, parsed = TextLines().format(record), json.loads(JsonLines().format(record))
    assert text.isprintable()
    assert len(text) < 500
    fields = json.JSONDecoder().raw_decode(text[text.index("response=") + len("response=") :])[0]
    assert fields == FORGED[:128]
    before = text[: text.index("response=")]
    assert "outcome=error" in before
    assert "outcome=done" not in before
    assert (parsed["outcome"], len(parsed["response"]) < 200) == ("error", True)
    assert parsed["response"].isprintable()


@pytest.mark.attack(215)
def test_other_libraries_messages_do_not_move_the_cursor() -> None:
    record = logging.LogRecord("aiohttp", logging.ERROR, "", 0, "a\x1b[2J\r b\n c", None, None)
    assert TextLines().format(record) == "error: a\\x1b[2J\\r b"


@pytest.mark.attack(216)
def test_no_answer_shows_a_path_of_the_engines_machine(w: World) -> None:
    async def failing(exchange: Exchange) -> web.StreamResponse:
        return exchange.refuse(500, f"FileNotFoundError: {ROOT}/config.json")

    with w.client() as client:
        models = client.get("/v1/models")
        w.upstream.script = failing
        failed: Any = client.post(CHAT, json=asking())
        plain: Any = client.post(CHAT, json={"messages": []})
        answers = (models, failed, plain, client.get("/health"), client.get("/v1/clairai"))
    w.upstream.forget()
    assert not [answer.text for answer in answers if "/srv" in answer.text]
    assert models.json()["data"][0]["root"] == models.json()["data"][0]["id"]
    assert failed.status_code == plain.status_code == 500
    assert "FileNotFoundError" in plain.text
