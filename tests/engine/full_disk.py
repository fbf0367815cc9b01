"""A capture consumer whose disk is full while a file beside its folder exists.

As somebody else's package would bring it: an entry point, found wherever the engine's process and
its capture writer look for packages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from clairai.store.folder_consumers import FolderConsumer, fs

KIND: Final = "full_disk"
ENTRY: Final = f"[clairai.capture_consumers]\n{KIND} = tests.engine.full_disk:full_disk\n"


def full_disk(given: Mapping[str, Any], about: object) -> FolderConsumer:
    consumer = fs(given, about)
    committer = consumer._committer
    is_full, free_nbytes = no_room(Path(consumer.where)), committer._disk.free_nbytes
    committer._disk.free_nbytes = lambda: 0 if is_full.exists() else free_nbytes()  # type: ignore[method-assign]
    return consumer


def no_room(folder: Path) -> Path:
    """While this file exists the folder's disk is full."""
    return folder.with_name(f"{folder.name}-has-no-room")


def install(path: Path) -> None:
    """A package with the entry point, in this folder."""
    about = path / "clairai_full_disk-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: clairai-full-disk\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRY)


class Found:
    """Called in the engine's process before it starts: packages in this folder are found there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> None:
        sys.path.append(str(self._path))
