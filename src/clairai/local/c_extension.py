"""Compile a C file of this package with the machine's own compiler, and load it as a module.

The library is built once and kept in the user's cache, under a name made of its content: whoever
finds it there has exactly this code, and no other user can write there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, Final

import numpy as np

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


class NoCompilerError(Exception):
    """There is no C compiler, or it failed; the message says which."""


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
    library = build_extension(source, _cache_folder(), definitions)
    loader = ExtensionFileLoader(source.stem, str(library))
    spec = importlib.util.spec_from_loader(source.stem, loader)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def build_extension(
    source: Path, cache: Path, definitions: Mapping[str, str] = NO_DEFINITIONS
) -> Path:
    """Return the library of a C file, compiling it unless the cache has it."""
    flags = (*COMPILER_FLAGS, *(f"-D{name}={value}" for name, value in definitions.items()))
    built_for = (*flags, os.uname().machine, sys.version, np.__version__)
    headers = sorted(source.parent.glob("*.h"))
    content = b"\0".join(file.read_bytes() for file in (source, *headers))
    content += "\0".join(built_for).encode()
    library = cache / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:24]}.so"
    if not _is_private(library):
        _compile(source, library, flags)
    return library


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "clairai" / "native"


def _is_private(library: Path) -> bool:
    """True if it exists and only this user can have written it."""
    try:
        found, folder = library.stat(), library.parent.stat()
    except OSError:
        return False
    is_private = not (found.st_mode | folder.st_mode) & 0o022
    return is_private and found.st_uid == folder.st_uid == os.geteuid()


def _compile(source: Path, library: Path, flags: Sequence[str]) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"no C compiler found ({', '.join(COMPILERS)})")
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    library.parent.chmod(0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        headers = [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], np.get_include())]
        command = [*compiler.split(), *flags, *headers, str(source), "-o", str(built)]
        try:
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompilerError(f"{compiler} could not be run: {error}") from None
        if done.returncode:
            raise NoCompilerError(f"{compiler} failed: {done.stderr.strip()[-300:]}")
        built.chmod(0o700)
        built.replace(library)
