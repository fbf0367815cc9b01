"""Takes the headers of a request for a file; gives the range of bytes that it asks for.

RFC 9110, 14.1 and 14.2: one range; a header that asks for several, or that is not understood, is
passed over, and the file given whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_RANGE: Final = re.compile(r"\s*bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.ASCII)


@dataclass(frozen=True)
class Whole:
    """All of it."""


@dataclass(frozen=True)
class NotSatisfiable:
    """No byte of it."""


WHOLE: Final = Whole()
NOT_SATISFIABLE: Final = NotSatisfiable()


def asked_range(
    headers: Mapping[str, str], etag: str, nbytes: int
) -> tuple[int, int] | Whole | NotSatisfiable:
    """Bytes [first, end). A range of another version of the file is not given: If-Range."""
    found = _RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return WHOLE
    first, last = found[1], found[2]
    if not first and not last:
        return WHOLE
    if not first:  # the last so many
        return (max(nbytes - int(last), 0), nbytes) if int(last) and nbytes else NOT_SATISFIABLE
    if last and int(last) < int(first):
        return WHOLE
    if int(first) >= nbytes:
        return NOT_SATISFIABLE
    return int(first), min(int(last) + 1 if last else nbytes, nbytes)
