"""Takes paths of probe files, safetensors or the first clairai's JSON; gives checked Probes.

Nothing here trusts a file: only regular files are read, and only up to a bound.
"""

from __future__ import annotations

import glob
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from clairai.errors import ProbeError
from clairai.points import quote
from clairai.probe import native, seed
from clairai.probe.model import Probe
from clairai.probe.native import dumps as dumps
from clairai.probe.native import loads as loads
from clairai.probe.parse import within

SUFFIXES: Final = (".safetensors", ".json")
MAX_FILES: Final = 4096

StrPath = str | os.PathLike[str]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


def load(path: StrPath, *, target_layer: int | None = None) -> Probe:
    """The probe in one file; `target_layer` serves a JSON file whose name has no layer."""
    file = Path(path)
    if file.suffix == ".json":
        data = read(file, seed.MAX_NBYTES)
        return seed.loads(data, source=os.fspath(path), target_layer=target_layer)
    if file.suffix == ".safetensors":
        return native.loads(read(file, native.MAX_NBYTES), source=os.fspath(path))
    raise ProbeError(
        f"{shown(file)}: not a probe file; its name must end in {' or '.join(SUFFIXES)}"
    )


def load_many(path: StrPath, *, target_layer: int | None = None) -> list[Probe]:
    """Every probe of a file, a folder (not its subfolders) or a glob, by name; none twice."""
    files = listed(path, SUFFIXES)
    return by_name((file, load(file, target_layer=target_layer)) for file in files)


def by_name(loaded: Iterable[tuple[Path, Named]]) -> list[Named]:
    """In order of their names; ProbeError if two files hold one name."""
    found: dict[str, tuple[Path, Named]] = {}
    for file, one in loaded:
        if one.name in found:
            raise ProbeError(
                f"{shown(file)} and {shown(found[one.name][0])} are both named {one.name}; "
                "names are unique: rename one of them"
            )
        found[one.name] = file, one
    return [found[name][1] for name in sorted(found)]


def save(path: StrPath, probe: Probe) -> None:
    """Write the probe whole or not at all: after a crash `path` is the old file or the new one."""
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ProbeError(f"{shown(file)}: a probe is saved under a name ending in .safetensors")
    try:
        write_whole(file, native.dumps(probe))
    except (OSError, ValueError) as error:
        raise ProbeError(f"{shown(file)}: not saved, {cause(error)}; check the folder") from None


def write_whole(file: Path, data: bytes) -> None:
    """After a crash `file` is the old one or the new one."""
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


def read(file: Path, limit: int) -> bytes:
    """All of a regular file, if it has at most `limit` bytes."""
    with within(str(file)):
        descriptor = _open(file)
        try:
            return _regular_bytes(descriptor, limit)
        except OSError as error:
            raise ProbeError(f"cannot be read, {cause(error)}; copy the file again") from None
        finally:
            os.close(descriptor)


def _open(file: Path) -> int:
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer that never comes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        return os.open(file, flags)
    except (OSError, ValueError) as error:
        raise ProbeError(f"cannot be opened, {cause(error)}; check the path") from None


def _regular_bytes(descriptor: int, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ProbeError("not a regular file; give the file itself")
    data = b""
    if status.st_size <= limit:  # a file may grow after this, and some in /proc say 0
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(limit + 1)
    if max(status.st_size, len(data)) > limit:
        raise ProbeError(f"over {limit} bytes, the most such a file has; export it again")
    return data


def listed(path: StrPath, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a file, a folder or a glob, by name."""
    text = os.fspath(path)
    try:
        if os.path.isdir(text):
            files = [Path(text, name) for name in os.listdir(text) if _is_named(name, suffixes)]
        elif os.path.exists(text) or not glob.has_magic(text):
            return [Path(text)]
        else:
            files = [
                Path(name) for name in glob.iglob(text) if _is_named(Path(name).name, suffixes)
            ]
    except (OSError, ValueError) as error:
        raise ProbeError(f"{quote(text)}: cannot be listed, {cause(error)}") from None
    if not 1 <= len(files) <= MAX_FILES:
        raise ProbeError(
            f"{quote(text)} has {len(files)} such files; "
            f"give 1 to {MAX_FILES} with names ending in {' or '.join(suffixes)}"
        )
    return sorted(files)


def _is_named(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) and not name.startswith(".")


def shown(file: Path) -> str:
    return quote(str(file), limit=200)


def cause(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "the path is not usable"
