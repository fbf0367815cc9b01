"""A plain request is answered with the bytes that h11 would have written."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from clairai.proxy.proxy_settings import Limits, Timeouts
from clairai.proxy.request_head import RequestHead, read_head
from tests.http.answers import CHAT
from tests.http.world import World, world

DATE = re.compile(rb"date: [^\r]*", re.IGNORECASE)
LIMIT = 100_000


def raw(method: str, path: str, *lines: str, body: bytes = b"", length: int | None = None) -> bytes:
    declared = [f"Content-Length: {len(body) if length is None else length}"] if body else []
    head = (f"{method} {path} HTTP/1.1", "Host: localhost", *lines, *declared)
    return "\r\n".join((*head, "", "")).encode() + body


def chat(*lines: str, **fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    return raw("POST", CHAT, *lines, body=body)


# Each is a list of what is sent, one after the other answer on the same connection.
TABLE: dict[str, list[bytes]] = {
    "live": [raw("GET", "/health/live")],
    "twice": [raw("GET", "/health/live"), raw("GET", "/health/live", "X-Request-Id: a")],
    "close": [raw("GET", "/health/live", "Connection: close")],
    "Close": [raw("GET", "/health/live", "Connection: Close")],
    "keep-alive": [raw("GET", "/v1/models", "Connection: Keep-Alive"), raw("GET", "/v1/models")],
    "no route": [raw("GET", "/nowhere")],
    "no method": [raw("PUT", CHAT, body=b"{}")],
    "escapes": [raw("GET", "/v1/scores/%e2%80%ae%ff%00?a=%zz&b")],
    "another host": [raw("GET", "/health/live").replace(b"localhost", b"evil")],
    "values": [raw("GET", "/health/live", "A:  b \t", "A:", "B: \xe9", "A: c\td")],
    "a page's": [chat("Origin: http://elsewhere")],
    "compressed": [chat("Content-Encoding: gzip")],
    "chat": [chat(), chat(stream=True)],
    "scored": [chat(clairai={}), chat(clairai={}, stream=True), chat(stream=True)],
    "bad JSON": [raw("POST", CHAT, body=b"{"), chat()],
    "too large": [raw("POST", CHAT, body=b"x" * 10, length=LIMIT + 1)],
    "large": [raw("POST", CHAT, body=b'{"a":"%s"}' % (b"x" * (LIMIT - 100))), chat()],
    "a body nobody reads": [raw("GET", "/health/live", body=b"abc"), raw("GET", "/health/live")],
    "not all of a body": [raw("GET", "/health/live", body=b"abc", length=5)],
    "a late body": [raw("POST", CHAT, body=b"abc", length=9)],
    "another at once": [raw("GET", "/health/live") * 2],
    "another behind a body": [chat(stream=True) + raw("GET", "/health/live")],
    "leave": [raw("DELETE", "/v1/runs/x")],
    "the page": [raw("GET", "/")],
}
# What ends these is that the rest of a body does not come in time.
UNFINISHED = ("not all of a body", "a late body")


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    # Nobody who sends a whole request is late; who does not, is found to be late soon.
    patient = Timeouts(head=600.0, body=1.0, idle=600.0, finish=20.0)
    limits = Limits(body_bytes=LIMIT)
    with world(tmp_path_factory.mktemp("w"), timeouts=patient, limits=limits) as made:
        yield made


def exchange(w: World, sent: list[bytes], *, says_end: bool) -> bytes:
    """All that comes back until the proxy closes; each is sent when the one before is answered.

    The proxy closes because the client says that nothing follows, or else by a time-out.
    """
    host, port = w.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        for one in sent:
            sock.sendall(one)
            answer += read_answer(sock)
        if says_end:
            with contextlib.suppress(OSError):  # it has closed by itself
                sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(1 << 16):
            answer += part
    return DATE.sub(b"", answer)


def read_answer(sock: socket.socket) -> bytes:
    """Up to its end, as its head says where that is."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        part = sock.recv(1)
        if not part:
            return answer
        answer += part
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", answer)
    if length is not None:
        end = len(answer) + int(length[1])
        while len(answer) < end and (part := sock.recv(end - len(answer))):
            answer += part
        return answer
    while not answer.endswith(b"\r\n0\r\n\r\n") and (part := sock.recv(1)):
        answer += part
    return answer


@pytest.mark.parametrize("name", TABLE)
def test_both_ways_write_the_same_bytes(
    w: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says_end = name not in UNFINISHED
    plain = exchange(w, TABLE[name], says_end=says_end)
    monkeypatch.setattr(RequestHead, "is_plain", property(lambda _: False))
    assert joined(plain) == joined(exchange(w, TABLE[name], says_end=says_end))
    assert plain.startswith(b"HTTP/1.1 ")


def joined(answer: bytes) -> bytes:
    """Chunks may be cut where the bytes of a stream happened to come in two parts."""
    return re.sub(rb"\r\n[0-9a-f]+\r\n(?=data: |: )", b"", answer)


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.0",
        "HEAD / HTTP/1.1",
        "OPTIONS / HTTP/1.1",
        "POST / HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue",
        "GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c",
        "GET / HTTP/1.1\r\nUpgrade: websocket",
        "GET / HTTP/1.1\r\nConnection: close, te",
        "GET / HTTP/1.1\r\nConnection: keep-alive\r\nConnection: close",
    ],
)
def test_whatever_is_negotiated_is_left_to_h11(head: str) -> None:
    first, _, rest = head.partition("\r\n")
    lines = (first, "Host: a", *([rest] if rest else []))
    assert not read_head("\r\n".join(lines).encode(), Limits()).is_plain
