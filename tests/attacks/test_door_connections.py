"""Hostile connections: silent, slow, many, or with heads that two servers read differently."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from clairai.proxy.connections import NUM_RESERVED
from clairai.proxy.proxy_settings import Limits, Timeouts
from tests.http.answers import CHAT, asking
from tests.http.world import World, world
from tests.support.ring_engine import until

BODY = json.dumps(asking()).encode()
QUICK = Timeouts(finish=20.0, head=0.2, idle=0.2, body=0.2)
HEAD_S = 2.0  # long enough for a head that is sent at once, on a busy machine too


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("w")) as made:
        yield made


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A proxy that waits a fifth of a second for anything."""
    with world(tmp_path_factory.mktemp("h"), timeouts=QUICK) as made:
        yield made


@contextmanager
def connection(w: World) -> Iterator[socket.socket]:
    host, port = w.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        yield sock


def until_closed(sock: socket.socket) -> bytes:
    """All that the proxy sends until it closes; a timeout if it does not."""
    found = b""
    while part := sock.recv(1 << 16):
        found += part
    return found


def exchanged(w: World, raw: bytes) -> tuple[int, bytes]:
    """The first status, and all of the answer, of bytes after which the proxy has to close."""
    with connection(w) as sock:
        sock.sendall(raw)
        answer = until_closed(sock)
    return int(answer.split()[1]), answer


def head(*lines: bytes, first: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join((first, b"Host: localhost", *lines, b"", b""))


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.attack(220)
@pytest.mark.parametrize(
    "raw",
    [
        head(LENGTH, b"Transfer-Encoding: chunked") + CHUNKS,
        head(b"Transfer-Encoding: chunked", LENGTH) + CHUNKS,
        head(LENGTH, LENGTH) + BODY,
        head(LENGTH, b"Content-Length: 1") + BODY,
        head(b"Content-Length: %d, %d" % (len(BODY), len(BODY))) + BODY,
        head(b"Content-Length: +%d" % len(BODY)) + BODY,
        head(b"Content-Length: 0x10") + BODY,
        head(b"Content-Length: ") + BODY,
        head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity") + CHUNKS,
    ],
)
def test_a_body_that_ends_in_two_places_is_refused(w: World, raw: bytes) -> None:
    w.upstream.forget()
    status, answer = exchanged(w, raw)
    assert (status, answer.count(b"HTTP/1.1 ")) == (400, 1)
    assert w.upstream.seen == []


@pytest.mark.attack(221)
@pytest.mark.parametrize("coding", [b"gzip", b"chunked, chunked", b"xchunked", b"identity", b""])
def test_an_unknown_transfer_coding_is_refused(w: World, coding: bytes) -> None:
    status, answer = exchanged(w, head(b"Transfer-Encoding: " + coding) + CHUNKS)
    assert (status, answer.count(b"HTTP/1.1 ")) == (501, 1)


@pytest.mark.attack(222)
@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\n\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: 1\nX-B: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: 1\rX-B: 2\r\n\r\n",
        head(b"X-A: 1", b" folded: 2", first=b"GET /health HTTP/1.1"),
        head(b"X-A: 1", b"\tfolded", first=b"GET /health HTTP/1.1"),
        head(b"X-A : 1", first=b"GET /health HTTP/1.1"),
        head(b"X A: 1", first=b"GET /health HTTP/1.1"),
        head(b": 1", first=b"GET /health HTTP/1.1"),
        head(b"nothing", first=b"GET /health HTTP/1.1"),
        head(b"X-A: a\0b", first=b"GET /health HTTP/1.1"),
        head(b"X-A: a\x1bb", first=b"GET /health HTTP/1.1"),
        head(b"Host: elsewhere", first=b"GET /health HTTP/1.1"),
        b"GET /health HTTP/1.1\r\n\r\n",
        b"\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_a_head_that_two_servers_could_read_differently_is_refused(w: World, raw: bytes) -> None:
    status, answer = exchanged(w, raw)
    assert (status, answer.count(b"HTTP/1.1 ")) == (400, 1)
    assert b"connection: close" in answer.lower()


@pytest.mark.attack(223)
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"GET http://elsewhere/health HTTP/1.1", 400),
        (b"GET elsewhere HTTP/1.1", 400),
        (b"OPTIONS * HTTP/1.1", 400),
        (b"CONNECT elsewhere:443 HTTP/1.1", 400),
        (b"GET /health#x HTTP/1.1", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET  /health HTTP/1.1", 400),
        (b"G\tT /health HTTP/1.1", 400),
        (b"GET /health", 400),
        (b"GET /health HTTP/1.1 ", 400),
        (b"GET /health HTTP/2.0", 505),
        (b"PRI /health HTTP/2.0", 505),
        (b"GET /health HTTP/0.9", 505),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1", 414),
        (b"GET /health?" + b"x" * 9000 + b" HTTP/1.1", 414),
    ],
)
def test_an_odd_request_line_is_refused(w: World, first: bytes, expected: int) -> None:
    assert exchanged(w, head(first=first))[0] == expected


@pytest.mark.attack(224)
def test_headers_without_end_are_refused_before_they_are_held(w: World) -> None:
    raw = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"x" * (80 << 10)
    assert exchanged(w, raw)[0] == 431
    many = head(*(b"X-%d: 1" % i for i in range(200)), first=b"GET /health HTTP/1.1")
    assert exchanged(w, many)[0] == 431


@pytest.mark.attack(225)
@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: local"])
def test_a_connection_without_a_whole_head_is_closed_in_time(hurried: World, sent: bytes) -> None:
    status, answer = exchanged(hurried, sent)
    assert (status, b"head of a request" in answer) == (408, True)


@pytest.mark.attack(226)
def test_dripping_headers_do_not_keep_a_connection_open(hurried: World) -> None:
    """The time counts from the first byte, whatever follows it."""
    with connection(hurried) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        sock.settimeout(0.02)
        answer = b""
        for _ in range(500):
            try:
                answer += sock.recv(1 << 16)
            except TimeoutError:
                sock.sendall(b"X-A: 1\r\n")
            if answer:
                break
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.attack(227)
def test_an_idle_connection_is_closed_and_its_next_head_is_timed_too(tmp_path: Path) -> None:
    whole = head(first=b"GET /health HTTP/1.1")
    with world(tmp_path, timeouts=Timeouts(finish=20.0, head=600.0, idle=0.2)) as w:
        status, answer = exchanged(w, whole)  # no "Connection: close": idle ends it
    assert (status, answer.count(b"HTTP/1.1 ")) == (200, 1)
    patient = Timeouts(finish=20.0, head=HEAD_S, idle=600.0)
    with world(tmp_path, timeouts=patient) as w, connection(w) as sock:
        sock.sendall(whole)
        first = sock.recv(1 << 16)
        sock.sendall(whole[:20])
        rest = until_closed(sock)
    assert first.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in rest


@pytest.mark.attack(228)
def test_a_dripping_body_is_refused(hurried: World) -> None:
    hurried.upstream.forget()
    for framing in (b"Content-Length: 1000", b"Transfer-Encoding: chunked"):
        status, answer = exchanged(hurried, head(framing) + b"1")
        assert (status, b"connection: close" in answer.lower()) == (408, True)
    assert hurried.upstream.seen == []


@pytest.mark.attack(229)
def test_a_request_before_the_last_is_answered_is_not_read(w: World) -> None:
    """Nor is a request hidden behind a body that was refused before it was read."""
    w.upstream.forget()
    one = head(LENGTH) + BODY
    status, answer = exchanged(w, one + one)
    assert (status, answer.count(b"HTTP/1.1 ")) == (200, 1)
    assert len(w.upstream.seen) == 1
    hidden = head(b"Content-Length: 99999999") + one
    status, answer = exchanged(w, hidden)
    assert (status, answer.count(b"HTTP/1.1 ")) == (413, 1)
    assert len(w.upstream.seen) == 1


@pytest.mark.attack(230)
def test_an_upgrade_is_not_taken_up(w: World) -> None:
    lines = (b"Connection: Upgrade, HTTP2-Settings, close", b"HTTP2-Settings: AAMAAABkAAQ")
    for protocol in (b"h2c", b"websocket"):
        raw = head(*lines, b"Upgrade: " + protocol, first=b"GET /health HTTP/1.1")
        assert exchanged(w, raw)[0] == 200


@pytest.mark.attack(231)
def test_silent_connections_do_not_keep_health_from_being_asked(tmp_path: Path) -> None:
    bounds, patient = Limits(connections=8), Timeouts(finish=20.0, head=600.0)
    with world(tmp_path, limits=bounds, timeouts=patient) as w, ExitStack() as held:
        socks = [held.enter_context(connection(w)) for _ in range(6)]  # one peer's share
        with w.client() as client:
            until(lambda: client.get("/v1/models").status_code == 503)
        for _ in range(3):
            with w.client() as client:
                refused = client.get("/v1/models")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert client.get("/health").status_code == 200
        socks.pop().close()
        with w.client() as client:
            until(lambda: client.get("/v1/models").status_code == 200)


@pytest.mark.attack(232)
def test_beyond_the_reserve_silent_connections_are_closed_at_once(tmp_path: Path) -> None:
    bounds, patient = Limits(connections=8), Timeouts(finish=20.0, head=600.0)
    with world(tmp_path, limits=bounds, timeouts=patient) as w, ExitStack() as held:
        socks = [held.enter_context(connection(w)) for _ in range(6 + NUM_RESERVED + 10)]
        with w.client() as client:
            assert client.get("/health").status_code == 200
        answers = [until_closed(sock) for sock in socks[6 : 6 + 10]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        held.close()
        until(lambda: _get_models(w) == 200)


def _get_models(w: World) -> int:
    with w.client() as client:
        return client.get("/v1/models").status_code


def num_sockets() -> int:
    """Of this process: the proxy's, the fake engine's and those of the test."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)


@pytest.mark.attack(233)
@pytest.mark.parametrize("then", [b"close", b"keep-alive"])
def test_an_answer_that_nobody_takes_does_not_keep_its_connection(
    tmp_path: Path, then: bytes
) -> None:
    quick = Timeouts(finish=20.0, idle=0.2, stalled=0.2)
    body = json.dumps({"prompt": "a" * (6 << 20)}).encode()
    with world(tmp_path, timeouts=quick) as w:
        until(lambda: w.proxy.feed.is_attached)
        before = num_sockets()
        with connection(w) as sock:
            lines = (b"Connection: " + then, b"Content-Length: %d" % len(body))
            sock.sendall(head(*lines, first=b"POST /tokenize HTTP/1.1") + body)
            assert sock.recv(12).startswith(b"HTTP/1.1 200")
            until(lambda: num_sockets() <= before + 1)  # the test's own


@pytest.mark.attack(234)
def test_every_refusal_is_counted_by_its_status(tmp_path: Path) -> None:
    with world(tmp_path, timeouts=Timeouts(finish=20.0, head=HEAD_S, idle=600.0)) as w:
        exchanged(w, b"GET /health HTTP/1.1\n\n")
        exchanged(w, b"GET")
        exchanged(w, head(b"Content-Length: 99999999"))
        with w.client() as client:
            client.get("/health", headers={"Host": "elsewhere"})
            client.post(CHAT, content=b"[" * 100)
        assert dict(w.proxy.counts().refused) == {400: 2, 408: 1, 413: 1, 421: 1}
