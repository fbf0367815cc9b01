"""A head that is let in reads as h11 reads it, so that no two readers see different requests."""

from __future__ import annotations

import h11
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.proxy.proxy_settings import Limits
from clairai.proxy.request_head import END, RequestHead, read_head
from clairai.proxy.responses import HttpRefusal

NAMES = st.sampled_from(
    (
        *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade"),
        *(b"X-A", b"content-LENGTH", b"connection", b"x_y", b"A b", b"", b"Host ", b"\x80"),
    )
)
VALUES = st.sampled_from(
    (
        *(b"", b"a", b" a ", b"\ta b\t", b"0", b"7", b"007", b"1,1", b"1, 2", b"+1", b"-1", b"1e1"),
        *(b"chunked", b"Chunked", b"gzip", b"close", b"keep-alive", b"Close", b"close, te"),
        *(b"100-continue", b"websocket", b"\xe9\xff", b"a\x00", b"a\x0b", b"a\rb", b"9" * 18),
    )
)
FIELDS = st.lists(st.tuples(NAMES, st.sampled_from((b":", b": ", b" :", b"")), VALUES), max_size=5)
LINES = st.sampled_from(
    (
        *(b"GET / HTTP/1.1", b"POST /v1/x?a=%ff HTTP/1.1", b"GET  / HTTP/1.1", b"GET / HTTP/1.0"),
        *(b"HEAD / HTTP/1.1", b"PUT /a b HTTP/1.1", b"GET /\x80 HTTP/1.1", b"DELETE /x HTTP/2.0"),
    )
)


def read_by_h11(raw: bytes) -> h11.Request:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    event = connection.next_event()
    assert isinstance(event, h11.Request)
    return event


def read(head: bytes) -> RequestHead | None:
    try:
        return read_head(head, Limits())
    except HttpRefusal:
        return None


@settings(max_examples=500, deadline=None)
@given(line=LINES, fields=FIELDS)
def test_what_is_let_in_reads_the_same_by_h11(
    line: bytes, fields: list[tuple[bytes, bytes, bytes]]
) -> None:
    head = b"\r\n".join((line, b"Host: a", *(b"".join(field) for field in fields)))
    ours = read(head)
    if ours is None:
        return
    theirs = read_by_h11(head + END)
    assert (ours.method, ours.target, ours.version) == (
        theirs.method,
        theirs.target,
        theirs.http_version,
    )
    assert [(name, lowered(name, value)) for name, value in ours.headers] == list(theirs.headers)


def lowered(name: bytes, value: bytes) -> bytes:
    """h11 lowers this one value; only a request that is not plain has it."""
    return value.lower() if name == b"transfer-encoding" else value


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=20), extra=st.binary(max_size=20), more=st.booleans())
def test_the_body_of_a_plain_request_ends_where_h11_ends_it(
    body: bytes, extra: bytes, more: bool
) -> None:
    declared = b"Content-Length: %d" % len(body) if body or more else b"X: y"
    head = b"\r\n".join((b"POST / HTTP/1.1", b"Host: a", declared))
    ours = read(head)
    assert ours is not None
    assert ours.is_plain
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head + END + body + extra)
    connection.next_event()
    taken = b""
    while isinstance(event := connection.next_event(), h11.Data):
        taken += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert taken == body == (body + extra)[: ours.body_length]


def test_a_plain_request_that_ends_its_connection_says_so() -> None:
    for value, wants_close in ((b"close", True), (b"CLOSE", True), (b"keep-alive", False)):
        ours = read(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: " + value)
        assert ours is not None
        assert ours.is_plain
        assert ours.wants_close == wants_close
