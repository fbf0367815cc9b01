"""One parser to fuzz: what it is given, what it may answer, and what holds of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clairai.errors import ClairaiError
from tests.fuzz.spans import FindSpans, no_spans

MAX_REASON = 1000  # characters of a refusal

# Gives the input that `changed` should be, having been made from `seed`: with its length field or
# checksum made right, so that a change gets past the first check.
Repair = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """`parse` returns, or raises one of `refusals`; an AssertionError of its own is a finding too.

    `seeds` are valid inputs, made by the product's own writers where it has one.
    """

    name: str
    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = (ClairaiError,)
    find_spans: FindSpans = no_spans
    values: Sequence[bytes] = ()  # put in the place of a span
    repair: Repair | None = None
    share: float = 1.0  # of all inputs; cheap parsers get more


def grow_prefix(nbytes: int) -> Repair:
    """The repair of a format that begins with the length of its head in `nbytes` bytes."""

    def repair(seed: bytes, changed: bytes) -> bytes:
        length = int.from_bytes(seed[:nbytes], "little")
        if changed[:nbytes] != seed[:nbytes] or not changed.endswith(seed[nbytes + length :]):
            return changed  # the length itself was changed, or what follows the head
        length = (length + len(changed) - len(seed)) % (1 << 8 * nbytes)
        return length.to_bytes(nbytes, "little") + changed[nbytes:]

    return repair
