"""How a trainer that gets no answers learns where an engine takes weights: by a file.

vLLM's trainer interface is a client of four calls without results. A trainer names a session in the
first one, and the engine's first rank writes its state to a file of that name, in the private
folder of its sockets. Runs in: the worker writes, the trainer reads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from clairai.errors import EngineGoneError, WeightsError, quote
from clairai.wire.weights_messages import WeightsState

_SESSION: Final = re.compile(r"[0-9a-f]{32}")
_MAX_BYTES: Final = 1 << 16


def session_path(folder: Path, session: str) -> Path:
    """The file of a session; its name can leave the folder for no other."""
    if not _SESSION.fullmatch(session):
        raise WeightsError(f"{quote(session)} names no session; give 32 hex digits")
    return folder / f"weights-{session}.json"


def write_state(folder: Path, session: str, state: WeightsState) -> None:
    """Replace the file of a session, readable for this user alone."""
    path = session_path(folder, session)
    starting = path.with_suffix(".new")
    fd = os.open(starting, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as target:
        target.write(msgspec.json.encode(state))
    starting.rename(path)


def take_state(folder: Path, session: str) -> WeightsState:
    """Read and remove the file of a session; EngineGoneError if the engine wrote it elsewhere."""
    path = session_path(folder, session)
    try:
        with path.open("rb") as source:
            raw = source.read(_MAX_BYTES)
        path.unlink()
    except FileNotFoundError:
        raise EngineGoneError(
            f"no engine has answered in {folder}: send from the engine's own machine, as its own "
            f"user, with the same CLAIRAI_RUNTIME_DIR"
        ) from None
    try:
        return msgspec.json.decode(raw, type=WeightsState)
    except msgspec.MsgspecError:
        raise WeightsError(f"{path.name} is no state of an engine; run the same clairai") from None
