"""Takes bytes nobody vouches for; gives plain JSON values, or a ProbeError that says where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

from clairai.errors import PointError, ProbeError
from clairai.points import quote


@contextmanager
def within(source: str) -> Iterator[None]:
    """Name the file in every error below, and let nothing but a ProbeError out of its parser."""
    try:
        yield
    except (ProbeError, PointError) as error:
        raise ProbeError(f"{quote(source, limit=200)}: {error.reason}") from None
    except RecursionError:
        raise ProbeError(
            f"{quote(source, limit=200)}: nested too deep; a probe file has two levels"
        ) from None


def strict_object(data: bytes) -> dict[str, object]:
    """One JSON object in UTF-8, with no key twice and no NaN or Infinity."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except ValueError as error:  # bad JSON, bad UTF-8, or an integer of thousands of digits
        if isinstance(error, ProbeError):
            raise
        raise ProbeError(f"not readable as JSON ({_cause(error)}); export it again") from None
    if not isinstance(value, dict):
        raise ProbeError(f"holds a {type(value).__name__}, not a JSON object; export it again")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ProbeError(f"the key {quote(key)} appears twice; keep one of them")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Never:
    raise ProbeError(f"holds {name}, which is not a number in JSON; use finite numbers")


def _cause(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number is too long"
