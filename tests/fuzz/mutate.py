"""Makes an input from earlier ones: replaces values, moves and damages bytes, or joins two."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from tests.fuzz.spans import Span, json_spans
from tests.fuzz.target import Target

MAX_NBYTES: Final = 1 << 16  # of an input: larger ones only take longer
MAX_CORPUS: Final = 1024  # of valid inputs, and of refused ones
LATEST: Final = 4
_NUMBERS: Final = (
    *(0, 1, 2, 7, 8, 16, 64, 127, 128, 255, 256, 4096, 32767, 65535, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1),
)
_SIZES: Final = (1, 2, 4, 8)
_Item = TypeVar("_Item")


class Entry(NamedTuple):
    """An input that others are made from, and its values."""

    data: bytes
    spans: list[Span]


def span_data(entry: Entry, span: Span) -> bytes:
    return entry.data[span.start : span.end]


class Mutator:
    """Draws from `source` alone: equal sources make equal inputs."""

    def __init__(self, target: Target, source: random.Random) -> None:
        self._target = target
        self._random = source.random
        self._is_json = target.find_spans is json_spans
        self._valid: list[Entry] = []
        self._refused: list[Entry] = []
        for seed in target.seeds:
            self.add(seed, is_valid=True)
        found = [span_data(entry, span) for entry in self._valid for span in entry.spans]
        self._values = [*target.values, *dict.fromkeys(found)] or [b"\0", b"\xff"]
        self._texts = [value for value in self._values if value.startswith(b'"')] or [b'""']

    def add(self, data: bytes, *, is_valid: bool) -> None:
        """Make later inputs from this one too; when there are many, it replaces one."""
        entry = Entry(data, self._target.find_spans(data))
        entries = self._valid if is_valid else self._refused
        if len(entries) < MAX_CORPUS:
            entries.append(entry)
        else:
            entries[self._below(MAX_CORPUS)] = entry

    def make(self) -> bytes:
        """The next input, made from a valid one, one of the last that was new, or any."""
        entry = self._pick_entry()
        if entry.spans and self._random() < 0.85:
            data = self._replace_values(entry)
            rounds = 0 if self._random() < 0.9 else 1
        else:
            data, rounds = entry.data, 1 + int(4 * self._random() ** 3)
        for _ in range(rounds):
            data = self._pick(_DAMAGES)(self, data)
        data = data[:MAX_NBYTES]
        if self._target.repair is not None and self._random() < 0.9:
            data = self._target.repair(entry.data, data)
        return data

    def _replace_values(self, entry: Entry) -> bytes:
        """One to three values that do not overlap, from the last to the first."""
        data, begin = entry.data, len(entry.data) + 1
        for _ in range(1 + int(3 * self._random() ** 2)):
            span = self._pick(entry.spans)
            if span.end < begin:
                data = self._replace_value(data, span)
                begin = span.pair
        return data

    def _pick_entry(self) -> Entry:
        chance = self._random()
        if chance < 0.6 or not self._refused:
            return self._pick(self._valid)
        return self._pick(self._refused[-LATEST:] if chance < 0.8 else self._refused)

    def _replace_value(self, data: bytes, span: Span) -> bytes:
        start, end, pair, is_key = span
        chance = self._random()
        if is_key and chance < 0.7:
            return data[:start] + self._pick(self._texts) + data[end:]
        if chance < 0.6 or (chance < 0.85 and not self._is_json):
            return data[:start] + self._pick(self._values) + data[end:]
        if chance < 0.7:  # once more, behind itself
            return data[:end] + b"," + data[pair:end] + data[end:]
        if chance < 0.8:  # left out, with its comma
            return data[:pair] + data[end + (data[end : end + 1] == b",") :]
        if chance < 0.85:
            return data[:start] + b"[" + data[start:end] + b"]" + data[end:]
        if chance < 0.95:  # with other bytes inside
            return data[:start] + self._pick(_DAMAGES)(self, data[start:end]) + data[end:]
        other = self._pick_entry()
        value = span_data(other, self._pick(other.spans)) if other.spans else b""
        return data[:start] + value + data[end:]

    # What follows changes bytes, whatever they mean.

    def _flip_bit(self, data: bytes) -> bytes:
        if not data:
            return b"\0"
        at = self._below(len(data))
        return data[:at] + bytes((data[at] ^ 1 << self._below(8),)) + data[at + 1 :]

    def _set_byte(self, data: bytes) -> bytes:
        at = self._below(len(data) + 1)
        return data[:at] + bytes((self._below(256),)) + data[at + 1 :]

    def _set_number(self, data: bytes) -> bytes:
        """A number of 1 to 8 bytes, little-endian, where there may be one already."""
        at, size = self._below(len(data) + 1), self._pick(_SIZES)
        if self._random() < 0.3:  # one more or less than it was
            number = int.from_bytes(data[at : at + size], "little") + self._pick((-1, 1, 8, -8))
        else:
            number = self._pick(_NUMBERS)
        raw = (number % (1 << 8 * size)).to_bytes(size, "little")
        return data[:at] + raw + data[at + size :]

    def _insert(self, data: bytes) -> bytes:
        at = self._below(len(data) + 1)
        if self._random() < 0.5:
            return data[:at] + self._pick(self._values) + data[at:]
        return data[:at] + bytes(self._below(256) for _ in range(1 + self._below(8))) + data[at:]

    def _delete(self, data: bytes) -> bytes:
        start, end = self._cut(data)
        return data[:start] + data[end:]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._below(len(data) + 1)]

    def _repeat(self, data: bytes) -> bytes:
        start, end = self._cut(data)
        times = 2 + self._below(4 if self._random() < 0.9 else 200)
        return data[:start] + data[start:end] * times + data[end:]

    def _move(self, data: bytes) -> bytes:
        start, end = self._cut(data)
        rest = data[:start] + data[end:]
        at = self._below(len(rest) + 1)
        return rest[:at] + data[start:end] + rest[at:]

    def _join(self, data: bytes) -> bytes:
        """The beginning of this input and the end of another."""
        other = self._pick_entry().data
        return data[: self._below(len(data) + 1)] + other[self._below(len(other) + 1) :]

    def _cut(self, data: bytes) -> tuple[int, int]:
        """A short part of the data, sometimes a long one."""
        start = self._below(len(data) + 1)
        length = self._below(16) if self._random() < 0.8 else self._below(len(data) + 1)
        return start, min(start + length, len(data))

    def _below(self, count: int) -> int:
        return int(self._random() * count)

    def _pick(self, items: Sequence[_Item]) -> _Item:
        return items[int(self._random() * len(items))]


_DAMAGES: Final[tuple[Callable[[Mutator, bytes], bytes], ...]] = (
    *(Mutator._flip_bit, Mutator._set_byte, Mutator._set_number, Mutator._insert),
    *(Mutator._delete, Mutator._truncate, Mutator._repeat, Mutator._move, Mutator._join),
)
