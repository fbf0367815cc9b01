"""Shows the progress of a slow job on stderr: a bar on a terminal, otherwise plain lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def say(line: str) -> None:
    """Print one line on stderr: stdout is for the result."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)


def show_progress(items: Iterable[Item], *, total: int, label: str) -> Iterator[Item]:
    """Pass `items` through unchanged while showing how far along they are."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        yield from track(items, description=label, total=total, console=console, transient=True)
        return
    quarters_shown = 0
    for num_done, item in enumerate(items, start=1):
        yield item
        quarters = 4 * num_done // max(total, 1)
        if quarters > quarters_shown:
            say(f"{label}: {25 * quarters}%")
            quarters_shown = quarters
