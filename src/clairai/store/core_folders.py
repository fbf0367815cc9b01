"""The folders of several engine cores below one folder of captures; each has its own writer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

_NAME: Final = re.compile(r"engine-core-(0|[1-9][0-9]{0,4})", re.ASCII)


def core_folder(path: str, core: int) -> str:
    """The folder, or the address, that the engine core with this number writes to."""
    return f"{path.rstrip('/')}/engine-core-{core}"


def sort_core_names(names: Iterable[str]) -> list[str]:
    """Those that are folders of engine cores, by their numbers."""
    found = {name: match for name in names if (match := _NAME.fullmatch(name))}
    return sorted(found, key=lambda name: int(found[name][1]))


def whole_folder(path: str) -> str:
    """The folder of captures that this one is, or that it is an engine core's part of."""
    parent, name = os.path.split(path)
    return parent if sort_core_names([name]) else path
