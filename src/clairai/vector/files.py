"""Loads and saves vectors: safetensors, GGUF control vectors, and JSON (loading only).

Files are untrusted: only regular files are read, and only up to a bound. The first bytes decide
the format; in a folder the suffix decides which files are read.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Final

from clairai.errors import ProbeError, VectorError, describe_os_error
from clairai.probe.file_format import (
    StrPath,
    list_files,
    quote_path,
    read_file,
    replace_file,
    sort_by_name,
)
from clairai.vector import gguf_format, json_format, safetensors_format
from clairai.vector.model import Vector
from clairai.vector.safetensors_format import dumps as dumps

SUFFIXES: Final = (".safetensors", ".gguf", ".json")
MAX_NBYTES: Final = max(
    safetensors_format.MAX_NBYTES, gguf_format.MAX_NBYTES, json_format.MAX_NBYTES
)

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # some editors begin UTF-8 with it


def load(path: StrPath, *, name: str | None = None) -> Vector:
    """The vector in one file. GGUF and JSON hold no name: it is `name`, or else the file's."""
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise VectorError(
            f"{quote_path(file)}: not a vector's file; its name must end in {' or '.join(SUFFIXES)}"
        )
    try:
        data = read_file(file, MAX_NBYTES)
    except ProbeError as error:  # its message names the file
        raise VectorError(error.reason) from None
    return loads(data, source=os.fspath(path), name=name)


def loads(data: bytes, *, source: str, name: str | None = None) -> Vector:
    """The vector in `data`; VectorError, naming `source`, if it holds none.

    A vector in safetensors keeps the name in the file. Others are called `name`, or else as
    `source` is.
    """
    called = PurePath(source).stem if name is None else name
    if data.startswith(gguf_format.MAGIC):
        return gguf_format.loads(data, source=source, name=called)
    if _is_json(data):
        return json_format.loads(data, source=source, name=called)
    return safetensors_format.loads(data, source=source)


def load_many(path: StrPath) -> list[Vector]:
    """All vectors of a file, a folder (not its subfolders) or a glob, sorted by unique names."""
    try:
        return sort_by_name((file, load(file)) for file in list_files(path, SUFFIXES))
    except ProbeError as error:  # about the folder: errors of a file are VectorErrors already
        raise VectorError(error.reason) from None


def save(vector: Vector, path: StrPath) -> None:
    """Write the vector atomically, as safetensors or GGUF by the suffix of `path`."""
    file = Path(path)
    if file.suffix not in (".safetensors", ".gguf"):
        raise VectorError(
            f"{quote_path(file)}: a vector is saved under a name ending in .safetensors or .gguf"
        )
    data = gguf_format.dumps(vector) if file.suffix == ".gguf" else safetensors_format.dumps(vector)
    try:
        replace_file(file, data)
    except (OSError, ValueError) as error:
        raise VectorError(
            f"{quote_path(file)}: not saved, {describe_os_error(error)}; check the folder"
        ) from None


def _is_json(data: bytes) -> bool:
    # Safetensors begin with an 8-byte header length, which is small enough to contain zeros.
    start = data[:256].removeprefix(_BYTE_ORDER_MARK).lstrip(b" \t\r\n")
    return start.startswith(b"{") and b"\0" not in data[:8]
