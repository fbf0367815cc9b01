"""Builds a folder so that it is complete or absent, even if several processes build it at once.

It is used again only if every byte is as it was sealed, and nobody else can have written, or can
exchange, any of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from clairai.demo.console import say
from clairai.errors import ModelError
from clairai.local.trusted_folder import (
    PRIVATE,
    is_trusted_file,
    make_private_folder,
    why_untrusted,
)

SEAL: Final = "clairai-seal.json"
MAX_SEAL_BYTES: Final = 1 << 20
LOCK_TIMEOUT_S: Final = 600.0
LOCK_POLL_S: Final = 0.1


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and digest of each file of a complete folder."""

    recipe: str
    files: dict[str, tuple[int, str]]


def sealed_folder(target: Path, fill: Callable[[Path], None], *, recipe: str) -> Path:
    """Return `target`; call `fill` unless an intact folder of this `recipe` exists.

    UntrustedFolderError if others can write to the folder that it lies in.
    """
    if is_intact(target, recipe=recipe):
        return target
    parent = make_private_folder(target.parent)
    with _lock(parent / f"{target.name}.lock"):
        # Another process may have built it while this one waited.
        if not is_intact(target, recipe=recipe):
            _build(parent / target.name, fill, recipe=recipe)
    return target


def is_intact(folder: Path, *, recipe: str) -> bool:
    """True if the folder has a seal, every file is as it was sealed, and all of it is trusted."""
    try:
        if why_untrusted(folder) is not None:
            return False
        seal = msgspec.json.decode(_read_seal(folder), type=Seal)
        return seal.recipe == recipe and seal.files == _fingerprints(folder)
    except (OSError, msgspec.DecodeError):
        return False


def _read_seal(folder: Path) -> bytes:
    with _open_trusted(folder / SEAL) as file:
        return file.read(MAX_SEAL_BYTES)


def _build(target: Path, fill: Callable[[Path], None], *, recipe: str) -> None:
    # One name for all builders: under the lock, a folder there was left by one that died.
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(PRIVATE)
    try:
        fill(partial)
        for path in partial.iterdir():
            path.chmod(0o600)  # whatever the umask is
        seal = Seal(recipe=recipe, files=_fingerprints(partial))
        (partial / SEAL).write_bytes(msgspec.json.format(msgspec.json.encode(seal)))
        (partial / SEAL).chmod(0o600)
        _sync(partial)
        if target.exists():
            say(f"{target} is damaged or outdated: replacing it")
            shutil.rmtree(target)
        os.replace(partial, target)
        _sync_one(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fingerprints(folder: Path) -> dict[str, tuple[int, str]]:
    names = sorted(path.name for path in folder.iterdir() if path.name != SEAL)
    return {name: _fingerprint(folder / name) for name in names}


def _fingerprint(path: Path) -> tuple[int, str]:
    """The size and digest of all of it: half a gigabyte takes about a second."""
    with _open_trusted(path) as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _open_trusted(path: Path) -> BufferedReader:
    """Open a plain file that nobody else can have written; OSError for anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags), "rb")
    if not is_trusted_file(os.fstat(file.fileno())):
        file.close()
        raise PermissionError(f"{path} could have been written by others")
    return file


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(fd):
            say(f"waiting for another process that is building {path.stem}")
            _wait_for_lock(fd, path)
        yield
    finally:
        os.close(fd)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            raise ModelError(
                f"another process has held {path} for more than {LOCK_TIMEOUT_S:.0f} s; "
                "end it, or set CLAIRAI_CACHE to another folder"
            )
        time.sleep(LOCK_POLL_S)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
