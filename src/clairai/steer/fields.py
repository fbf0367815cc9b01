"""Takes one field of a request as somebody gave it; gives it checked, or a RequestError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

import numpy as np

from clairai.errors import RequestError
from clairai.points import quote

MAX_TEXT: Final = 128
# Arithmetic is float32 in the engine: what is beyond float32 would be infinity there.
LARGEST: Final = float(np.finfo(np.float32).max)


def fields(what: str, given: object, known: tuple[str, ...]) -> Mapping[str, Any]:
    """An object that has no other keys than these."""
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what} must be an object, got {quote(given)}; its keys are {', '.join(known)}"
        )
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise RequestError(f"{what}: unknown key {quote(unknown)}; known: {', '.join(known)}")
    return given


def listed(what: str, given: object, *, limit: int) -> list[Any] | tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise RequestError(f"{what} must be a list, got {quote(given)}")
    if len(given) > limit:
        raise RequestError(f"{what} has {len(given)} items; give at most {limit}")
    return given


def number(what: str, value: object) -> float:
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if is_number and -LARGEST <= value <= LARGEST:  # type: ignore[operator]  # false for NaN too
        return float(value)  # type: ignore[arg-type]
    raise RequestError(
        f"{what} must be a finite number, at most {LARGEST:.3g} in size, got {quote(value)}"
    )


def optional_number(what: str, value: object) -> float | None:
    return None if value is None else number(what, value)


def whole(what: str, value: object, *, low: int, high: int) -> int:
    # type() and not isinstance(): true and false are ints to isinstance.
    if type(value) is int and low <= value <= high:
        return value
    raise RequestError(f"{what} must be a whole number of {low} to {high}, got {quote(value)}")


def boolean(what: str, value: object) -> bool:
    if type(value) is bool:
        return value
    raise RequestError(f"{what} must be true or false, got {quote(value)}")


def text(what: str, value: object) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MAX_TEXT:
        return value
    raise RequestError(f"{what} must be text of 1 to {MAX_TEXT} characters, got {quote(value)}")


def choice(what: str, value: object, known: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in known:
        return value
    raise RequestError(f"{what} must be one of {', '.join(known)}, got {quote(value)}")


def close_to(name: str, names: Iterable[str]) -> str:
    """What may have been meant, for the end of an error: the close names, or some."""
    every = sorted(names)
    near = get_close_matches(name[:MAX_TEXT], every, n=3)
    if near:
        return f"close to it: {', '.join(near)}"
    if not every:
        return "there are none"
    more = f" and {len(every) - 8} more" if len(every) > 8 else ""
    return f"there are {', '.join(every[:8])}{more}"
