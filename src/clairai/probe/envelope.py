"""Takes a header and numbers, gives a safetensors file of ours; and back, what stands around them.

Probes and vectors are such files. Nothing here trusts a byte: lengths are bounded before they are
used, and the header is judged before safetensors sees it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from clairai.errors import ProbeError
from clairai.points import quote
from clairai.probe.parse import strict_object

METADATA: Final = "__metadata__"
MAX_KEYS: Final = 32
MAX_VALUE: Final = 1024
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class Kind:
    """What such a file holds, and its bounds."""

    noun: str
    format: str  # under the key `clairai` of its metadata
    max_nbytes: int
    max_header: int
    other: str  # what to do with a file that is of no such kind
    again: str  # how to write it anew


def pack(header: Mapping[str, object], body: bytes) -> bytes:
    """Equal content gives equal bytes: safetensors' own writer orders metadata at random."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the numbers aligned, as safetensors does
    return _LENGTH.pack(len(text)) + text + body


def unpack(data: bytes, kind: Kind) -> tuple[dict[str, object], int]:
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
    return strict_object(data[_LENGTH.size : offset]), len(data) - offset


def fields(metadata: object, kind: Kind) -> dict[str, str]:
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
