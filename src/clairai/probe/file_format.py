"""Takes a header and numbers, gives a safetensors file of ours; and back, what stands around them.

Probes and vectors are such files. Nothing here trusts a byte: lengths are bounded before they are
used, and the header is judged before safetensors sees it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Never, cast

from clairai.errors import PointError, ProbeError
from clairai.points import quote

METADATA: Final = "__metadata__"
MAX_KEYS: Final = 32
MAX_VALUE: Final = 1024
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class FileFormat:
    """What such a file holds, and its bounds."""

    noun: str
    format: str  # under the key `clairai` of its metadata
    max_nbytes: int
    max_header: int
    other: str  # what to do with a file that is of no such kind
    again: str  # how to write it anew


def pack_file(header: Mapping[str, object], body: bytes) -> bytes:
    """Equal content gives equal bytes: safetensors' own writer orders metadata at random."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the numbers aligned, as safetensors does
    return _LENGTH.pack(len(text)) + text + body


def unpack_file(data: bytes, kind: FileFormat) -> tuple[dict[str, object], int]:
    """The header, and how many bytes of numbers stand behind it."""
    if len(data) > kind.max_nbytes:
        raise ProbeError(f"{len(data)} bytes, and a {kind.noun} has at most {kind.max_nbytes}")
    if len(data) < _LENGTH.size:
        raise ProbeError(f"{len(data)} bytes is too short for safetensors; copy the file again")
    (length,) = _LENGTH.unpack_from(data)
    if length > kind.max_header:
        raise ProbeError(
            f"header of {length} bytes, and a {kind.noun} has at most {kind.max_header}; "
            f"{kind.other}"
        )
    offset = _LENGTH.size + length
    if offset > len(data):
        raise ProbeError(f"cut short: {len(data)} of at least {offset} bytes; copy the file again")
    return parse_json_object(data[_LENGTH.size : offset]), len(data) - offset


def read_metadata(metadata: object, kind: FileFormat) -> dict[str, str]:
    """What the header's metadata says; all of it bounded text."""
    if not isinstance(metadata, dict) or metadata.get("clairai") != kind.format:
        found = metadata.get("clairai") if isinstance(metadata, dict) else None
        raise ProbeError(
            f"metadata says clairai={quote(found)}, and this version reads {kind.format}; "
            f"{kind.again}"
        )
    if len(metadata) > MAX_KEYS:
        raise ProbeError(f"{len(metadata)} metadata keys, and a {kind.noun} has at most {MAX_KEYS}")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or len(key) > MAX_VALUE:
            raise ProbeError(
                f"metadata {quote(key)} must be text of at most {MAX_VALUE} characters"
            )
    return cast(dict[str, str], metadata)


# MERGED
# Takes bytes nobody vouches for; gives plain JSON values, or a ProbeError that says where.


@contextmanager
def errors_about(source: str) -> Iterator[None]:
    """Name the file in every error below, and let nothing but a ProbeError out of its parser."""
    try:
        yield
    except (ProbeError, PointError) as error:
        raise ProbeError(f"{quote(source, limit=200)}: {error.reason}") from None
    except RecursionError:
        raise ProbeError(
            f"{quote(source, limit=200)}: nested too deep; a probe file has two levels"
        ) from None


def parse_json_object(data: bytes) -> dict[str, object]:
    """One JSON object in UTF-8, with no key twice and no NaN or Infinity."""
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
        )
    except ValueError as error:  # bad JSON, bad UTF-8, or an integer of thousands of digits
        if isinstance(error, ProbeError):
            raise
        raise ProbeError(
            f"not readable as JSON ({_describe_json_error(error)}); export it again"
        ) from None
    if not isinstance(value, dict):
        raise ProbeError(f"holds a {type(value).__name__}, not a JSON object; export it again")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ProbeError(f"the key {quote(key)} appears twice; keep one of them")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Never:
    raise ProbeError(f"holds {name}, which is not a number in JSON; use finite numbers")


def _describe_json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number is too long"
