"""Measures JSON text without parsing it: how deep it is, how much it holds, its outermost keys.

It reads a few megabytes in tens of milliseconds, in steps short enough that other threads go on in
between, and stops at the first bound that is exceeded. Text that is not JSON has some outline too:
whoever parses it refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import RequestError
from clairai.fields.turns import end_step

STEP_BYTES: Final = 1 << 16
_SHORT_BYTES: Final = 4096
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
# `[` and `{` differ in one bit, as `]` and `}` do.
_BRACKET_BIT: Final = 0x20
_OPEN, _CLOSE = b"{}"
_COLON: Final = re.compile(rb"[ \t\r\n]*+:")

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class JsonBounds:
    """What JSON text may hold at most."""

    depth: int = 64
    items: int = 200_000  # strings, lists and objects
    values: int = 1 << 20  # anything, numbers too: a list of a million token ids
    keys: int = 1024  # of the outermost object


def _has_few(text: bytes, bounds: JsonBounds) -> bool:
    """True if the text is within the bounds whatever its strings hold; a look at a short text."""
    if len(text) > STEP_BYTES:
        return False
    num_open = text.count(b"[") + text.count(b"{")
    num_items = num_open + text.count(b'"') // 2
    is_small = num_items <= bounds.items and num_open + text.count(b",") < bounds.values
    return is_small and num_open <= bounds.depth and num_items <= bounds.keys


def check_bounds(text: bytes, bounds: JsonBounds) -> None:
    """RequestError if the text holds more than it may."""
    if not _has_few(text, bounds):
        JsonOutline(bounds).read(text)


def outermost_keys(text: bytes, bounds: JsonBounds) -> list[str]:
    """The keys of the outermost object, as often as they occur; RequestError over a bound."""
    if len(text) <= _SHORT_BYTES and _has_few(text, bounds):
        keys = parsed_keys(text)
        if keys is not None:
            return keys
    return outlined_keys(text, bounds)


def parsed_keys(text: bytes) -> list[str] | None:
    """The same by parsing, which is quicker for a short text; None if it is not JSON."""
    try:
        found = _PAIRS_DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        return None
    return [key for key, _ in found] if isinstance(found, _Pairs) else []


class _Pairs(list[tuple[str, object]]):
    """An object with every key, those too that are there twice."""


_PAIRS_DECODER: Final = json.JSONDecoder(object_pairs_hook=_Pairs)


def outlined_keys(text: bytes, bounds: JsonBounds) -> list[str]:
    outline = JsonOutline(bounds)
    outline.read(text)
    return list(_read_keys(text, outline.quotes))


def _read_keys(text: bytes, quotes: list[int]) -> Iterator[str]:
    for start, end in zip(quotes[::2], quotes[1::2], strict=False):
        if _COLON.match(text, end + 1):
            try:
                yield json.loads(text[start : end + 1])
            except ValueError:  # not JSON, so that nobody reads a key here
                continue


class JsonOutline:
    """What has been read of a text so far."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._is_inside = 0  # a string
        self._is_escaped = False  # the next byte, by a backslash before it
        self._depth = 0
        self._num_items = self._num_values = 0
        self.nbytes = 0
        self.quotes: list[int] = []  # around the strings of the outermost level

    def read(self, text: bytes) -> None:
        """RequestError, at the end of the step that goes over a bound."""
        data = np.frombuffer(text, np.uint8)
        for at in range(0, len(data), STEP_BYTES):
            end = min(at + STEP_BYTES, len(data))
            self.nbytes += end - at
            if not self._stays_inside(text, at, end):
                self._read_step(data[at:end], at)
            end_step()

    def _stays_inside(self, text: bytes, at: int, end: int) -> bool:
        """True within a long string, such as a vector in base64: nothing of it is counted."""
        if not self._is_inside or self._is_escaped:
            return False
        return text.find(b'"', at, end) < 0 and text.find(b"\\", at, end) < 0

    def _read_step(self, data: Bytes, at: int) -> None:
        quotes = self._find_quotes(data)
        # Counted modulo 256, of which the last bit matters. An opening quote is inside.
        inside = (np.add.accumulate(quotes, dtype=np.uint8) + self._is_inside) & 1
        outside = inside == 0
        folded = data | _BRACKET_BIT
        opening, closing = (folded == _OPEN) & outside, (folded == _CLOSE) & outside
        num_open = int(np.count_nonzero(opening))
        self._num_items += num_open + int(np.count_nonzero(quotes & ~outside))
        self._num_values += num_open + int(np.count_nonzero((data == _COMMA) & outside))
        depths = self._depth + np.cumsum(
            opening.view(np.int8) - closing.view(np.int8), dtype=np.int32
        )
        self._check_counts(int(depths.max()))
        self._keep_quotes(np.flatnonzero(quotes & (depths == 1)) + at)
        self._is_inside, self._depth = int(inside[-1]), int(depths[-1])

    def _find_quotes(self, data: Bytes) -> Mask:
        """Quotes that begin or end a string: not those behind an odd number of backslashes."""
        quotes: Mask = data == _QUOTE
        if self._is_escaped and data[0] != _BACKSLASH:
            quotes[0] = False
        slashes = np.flatnonzero(data == _BACKSLASH)
        if not len(slashes):
            self._is_escaped = False
            return quotes
        is_break = np.diff(slashes) != 1
        starts = slashes[np.concatenate(([True], is_break))]
        ends = slashes[np.concatenate((is_break, [True]))] + 1
        # A run that goes on from the step before counts the backslash that was left over there.
        odd = (ends - starts + ((starts == 0) & self._is_escaped)) % 2 == 1
        escaped = ends[odd]
        quotes[escaped[escaped < len(data)]] = False
        self._is_escaped = bool(odd[-1]) and int(ends[-1]) == len(data)
        return quotes

    def _check_counts(self, depth: int) -> None:
        bounds = self._bounds
        if depth > bounds.depth:
            raise RequestError(f"the body is nested over {bounds.depth} deep; send less")
        if self._num_items > bounds.items:
            raise RequestError(
                f"the body has over {bounds.items} strings, lists and objects; send less"
            )
        if self._num_values >= bounds.values:
            raise RequestError(
                f"the body has over {bounds.values} values; send vectors packed as base64, or less"
            )

    def _keep_quotes(self, positions: NDArray[np.intp]) -> None:
        self.quotes += positions.tolist()
        if len(self.quotes) > 4 * self._bounds.keys:  # a key and a string have two each
            raise RequestError(f"the body has over {self._bounds.keys} fields; send fewer")
