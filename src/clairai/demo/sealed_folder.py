"""Builds a folder so that it is complete or absent, even if several processes build it at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from clairai.demo.console import say
from clairai.errors import ModelError

SEAL: Final = "clairai-seal.json"
LOCK_TIMEOUT_S: Final = 600.0
LOCK_POLL_S: Final = 0.1


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size and digest of each file of a complete folder."""

    recipe: str
    files: dict[str, tuple[int, str]]


def sealed_folder(target: Path, fill: Callable[[Path], None], *, recipe: str) -> Path:
    """Return `target`; call `fill` unless an intact folder of this `recipe` exists."""
    if is_intact(target, recipe=recipe):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(target.name + ".lock")):
        # Another process may have built it while this one waited.
        if not is_intact(target, recipe=recipe):
            _build(target, fill, recipe=recipe)
    return target


def is_intact(folder: Path, *, recipe: str) -> bool:
    """True if the folder has a seal and every file is as it was sealed."""
    try:
        seal = msgspec.json.decode((folder / SEAL).read_bytes(), type=Seal)
        return seal.recipe == recipe and seal.files == _fingerprints(folder)
    except (OSError, msgspec.DecodeError):
        return False


def _build(target: Path, fill: Callable[[Path], None], *, recipe: str) -> None:
    # One name for all builders: under the lock, a folder there was left by one that died.
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
        seal = Seal(recipe=recipe, files=_fingerprints(partial))
        (partial / SEAL).write_bytes(msgspec.json.format(msgspec.json.encode(seal)))
        _sync(partial)
        if target.exists():
            say(f"{target} is damaged or outdated: replacing it")
            shutil.rmtree(target)
        os.replace(partial, target)
        _sync_one(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fingerprints(folder: Path) -> dict[str, tuple[int, str]]:
    paths = sorted(path for path in folder.iterdir() if path.name != SEAL)
    return {path.name: (path.stat().st_size, _digest(path)) for path in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            # The header names every tensor and its bytes. Hashing half a gigabyte of weights on
            # each start would cost more than the damage it could find beyond the file's size.
            nbytes = int.from_bytes(file.read(8), "little")
            return hashlib.sha256(file.read(min(nbytes, path.stat().st_size))).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if not _try_lock(file.fileno()):
            say(f"waiting for another process that is building {path.stem}")
            _wait_for_lock(file.fileno(), path)
        yield


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
