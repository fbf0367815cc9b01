"""Reads a file that holds a secret, and refuses one that others could read or replace."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clairai.errors import ConfigError, quote


def read_secret_file(file: Path, limit: int) -> bytes:
    """At most `limit` bytes of it; ConfigError if it is larger, or not ours alone.

    Links are followed, as mounted secrets are links. What was opened is checked, so that nothing
    can be swapped in between; opening does not wait for the other end of a pipe.
    """
    shown = quote(str(file))
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "the path is not usable"
        raise ConfigError(
            f"key file {shown} cannot be read ({reason}); check --api-key-file"
        ) from None
    try:
        _check_owner_and_mode(os.fstat(opened), shown)
        with open(opened, "rb", closefd=False) as stream:
            data = stream.read(limit + 1)
    finally:
        os.close(opened)
    if len(data) > limit:
        raise ConfigError(f"key file {shown} has over {limit} bytes; it should hold keys alone")
    return data


def _check_owner_and_mode(found: os.stat_result, shown: str) -> None:
    """A group may read a file of root's if it is one of ours: so secrets are mounted for a user."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"key file {shown} is not a regular file; put the key into one")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"key file {shown} belongs to another user, who could change it; copy it, and chmod 600"
        )
    is_mounted = found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups())
    refused = 0o027 if is_mounted else 0o077
    if found.st_mode & refused:
        raise ConfigError(
            f"key file {shown} has mode {stat.S_IMODE(found.st_mode):04o}, so others can read or "
            f"change it; chmod 600 it, or mount it with mode 0400"
        )
