"""Whatever is sent, the proxy answers in HTTP and never with 500: that would be a bug of ours."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clairai.proxy.proxy_settings import Timeouts
from clairai.proxy.routes import ROUTES
from tests.http.world import World, world

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
TARGETS = st.sampled_from(
    [(route.method.encode(), re.sub(r"{\w+(:path)?}", "x", route.path)) for route in ROUTES]
)
ODD = st.text(st.characters(min_codepoint=0, max_codepoint=255), max_size=20).map(
    lambda text: text.encode("latin-1")
)
QUERIES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
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
HEADERS = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES) | ODD)


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    quick = Timeouts(finish=0.01, head=0.3, body=0.3, idle=0.3)
    with world(tmp_path_factory.mktemp("w"), timeouts=quick, allowed_origins=("http://a",)) as made:
        yield made


def statuses(w: World, raw: bytes) -> list[int]:
    """Of every answer until the proxy closes."""
    host, port = w.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(raw)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    return [int(status) for status in STATUS.findall(answer)]


def is_answered(found: list[int]) -> bool:
    return bool(found) and is_fine(found)


def is_fine(found: list[int]) -> bool:
    return 500 not in found and len([status for status in found if status >= 200]) <= 1


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


@pytest.mark.attack(251)
@MANY
@given(TARGETS, QUERIES, st.lists(HEADERS, max_size=2))
def test_no_head_makes_the_proxy_fail(
    w: World, target: tuple[bytes, str], query: str, headers: list[tuple[bytes, bytes]]
) -> None:
    w.upstream.forget()
    method, path = target
    lines = [f"{path}?{query}".encode(), b"Host: localhost"]
    lines[0] = b"%s %s HTTP/1.1" % (method, lines[0])
    lines += [b"%s: %s" % pair for pair in headers]
    found = statuses(w, b"\r\n".join([*lines, b"Connection: close", b"", b""]))
    assert is_fine(found), found


@pytest.mark.attack(252)
@MANY
@given(st.sampled_from(["/v1/probes/", "/v1/captures/", "/v1/runs/", "/assets/", "/"]), ODD)
def test_no_path_makes_the_proxy_fail(w: World, start: str, rest: bytes) -> None:
    w.upstream.forget()
    quoted = "".join(f"%{byte:02x}" if byte % 3 else chr(byte) for byte in rest)
    first = f"DELETE {start}{quoted} HTTP/1.1".encode("latin-1")
    found = statuses(w, b"\r\n".join((first, b"Host: localhost", b"Connection: close", b"", b"")))
    assert is_fine(found), found


@pytest.mark.attack(253)
@MANY
@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_the_proxy_fail(w: World, raw: bytes) -> None:
    found = statuses(w, raw + b"\r\n\r\n")
    assert is_fine(found), found
    assert w.proxy.counts().streams == 0
