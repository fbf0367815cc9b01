"""What probe files and vector files share: reading and writing them without trusting a byte.

Only regular files are read, and only up to a bound. A file is safetensors with metadata of ours,
or JSON; lengths are bounded before they are used, and the header is checked before the safetensors
library sees it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Never, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from clairai.errors import PointError, ProbeError, describe_os_error, quote

MAX_FILES: Final = 4096
METADATA: Final = "__metadata__"
MAX_KEYS: Final = 32
MAX_VALUE: Final = 1024
_PIECE_NBYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("<Q")
_NUMBER_PATTERN: Final = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?")

StrPath = str | os.PathLike[str]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


# Files


def list_files(path: StrPath, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of a path, a folder (not its subfolders) or a glob, by name."""
    text = os.fspath(path)
    try:
        if os.path.isdir(text):
            files = [Path(text, name) for name in os.listdir(text) if _has_suffix(name, suffixes)]
        elif os.path.exists(text) or not glob.has_magic(text):
            return [Path(text)]
        else:
            files = [
                Path(name) for name in glob.iglob(text) if _has_suffix(Path(name).name, suffixes)
            ]
    except (OSError, ValueError) as error:
        raise ProbeError(f"{quote(text)}: cannot be listed, {describe_os_error(error)}") from None
    if not 1 <= len(files) <= MAX_FILES:
        raise ProbeError(
            f"{quote(text)} has {len(files)} such files; "
            f"give 1 to {MAX_FILES} with names ending in {' or '.join(suffixes)}"
        )
    return sorted(files)


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) and not name.startswith(".")


def sort_by_name(loaded: Iterable[tuple[Path, Named]]) -> list[Named]:
    """Sort what was loaded by name. Raises ProbeError if two files hold the same name."""
    by_name: dict[str, tuple[Path, Named]] = {}
    for file, item in loaded:
        if item.name in by_name:
            other, _ = by_name[item.name]
            raise ProbeError(
                f"{quote_path(file)} and {quote_path(other)} are both named {item.name}; "
                "names are unique: rename one of them"
            )
        by_name[item.name] = file, item
    return [by_name[name][1] for name in sorted(by_name)]


def read_file(file: Path, limit: int) -> bytes:
    """Return all of a regular file, if it has at most `limit` bytes."""
    with errors_about(str(file)):
        descriptor = _open_file(file)
        try:
            return _read_regular(descriptor, limit)
        except OSError as error:
            raise ProbeError(
                f"cannot be read, {describe_os_error(error)}; copy the file again"
            ) from None
        finally:
            os.close(descriptor)


def _open_file(file: Path) -> int:
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer that never comes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(file, flags)
    except (OSError, ValueError) as error:
        raise ProbeError(f"cannot be opened, {describe_os_error(error)}; check the path") from None


def _read_regular(descriptor: int, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProbeError("not a regular file; give the file itself")
    data = b""
    if status.st_size <= limit:  # it may grow after this, and some files in /proc state 0
        with open(descriptor, "rb", closefd=False) as opened:
            data = read_at_most(opened, limit + 1)
    if max(status.st_size, len(data)) > limit:
        raise ProbeError(f"over {limit} bytes, the most such a file has; export it again")
    return data


def read_at_most(opened: IO[bytes], limit: int) -> bytes:
    """Read up to `limit` bytes; `read(limit)` alone takes memory for all of them at once."""
    parts: list[bytes] = []
    left = limit
    while left and (part := opened.read(min(left, _PIECE_NBYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def replace_file(file: Path, data: bytes) -> None:
    """Write a file so that after a crash it is the old one or the new one."""
    descriptor, scratch = tempfile.mkstemp(prefix=".clairai-", suffix=".tmp", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(scratch, file)
    except BaseException:
        os.unlink(scratch)
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself can be lost in a power cut.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quote_path(file: Path) -> str:
    return quote(str(file), limit=200)


# Safetensors


@dataclass(frozen=True)
class FileFormat:
    """A kind of safetensors file, its bounds, and what its errors advise."""

    noun: str
    format: str  # under the key `clairai` of its metadata
    max_nbytes: int
    max_header: int
    other: str  # advice for a file that is not of this kind
    again: str  # advice on how to write it again


def pack_file(header: Mapping[str, object], body: bytes) -> bytes:
    """Return the bytes of a file; equal content gives equal bytes.

    Safetensors' own writer orders metadata at random.
    """
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors, as safetensors does
    return _LENGTH.pack(len(text)) + text + body


def unpack_file(data: bytes, file_format: FileFormat) -> tuple[dict[str, object], int]:
    """Return the header, and the number of bytes behind it."""
    if len(data) > file_format.max_nbytes:
        raise ProbeError(
            f"{len(data)} bytes, and a {file_format.noun} has at most {file_format.max_nbytes}"
        )
    if len(data) < _LENGTH.size:
        raise ProbeError(f"{len(data)} bytes is too short for safetensors; copy the file again")
    (length,) = _LENGTH.unpack_from(data)
    if length > file_format.max_header:
        raise ProbeError(
            f"header of {length} bytes, and a {file_format.noun} has at most "
            f"{file_format.max_header}; {file_format.other}"
        )
    offset = _LENGTH.size + length
    if offset > len(data):
        raise ProbeError(f"cut short: {len(data)} of at least {offset} bytes; copy the file again")
    return parse_json_object(data[_LENGTH.size : offset]), len(data) - offset


def read_metadata(metadata: object, file_format: FileFormat) -> dict[str, str]:
    """Check a header's metadata: the format, and that everything is bounded text."""
    if not isinstance(metadata, dict) or metadata.get("clairai") != file_format.format:
        stated = metadata.get("clairai") if isinstance(metadata, dict) else None
        raise ProbeError(
            f"metadata says clairai={quote(stated)}, and this version reads {file_format.format}; "
            f"{file_format.again}"
        )
    if len(metadata) > MAX_KEYS:
        raise ProbeError(
            f"{len(metadata)} metadata keys, and a {file_format.noun} has at most {MAX_KEYS}"
        )
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or len(key) > MAX_VALUE:
            raise ProbeError(
                f"metadata {quote(key)} must be text of at most {MAX_VALUE} characters"
            )
    return cast(dict[str, str], metadata)


def to_float32(dtype: str, body: bytes) -> NDArray[np.float32]:
    """Convert the bytes of a tensor of type F32, F16 or BF16."""
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(body, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(body, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def parse_number(text: str) -> float:
    """Parse a number in metadata: digits and nothing else."""
    if _NUMBER_PATTERN.fullmatch(text) is None:
        raise ProbeError(f"{quote(text)} is not a number; write it as 0.5 or 5e-1")
    return float(text)


# JSON


@contextmanager
def errors_about(source: str) -> Iterator[None]:
    """Name the file in every error of its parser, and raise nothing but ProbeError."""
    try:
        yield
    except (ProbeError, PointError) as error:
        raise ProbeError(f"{quote(source, limit=200)}: {error.reason}") from None
    except RecursionError:
        raise ProbeError(
            f"{quote(source, limit=200)}: nested too deep; a probe file has two levels"
        ) from None


def parse_json_object(data: bytes) -> dict[str, object]:
    """Parse one JSON object in UTF-8, with no duplicate keys and no NaN or Infinity."""
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
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ProbeError(f"the key {quote(key)} appears twice; keep one of them")
        unique[key] = value
    return unique


def _refuse_constant(name: str) -> Never:
    raise ProbeError(f"holds {name}, which is not a number in JSON; use finite numbers")


def _describe_json_error(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number is too long"
