"""Reads the head of an HTTP request, as strictly as the standard allows.

Servers that forgive differently can be made to see different requests in the same bytes. What is
refused here no client library sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from clairai.proxy.proxy_settings import Limits
from clairai.proxy.responses import HttpRefusal

END: Final = b"\r\n\r\n"
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE: Final = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])")
_FIELD: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)")
_BARE: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_VERSIONS: Final = (b"1.0", b"1.1")
_PLAIN_METHODS: Final = frozenset((b"GET", b"POST", b"PUT", b"DELETE"))
# Headers that change how the bytes of a request, or of its answer, are framed or when they come.
_FRAMING: Final = (b"transfer-encoding", b"expect", b"upgrade")
_PLAIN_CONNECTIONS: Final = (b"keep-alive", b"close")


class RequestHead(NamedTuple):
    """A head that is whole and within the bounds; `headers` in order, names in lower case."""

    method: bytes
    target: bytes
    version: bytes
    headers: list[tuple[bytes, bytes]]
    first: dict[bytes, bytes]  # the first header of each name

    @property
    def is_plain(self) -> bool:
        """True if its body has the length that it declares, or none, and nothing is negotiated."""
        first = self.first
        return (
            self.version == b"1.1"
            and self.method in _PLAIN_METHODS
            and not any(name in first for name in _FRAMING)
            and first.get(b"connection", b"keep-alive").lower() in _PLAIN_CONNECTIONS
            and self._count(b"connection") <= 1
        )

    @property
    def body_length(self) -> int:
        """Of a plain request."""
        return int(self.first.get(b"content-length", b"0"))

    @property
    def wants_close(self) -> bool:
        """Of a plain request."""
        return self.first.get(b"connection", b"").lower() == b"close"

    def _count(self, name: bytes) -> int:
        return sum(one == name for one, _ in self.headers) if name in self.first else 0


def check_line_ends(part: bytes) -> None:
    """HttpRefusal for a CR or LF alone; `part` may end in the middle of a head."""
    if _BARE.search(part, 0, len(part) - part.endswith(b"\r")):
        raise _bad("a line of the head ends without CR LF")


def read_head(head: bytes, limits: Limits) -> RequestHead:
    """A head, given without its empty line; HttpRefusal if anything in it is odd."""
    check_line_ends(head)
    first, *lines = head.split(b"\r\n")
    method, target, version = _read_request_line(first, limits)
    if len(lines) > limits.headers:
        raise HttpRefusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"at most {limits.headers} headers with {limits.header_bytes} bytes in all",
        )
    headers = _read_fields(lines)
    read = RequestHead(method, target, version, headers, dict(reversed(headers)))
    _check_framing(read)
    return read


def check_fields(lines: Sequence[bytes]) -> None:
    """ValueError if one of these lines is no header: of a response, that would be a bug of ours."""
    if not all(map(_FIELD.fullmatch, lines)):
        raise ValueError("a header holds what no header may hold")


def _read_request_line(line: bytes, limits: Limits) -> tuple[bytes, bytes, bytes]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise _bad("the first line is not: METHOD /path HTTP/1.1")
    method, target, version = found.groups()
    if version not in _VERSIONS:
        raise HttpRefusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is spoken here")
    if len(target) > limits.target_bytes:
        raise HttpRefusal(
            HTTPStatus.REQUEST_URI_TOO_LONG,
            f"path and query have at most {limits.target_bytes} bytes",
        )
    if not target.startswith(b"/") or b"#" in target:
        raise _bad("the target is no path; send /path, and the host in the Host header")
    return method, target, version


def _read_fields(lines: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    fields = []
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _bad("a header is not: Name: value, on one line and without control characters")
        fields.append((found[1].lower(), found[2].rstrip(b" \t")))
    return fields


def _check_framing(head: RequestHead) -> None:
    """HttpRefusal unless one header alone says where the body ends."""
    names = [name for name, _ in head.headers]
    num_lengths, num_codings = names.count(b"content-length"), names.count(b"transfer-encoding")
    if num_lengths + num_codings > 1:
        raise _bad("two headers say where the body ends; send one Content-Length, or chunks")
    if num_lengths and not _LENGTH.fullmatch(head.first[b"content-length"]):
        raise _bad("Content-Length is no whole number")
    is_old = head.version == b"1.0"
    if num_codings and (is_old or head.first[b"transfer-encoding"].lower() != b"chunked"):
        raise HttpRefusal(HTTPStatus.NOT_IMPLEMENTED, "the only Transfer-Encoding is chunked")
    num_hosts = names.count(b"host")
    if num_hosts > 1 or (num_hosts == 0 and not is_old):
        raise _bad("a request has one Host header")


def _bad(reason: str) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.BAD_REQUEST, reason)
