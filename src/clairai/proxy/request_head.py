"""Judges the head of an HTTP request as strictly as the standard allows, before a parser reads it.

Servers that forgive differently can be made to see different requests in the same bytes. What is
refused here no client library sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from clairai.proxy.proxy_settings import Limits
from clairai.proxy.responses import HttpRefusal

END: Final = b"\r\n\r\n"
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE: Final = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])")
_FIELD: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)")
_BARE: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_VERSIONS: Final = (b"1.0", b"1.1")


def check_line_ends(part: bytes) -> None:
    """HttpRefusal for a CR or LF alone; `part` may end in the middle of a head."""
    if _BARE.search(part, 0, len(part) - part.endswith(b"\r")):
        raise _bad("a line of the head ends without CR LF")


def check_head(head: bytes, limits: Limits) -> bytes:
    """The target of a head, given without its empty line; HttpRefusal if anything in it is odd."""
    check_line_ends(head)
    first, *lines = head.split(b"\r\n")
    version, target = _check_request_line(first, limits)
    if len(lines) > limits.headers:
        raise HttpRefusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"at most {limits.headers} headers with {limits.header_bytes} bytes in all",
        )
    _check_framing(_read_fields(lines), version)
    return target


def _check_request_line(line: bytes, limits: Limits) -> tuple[bytes, bytes]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise _bad("the first line is not: METHOD /path HTTP/1.1")
    _, target, version = found.groups()
    if version not in _VERSIONS:
        raise HttpRefusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is spoken here")
    if len(target) > limits.target_bytes:
        raise HttpRefusal(
            HTTPStatus.REQUEST_URI_TOO_LONG,
            f"path and query have at most {limits.target_bytes} bytes",
        )
    if not target.startswith(b"/") or b"#" in target:
        raise _bad("the target is no path; send /path, and the host in the Host header")
    return version, target


def _read_fields(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _bad("a header is not: Name: value, on one line and without control characters")
        fields.setdefault(found[1].lower(), []).append(found[2].rstrip(b" \t"))
    return fields


def _check_framing(fields: Mapping[bytes, Sequence[bytes]], version: bytes) -> None:
    """HttpRefusal unless one header alone says where the body ends."""
    lengths = fields.get(b"content-length", ())
    codings = fields.get(b"transfer-encoding", ())
    if len(lengths) + len(codings) > 1:
        raise _bad("two headers say where the body ends; send one Content-Length, or chunks")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise _bad("Content-Length is no whole number")
    if codings and (codings[0].lower() != b"chunked" or version == b"1.0"):
        raise HttpRefusal(HTTPStatus.NOT_IMPLEMENTED, "the only Transfer-Encoding is chunked")
    if len(fields.get(b"host", ())) > 1 or (version != b"1.0" and b"host" not in fields):
        raise _bad("a request has one Host header")


def _bad(reason: str) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.BAD_REQUEST, reason)
