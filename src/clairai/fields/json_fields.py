"""Checked reads of JSON values in a request: each gives the value, or raises RequestError.

`what` names the value in the message, such as `steer[0].scale`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from clairai.errors import RequestError, quote
from clairai.probe.numeric_bounds import FACTORS, MAX_NUMBER, is_factor, is_number

MAX_TEXT: Final = 128
MAX_CHARS: Final = 64 << 20  # of JSON text: the largest vector file, or many small ones
# Of JSON text. A vector packed as base64 is one value; a list has one for each number. At the
# limit the decoded Python objects take 200 MB.
MAX_ITEMS: Final = 1 << 20


def read_object(what: str, given: object, known: tuple[str, ...]) -> Mapping[str, Any]:
    """An object with no other keys than `known`."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what} must be an object, got {quote(given)}; its keys are {', '.join(known)}"
        )
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise RequestError(f"{what}: unknown key {quote(unknown)}; known: {', '.join(known)}")
    return given


def read_list(what: str, given: object, *, limit: int) -> list[Any] | tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise RequestError(f"{what} must be a list, got {quote(given)}")
    if len(given) > limit:
        raise RequestError(f"{what} has {len(given)} items; give at most {limit}")
    return given


def read_number(what: str, value: object) -> float:
    if is_number(value):
        return float(value)
    raise RequestError(
        f"{what} must be a finite number, at most {MAX_NUMBER:g} in size, got {quote(value)}"
    )


def read_factor(what: str, value: object) -> float:
    """A number that others are multiplied by: none so small that it would be 0 on the device."""
    factor = read_number(what, value)
    if not is_factor(factor):
        raise RequestError(f"{what} must be {FACTORS}, got {quote(value)}")
    return factor


def read_optional_number(what: str, value: object) -> float | None:
    return None if value is None else read_number(what, value)


def read_integer(what: str, value: object, *, low: int, high: int) -> int:
    # type() and not isinstance(): true and false are ints to isinstance.
    if type(value) is int and low <= value <= high:
        return value
    raise RequestError(f"{what} must be a whole number of {low} to {high}, got {quote(value)}")


def read_boolean(what: str, value: object) -> bool:
    if type(value) is bool:
        return value
    raise RequestError(f"{what} must be true or false, got {quote(value)}")


def read_string(what: str, value: object) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MAX_TEXT:
        return value
    raise RequestError(f"{what} must be text of 1 to {MAX_TEXT} characters, got {quote(value)}")


def read_choice(what: str, value: object, known: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in known:
        return value
    raise RequestError(f"{what} must be one of {', '.join(known)}, got {quote(value)}")


def suggest_names(name: str, names: Iterable[str]) -> str:
    """The end of an error message: names close to `name`, or else some of `names`."""
    every = sorted(names)
    near = get_close_matches(name[:MAX_TEXT], every, n=3)
    if near:
        return f"close to it: {', '.join(near)}"
    if not every:
        return "there are none"
    more = f" and {len(every) - 8} more" if len(every) > 8 else ""
    return f"there are {', '.join(every[:8])}{more}"


def decode_json(text: str, *, what: str) -> Any:
    """Decode untrusted text at a bounded cost; RequestError also for a key that appears twice."""
    if len(text) > MAX_CHARS:
        raise RequestError(f"{what} is {len(text)} characters long, at most {MAX_CHARS}")
    # Every value follows one of these characters; a shorter text cannot hold too many.
    if len(text) > MAX_ITEMS and sum(map(text.count, ",[{")) > MAX_ITEMS:
        raise RequestError(
            f"{what} holds over {MAX_ITEMS} values; send vectors packed as base64, or fewer"
        )
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except RequestError as error:
        raise RequestError(f"{what}: {error.reason}") from None
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise RequestError(f"{what} is text, but not JSON") from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
    raise RequestError(f"the key {quote(twice)} appears twice; keep one of them")
