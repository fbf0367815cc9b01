"""Whatever is sent, the proxy answers in HTTP and never with 500: that would be a bug of ours."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clairai.proxy.proxy_settings import Timeouts
from clairai.proxy.routes import ROUTES, Route
from tests.http.answers import CHAT, asking
from tests.http.fake_captures import ID
from tests.http.world import World, world
from tests.support.ring_engine import until

NAMED = asking(events="named")
MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) ")
ODD_VALUES = (
    *(b"9" * 5000, b"1e999", b"-1e400", b"0.1", b"1", b"-1", b"1e-400", b"00", b"true", b"null"),
    *(b"NaN", b'"a"', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b'""', b"\xff", b"[[1]]", b'["a"]'),
)
SCALARS = st.sampled_from(ODD_VALUES)
BESIDE = (
    *(b"n", b"echo", b"prompt", b"stream", b"return_token_ids", b"include_reasoning", b"seed"),
    *(b"use_beam_search", b"vllm_xargs", b"steering_vectors", b"decode_steering_vectors"),
)
WITHIN = (b"probes", b"events", b"prompt_scores", b"steer", b"stop", b"capture", b"unknown")
INNER = (b"vector", b"scale", b"points", b"probe", b"threshold", b"tokens", b"tags", b"when", b"op")


def members(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b",".join(b'"%s":%s' % pair for pair in pairs)


def objects(keys: Sequence[bytes], values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The members of an object with a few of these keys, each once."""
    return st.dictionaries(st.sampled_from(keys), values, max_size=2).map(
        lambda made: members(made.items())
    )


ENTRIES = objects(INNER, SCALARS).map(lambda made: b"[{%s}]" % made)
OPTIONS = objects(WITHIN, SCALARS | ENTRIES)
BODIES = st.tuples(OPTIONS, objects(BESIDE, SCALARS | ENTRIES)).map(
    lambda parts: b'{"messages":[],"clairai":{%s}%s}' % (parts[0], parts[1] and b"," + parts[1])
)
ODD_TEXTS = (b"", b"-1", b"1e3", b"0x1", b"%00", b"%ff", b"%c2%b2", b"%d9%a3", b"9" * 4000, b"a,b")
ODD_QUERIES = (b"", b"=", b"&&", b"%", b"%zz", b"a=%ff&a=%00", b"a[]=1", b"a=1;b=2", b"?" * 50)
STARTS = (b"/v1/probes/", b"/v1/captures/", b"/v1/runs/", b"/assets/", b"/")
ODD_PATHS = (
    *(b"%00", b"%ff", b"%c3%28", b"%ed%a0%80", b"%e2%80%ae", b"%0d%0a", b"%2e%2e", b"%2f", b"%5c"),
    *(b"%", b"%z", b"%7f", b"..", b"../..", b"//", b";a", b"*", b"{x}", b"~", b"x" * 5000, b"%25"),
    *(b"\x00", b"\x7f", b"\x80", b"\xff", b" ", b"\t", b"a%20b", b"%F0%9F%98%80", b".", b"@"),
    *(b"a%%%02x" % byte for byte in range(256)),
)
NAMES = (
    *(b"Origin", b"Authorization", b"Content-Type", b"Content-Encoding", b"Expect", b"Host"),
    *(b"X-Request-Id", b"Last-Event-ID", b"Range", b"If-None-Match", b"Accept-Encoding", b"Via"),
    *(b"Connection", b"Upgrade", b"TE", b"Trailer", b"Cookie", b"Sec-Fetch-Site", b"X-Any"),
    *(b"Access-Control-Request-Method", b"If-Match", b"Forwarded", b"Keep-Alive", b"Referer"),
)
VALUES = (
    *(b"http://[", b"null", b"100-continue", b"close", b"bytes=0-", b"h2c", b"9" * 30, b"", b"a,b"),
    *(b"Bearer \xff", b"a\x1bb", b"text/plain; charset=\xff", b"gzip", b"-1", b"[::1", b"http://a"),
)
REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: a",
    b"GET /v1/models?a=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept: */*",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Length: 0",
)


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    quick = Timeouts(finish=0.01, head=0.3, body=0.3, idle=0.3)
    with world(tmp_path_factory.mktemp("w"), timeouts=quick, allowed_origins=("http://a",)) as made:
        yield made


def statuses(w: World, raw: bytes) -> list[int]:
    """Of every answer until the proxy closes."""
    host, port = w.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(raw)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    return [int(status) for status in STATUS.findall(answer)]


def is_answered(found: list[int]) -> bool:
    """Once, and not with 500; a connection that just ends is no answer either."""
    return 500 not in found and len([status for status in found if status >= 200]) == 1


def post(w: World, body: bytes, *lines: bytes, path: bytes = b"/v1/chat/completions") -> list[int]:
    head = (b"POST %s HTTP/1.1" % path, b"Host: localhost", *lines)
    ends = (b"Content-Length: %d" % len(body), b"Connection: close", b"", body)
    return statuses(w, b"\r\n".join((*head, *ends)))


def odd_bodies() -> Iterator[bytes]:
    """Every field, in every place, with every odd value."""
    for value in ODD_VALUES:
        for name in BESIDE:
            yield b'{"messages":[],"clairai":{},"%s":%s}' % (name, value)
        for name in WITHIN:
            yield b'{"messages":[],"clairai":{"%s":%s}}' % (name, value)
        for name in INNER:
            yield b'{"messages":[],"clairai":{"steer":[{"%s":%s}]}}' % (name, value)
            yield b'{"messages":[],"clairai":{"stop":[{"%s":%s}]}}' % (name, value)


@pytest.mark.attack(250)
def test_no_field_makes_the_proxy_fail(w: World) -> None:
    w.upstream.forget()
    wrong = [body[:80] for body in odd_bodies() if not is_answered(post(w, body))]
    assert wrong == []


@pytest.mark.attack(254)
def test_no_header_makes_the_proxy_fail(w: World) -> None:
    w.upstream.forget()
    lines = [b"%s: %s" % (name, value) for name in NAMES for value in VALUES]
    wrong = [line for line in lines if not is_answered(post(w, b'{"messages":[]}', line))]
    assert wrong == []


@pytest.mark.attack(255)
@MANY
@given(st.sampled_from([b"/v1/chat/completions", b"/v1/completions", b"/v1/steering"]), BODIES)
def test_no_body_makes_the_proxy_fail(w: World, path: bytes, body: bytes) -> None:
    w.upstream.forget()
    assert is_answered(post(w, body, path=path))


def path_of(w: World, route: Route) -> bytes:
    """Of a run and of a capture that exist: then the rest of the head is read, too."""
    path = route.path.replace("{id}", ID)
    if "{run}" in path:
        with w.client() as client:
            path = path.replace("{run}", client.post(CHAT, json=NAMED).headers["x-clairai-run"])
    return re.sub(r"{\w+(:path)?}", "x", path).encode()


def odd_heads(w: World) -> Iterator[bytes]:
    """Every route: with odd values of what it reads of a head, and of every known header."""
    for number, route in enumerate(ROUTES):
        method, path = route.method.encode(), path_of(w, route)
        for query in ODD_QUERIES:
            yield b"%s %s?%s HTTP/1.1" % (method, path, query)
        for parameter in route.parameters:
            name = parameter.name.encode()
            for value in ODD_TEXTS if parameter.place == "query" else ():
                yield b"%s %s?%s=%s HTTP/1.1" % (method, path, name, value)
            for value in VALUES if parameter.place == "header" else ():
                yield b"%s %s HTTP/1.1\r\n%s: %s" % (method, path, name, value)
        for index, name in enumerate(NAMES):  # each value comes to each route, and to each header
            value = VALUES[(number + index) % len(VALUES)]
            yield b"%s %s HTTP/1.1\r\n%s: %s" % (method, path, name, value)


@pytest.mark.attack(251)
def test_no_head_makes_the_proxy_fail(w: World) -> None:
    w.upstream.forget()
    end = b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    wrong = [head[:120] for head in odd_heads(w) if not is_answered(statuses(w, head + end))]
    assert wrong == []


@pytest.mark.attack(252)
@pytest.mark.parametrize("start", STARTS)
def test_no_path_makes_the_proxy_fail(w: World, start: bytes) -> None:
    w.upstream.forget()
    end = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    paths = [b"%s %s%s" % (how, start, odd) for how in (b"GET", b"DELETE") for odd in ODD_PATHS]
    wrong = [path[:80] for path in paths if not is_answered(statuses(w, path + end))]
    assert wrong == []


@pytest.mark.attack(253)
@MANY
@given(st.sampled_from(REQUESTS), st.integers(0, 200), st.integers(0, 4), st.binary(max_size=3))
@example(b"", 0, 0, b"")
def test_no_bytes_at_all_make_the_proxy_fail(
    w: World, request_: bytes, at: int, num_cut: int, put: bytes
) -> None:
    """A request of which a few bytes are others: no more than a head, so that none has a body."""
    raw = request_[:at] + put + request_[at + num_cut :] + b"\r\n\r\n"
    found = statuses(w, raw)
    assert is_answered(found), found
    until(lambda: w.proxy.counts().streams == 0)
