"""Takes JSON text that nobody vouches for; gives its value, at a cost that is known beforehand."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from clairai.errors import RequestError
from clairai.points import quote

MAX_CHARS: Final = 64 << 20  # the size of a vector's largest file, or of many small ones
# Vectors packed as base64 hold none of these characters; lists of numbers, as the seeds have them,
# have one for each number. The most there can be of any kind takes 200 MB as Python objects.
MAX_ITEMS: Final = 1 << 20
_BEGINNINGS: Final = ",[{"


def read_text(text: str, *, what: str) -> Any:
    """RequestError for anything but one JSON value without a key that comes twice."""
    if len(text) > MAX_CHARS:
        raise RequestError(f"{what} is {len(text)} characters long, at most {MAX_CHARS}")
    # A text that is shorter than that cannot hold so many.
    if len(text) > MAX_ITEMS and sum(map(text.count, _BEGINNINGS)) > MAX_ITEMS:
        raise RequestError(
            f"{what} holds over {MAX_ITEMS} values; send vectors packed as base64, or fewer"
        )
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RequestError as error:
        raise RequestError(f"{what}: {error.reason}") from None
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise RequestError(f"{what} is text, but not JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
    raise RequestError(f"the key {quote(twice)} appears twice; keep one of them")
