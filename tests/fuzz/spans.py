"""Finds the values in JSON and msgpack: a mutation replaces one, and leaves the rest valid."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

MAX_SPANS: Final = 256
MAX_DEPTH: Final = 64


class Span(NamedTuple):
    """A value from `start` up to `end`; `pair` is where its `"key": ` begins, or its own start."""

    start: int
    end: int
    pair: int
    is_key: bool = False


FindSpans = Callable[[bytes], list[Span]]

_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}:]|[^\s,:\[\]{}"]++', re.DOTALL)


def no_spans(_: bytes) -> list[Span]:
    """Of a format without values that can be told apart."""
    return []


def json_spans(data: bytes) -> list[Span]:
    """Every value and key of JSON text, inner containers included; the text may be broken.

    In a file that begins with binary lengths, the values start at the first brace.
    """
    found: list[Span] = []
    opened: list[tuple[int, int]] = []  # where a container and its pair begin
    pair: int | None = None  # where the key of the next value begins
    for token in _TOKEN.finditer(data, max(data.find(b"{"), 0)):
        start, end, text = token.start(), token.end(), token[0]
        if text == b":":
            if found:
                pair, found[-1] = found[-1].start, found[-1]._replace(is_key=True)
        elif text in b"[{":
            opened.append((start, start if pair is None else pair))
            pair = None
        else:
            own = (start, start if pair is None else pair)
            begin = opened.pop() if text in b"]}" and opened else own
            found.append(Span(begin[0], end, begin[1]))
            pair = None
        if len(found) >= MAX_SPANS:
            break
    return found[:-1] or found  # without the outermost


JSON_VALUES: Final = (
    *(b"null", b"true", b"false", b"0", b"1", b"-1", b"2", b"-0.0", b"0.5", b"1e999", b"-1e999"),
    *(b"1e400", b"1e308", b"1e-400", b"1e-45", b"1e-40", b"3.5e38", b"1e19", b"NaN", b"Infinity"),
    *(b"100.0", b"2147483648", b"9223372036854775808", b"18446744073709551616", b"4294967296"),
    *(b'""', b'"1000"', b'"\\u0000"', b'"\\ud800"', b'"\\u0063lairai"', b'"\xc3\xa9"', b'"\xff"'),
    *(b"[]", b"{}", b"[[]]", b"[null]", b"[0,1]", b"[-1,null]", b'{"":0}', b'{"a":[]}', b'["all"]'),
    *(b'"' + b"a" * 200 + b'"', b'"../../etc/passwd"', b'"\\r\\nx: y"', b"[" * 80 + b"]" * 80),
    *(b"1" * 400, b"1" * 4500, b"[" + b"0," * 300 + b"0]", b'"AAAAPwAAAD8AAAA/AAAAPw=="'),
    *(b'"all"', b'"both"', b'"add"', b'"clamp"', b'"named"', b'"stop"', b'"prompt"', b'"yes"'),
)


def msgpack_spans(data: bytes, start: int = 0) -> list[Span]:
    """Every value of the msgpack message at `start`, keys of maps included."""
    found: list[Span] = []
    _walk_msgpack(data, start, found, MAX_DEPTH)
    return found


def framed_msgpack_spans(data: bytes) -> list[Span]:
    """Those of a message behind its length in 4 bytes."""
    return msgpack_spans(data, 4)


def _walk_msgpack(data: bytes, at: int, found: list[Span], depth: int) -> int:
    """The end of the value at `at`, or the end of the data."""
    if at >= len(data) or len(found) >= MAX_SPANS or not depth:
        return len(data)
    start, first = at, data[at]
    nbytes, num_inner = _measure(data, at, first)
    at += nbytes
    for _ in range(min(num_inner, MAX_SPANS)):
        at = _walk_msgpack(data, at, found, depth - 1)
    at = min(at, len(data))
    found.append(Span(start, at, start))
    return at


_FIXED: Final = {0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xD9: "B", 0xDA: ">H", 0xDB: ">I"}
_CONTAINERS: Final = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}
_NUMBERS: Final = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9} | {
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
}


def _measure(data: bytes, at: int, first: int) -> tuple[int, int]:
    """The bytes of a value, without those of its items, and the number of items."""
    if first in _NUMBERS:
        return _NUMBERS[first], 0
    if 0x80 <= first <= 0x8F:
        return 1, 2 * (first & 15)
    if 0x90 <= first <= 0x9F:
        return 1, first & 15
    if 0xA0 <= first <= 0xBF:
        return 1 + (first & 31), 0
    code, items = _CONTAINERS.get(first, (_FIXED.get(first, ""), 0))
    if not code or at + 1 + struct.calcsize(code) > len(data):
        return 1, 0
    (length,) = struct.unpack_from(code, data, at + 1)
    head = 1 + struct.calcsize(code)
    return (head, items * length) if items else (head + length, 0)


_CONTAINER_VALUES: Final[tuple[object, ...]] = ([], {}, [[]], [0] * 40, {"": 0}, {"type": "x"})
MSGPACK_VALUES: Final = (
    *(msgspec.msgpack.encode(value) for value in (None, True, False, 0, 1, -1, 2, 127, 0.5)),
    *(msgspec.msgpack.encode(2**power) for power in (31, 32, 53, 62, 63)),
    *(msgspec.msgpack.encode(value) for value in (2**64 - 1, -(2**63), -1e300, 5e-324, 1e-40)),
    *(msgspec.msgpack.encode(float(value)) for value in ("nan", "inf", "-inf")),
    *(msgspec.msgpack.encode(value) for value in ("", "a", "\0", "../..", "a" * 300, b"", b"a")),
    *(msgspec.msgpack.encode(value) for value in _CONTAINER_VALUES),
    *(msgspec.msgpack.encode(value) for value in (bytes(4), bytes(12), bytes(64), b"\xff" * 16)),
    *(b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"),
    *(b"\xa2\xed\xa0", b"\xd4\x01\x00", b"\x91" * 60 + b"\x90", b"\x91" * 2000 + b"\x90"),
)
