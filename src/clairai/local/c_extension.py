"""Compile a C file of this package with the machine's own compiler, and load it as a module.

The library is built once and kept in the user's cache, under a name made of its source, with a
digest at its end that finds damage. What is loaded are the very bytes that were checked. A cache in
which others could write is passed by: the library is then built in a private folder at each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, Final

import numpy as np

from clairai.errors import describe_os_error
from clairai.local.trusted_folder import (
    UntrustedFolderError,
    cache_home,
    is_trusted_file,
    make_private_folder,
)

_log: Final = logging.getLogger(__name__)

COMPILER_FLAGS: Final = (
    "-O2",
    "-shared",
    "-fPIC",
    "-std=c99",
    "-D_POSIX_C_SOURCE=200809L",
    "-Wall",
)
COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S: Final = 60.0
NO_DEFINITIONS: Final[Mapping[str, str]] = {}
MAX_LIBRARY_BYTES: Final = 16 << 20
_FORMAT: Final = b"clairai library 1"  # before the digest at the end of a kept library
_FOOTER_BYTES: Final = len(_FORMAT) + hashlib.sha256().digest_size


class NoCompilerError(Exception):
    """There is no C compiler, or what it makes cannot be used; the message says why."""


def load_or_warn(
    source: Path, without: str, definitions: Mapping[str, str] = NO_DEFINITIONS
) -> Any:
    """Load a C file; None, and a warning that says what happens `without` it, if it fails."""
    try:
        return load_extension(source, definitions)
    except NoCompilerError as error:
        _log.warning("%s; %s", error, without)
        return None


def load_extension(source: Path, definitions: Mapping[str, str] = NO_DEFINITIONS) -> Any:
    """Load a C file as a module of the same name; `definitions` are macros for it."""
    cache = _open_cache()
    flags = (*COMPILER_FLAGS, *(f"-D{name}={value}" for name, value in definitions.items()))
    name = _library_name(source, flags)
    library = None if cache is None else _read_kept(cache / name)
    if library is not None:
        try:
            return _load(source.stem, library)
        except (ImportError, OSError) as error:
            _log.warning("%s cannot be loaded (%s); it is built again", name, error)
    library = _compile(source, flags, cache)
    if cache is not None:
        _keep(cache, name, library)
    try:
        return _load(source.stem, library)
    except (ImportError, OSError) as error:
        raise NoCompilerError(f"{source.name} was built and cannot be loaded: {error}") from error


def _open_cache() -> Path | None:
    """The folder of kept libraries; None, and a warning, if others could reach into it."""
    home = cache_home()
    if home is None:
        return None
    folder = home / "clairai" / "native"
    try:
        return make_private_folder(folder)
    except (UntrustedFolderError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        _log.warning(
            "%s is not used: %s; C code is built at each start until that is mended, or "
            "XDG_CACHE_HOME is a folder of this user",
            *(folder, reason),
        )
        return None


def _library_name(source: Path, flags: Sequence[str]) -> str:
    """Of its content: another source, compiler setting, Python or machine has another name."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    built_for = (*flags, os.uname().machine, libc, sys.version, np.__version__)
    headers = sorted(source.parent.glob("*.h"))
    content = b"\0".join(file.read_bytes() for file in (source, *headers))
    content += "\0".join(built_for).encode() + _FORMAT
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:24]}.so"


def _read_kept(path: Path) -> bytes | None:
    """The bytes of a kept library; None if it is not there, not ours or damaged."""
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not is_trusted_file(os.fstat(fd)):
            _log.warning("%s could have been written by others; it is built again", path)
            return None
        try:
            kept = file.read(MAX_LIBRARY_BYTES + 1)
        except OSError as error:
            _log.warning("%s cannot be read (%s); it is built again", path, error.strerror)
            return None
    library = kept[:-_FOOTER_BYTES]
    if len(kept) > MAX_LIBRARY_BYTES or kept[-_FOOTER_BYTES:] != _footer(library):
        _log.warning("%s is damaged; it is built again", path)
        return None
    return library


def _footer(library: bytes) -> bytes:
    return _FORMAT + hashlib.sha256(library).digest()


def _keep(cache: Path, name: str, library: bytes) -> None:
    """Write it whole or not at all; a cache that is full or read-only costs a build each start."""
    try:
        fd, scratch = tempfile.mkstemp(prefix=".clairai-", dir=cache)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(library + _footer(library))
                file.flush()
                os.fsync(fd)
            os.replace(scratch, cache / name)
        except BaseException:
            os.unlink(scratch)
            raise
        _sync_folder(cache)
    except OSError as error:
        _log.warning("%s cannot be kept in %s: %s", name, cache, describe_os_error(error))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _compile(source: Path, flags: Sequence[str], cache: Path | None) -> bytes:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler found ({', '.join(COMPILERS)})")
    headers = [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], np.get_include())]
    built = f"{source.stem}.so"
    command = [*compiler.split(), *flags, *headers, str(source.absolute()), "-o", built]
    try:
        with _scratch_folder(cache) as folder:
            _run_compiler(command, folder)
            return _read_built(folder, built)
    except OSError as error:
        raise NoCompilerError(f"no room to build {source.name}: {error}") from error


@contextlib.contextmanager
def _scratch_folder(parent: Path | None) -> Iterator[str]:
    """A new folder of this user alone, by descriptor: nobody can put another in its place."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="clairai-") as made:
        fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise OSError(f"{made} was exchanged for another folder")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)


def _run_compiler(command: Sequence[str], folder: str) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": "."},  # its own scratch files are as private
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{command[0]} could not be run: {error}") from None
    if done.returncode:
        raise NoCompilerError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")


def _read_built(folder: str, name: str) -> bytes:
    library = (Path(folder) / name).read_bytes()
    if len(library) + _FOOTER_BYTES > MAX_LIBRARY_BYTES:
        raise NoCompilerError(
            f"{name} has {len(library)} bytes, and {MAX_LIBRARY_BYTES} are loaded at most"
        )
    return library


def _load(name: str, library: bytes) -> Any:
    """Load it from memory: nothing can change between the check and the use.

    The descriptor stays open: the loader takes a second library under the same path for the first.
    """
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(library)
    loader = ExtensionFileLoader(name, f"/proc/self/fd/{fd}")
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
