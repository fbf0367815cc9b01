"""Takes work in parts; gives them on, with a bar on a terminal and nothing in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, doing: str) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        items, doing, total=total, console=console, disable=not console.is_terminal, transient=True
    )
