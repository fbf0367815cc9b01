"""Folders in which no other user can write, rename or swap anything, checked up to the root.

What lies in such a folder is what this user, or root, put there: code may be loaded from it, and
nobody can exchange a file between the check and its use. sshd's StrictModes asks the same.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o700
_ROOT: Final = 0


class UntrustedFolderError(Exception):
    """Other users could change what lies there; the message says how."""


def cache_home() -> Path | None:
    """$XDG_CACHE_HOME or ~/.cache; None for a user without a home.

    A relative $XDG_CACHE_HOME is ignored, as its specification demands: it would be another folder
    wherever a process starts, and perhaps somebody else's.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # neither $HOME nor an entry in the list of users
        return None


def why_untrusted(path: Path) -> str | None:
    """How others could change this file or folder; None if nobody else can.

    Every folder on the way is judged, and every link: as it was given, and as it is without links.
    """
    ends, way = _find_way(path)
    faults = (*map(_why_foreign, ends), *map(_why_writable, ends), *map(_why_exchangeable, way))
    return next(filter(None, faults), None)


def _find_way(path: Path) -> tuple[list[Path], list[Path]]:
    """`path` as given and without links; the folders, and links to folders, that lead to both."""
    ends = list(dict.fromkeys((Path(os.path.abspath(path)), path.resolve(strict=True))))
    return ends, list(dict.fromkeys(parent for end in ends for parent in end.parents))


def _why_foreign(path: Path) -> str | None:
    owner = path.lstat().st_uid
    if owner in (_ROOT, os.geteuid()):
        return None
    return f"{path} belongs to user {owner}, and this is user {os.geteuid()}"


def _why_writable(path: Path) -> str | None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or not _is_writable_by_others(status):  # a link has no mode
        return None
    return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"


def _why_exchangeable(folder: Path) -> str | None:
    """How others could exchange what lies in this folder for something else."""
    # In a sticky folder (/tmp) others can add files, and touch none that exist.
    is_sticky = folder.lstat().st_mode & stat.S_ISVTX
    return _why_foreign(folder) or (None if is_sticky else _why_writable(folder))


def is_trusted_file(status: os.stat_result) -> bool:
    """True for a regular file with one name that only this user, or root, can have written."""
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    is_ours = status.st_uid in (_ROOT, os.geteuid())
    return is_plain and is_ours and not _is_writable_by_others(status)


def make_private_folder(path: Path) -> Path:
    """Return the folder without links, made if it is missing, and closed to other users.

    UntrustedFolderError if it belongs to somebody else, or others can exchange it; OSError if it
    cannot be made.
    """
    present = Path(os.path.abspath(path))
    missing = []
    while not os.path.lexists(present):
        missing.append(present.name)
        present = present.parent
    # Before anything is made or changed, perhaps through somebody's link.
    ends, way = _find_way(present)
    way += ends if missing else []
    _refuse(map(_why_exchangeable, way), map(_why_foreign, ends))
    folder = present.resolve(strict=True)
    for name in reversed(missing):
        folder /= name
        folder.mkdir(PRIVATE, exist_ok=True)
    _close_to_others(folder)
    _refuse([why_untrusted(folder)])
    return folder


def _refuse(*faults: Iterable[str | None]) -> None:
    for fault in filter(None, chain.from_iterable(faults)):
        raise UntrustedFolderError(fault)


def _close_to_others(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise UntrustedFolderError(
                f"{folder} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
            )
        if _is_writable_by_others(status):
            os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)


def _is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """True for a group of this user alone: many systems give each user one, and umask 002."""
    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
    others = (each for each in pwd.getpwall() if each.pw_uid != user.pw_uid)
    is_shared = not set(members) <= {user.pw_name} or any(each.pw_gid == gid for each in others)
    return gid == user.pw_gid and not is_shared
