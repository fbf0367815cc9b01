"""The tensors in a folder of safetensors files, from their headers alone. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from clairai.errors import WeightsError
from clairai.weights.manifest import ITEM_BYTES, MAX_TENSORS

MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own bound
_LENGTH: Final = struct.Struct("<Q")
_FILE_PATTERN: Final = "*.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a model's folder, in order."""
    found = sorted(folder.glob(_FILE_PATTERN)) if folder.is_dir() else []
    if not found:
        raise WeightsError(
            f"{folder} holds no {_FILE_PATTERN}; give a folder with a model's weights"
        )
    return found


def list_tensors(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name, dtype, shape) of every tensor; WeightsError for a broken file."""
    count = 0
    for file in weight_files(folder):
        for name, entry in _read_header(file).items():
            count += 1
            if count > MAX_TENSORS:
                raise WeightsError(f"{folder} names over {MAX_TENSORS} tensors")
            yield name, *_parse_entry(file, name, entry)


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as source:
        head = source.read(_LENGTH.size)
        nbytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MAX_HEADER_BYTES + 1
        if nbytes > MAX_HEADER_BYTES:
            raise WeightsError(f"{file.name} is not safetensors; copy it again")
        raw = source.read(nbytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise WeightsError(f"{file.name} has no readable header; copy it again") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{file.name} has no readable header; copy it again")
    header.pop("__metadata__", None)
    return header


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...]]:
    try:
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
    except (TypeError, KeyError, ValueError):
        raise WeightsError(f"{file.name}: tensor {name!r:.60} has no dtype and shape") from None
    if dtype not in ITEM_BYTES:
        raise WeightsError(
            f"{file.name}: tensor {name!r:.60} has dtype {dtype!r:.20}, which cannot be sent"
        )
    return dtype, shape
