"""Prints tables, titled values and progress, for every group of commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import typer

Item = TypeVar("Item")


def print_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell: nothing is cut, not even in a pipe."""
    lines = [titles, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(titles))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def print_values(values: Mapping[str, object], *, title_width: int = 12) -> None:
    """One line for each title and its value."""
    for title, value in values.items():
        typer.echo(f"{title:<{title_width}}{value}")


def show_progress(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Pass `items` through, with a progress bar on a terminal and nothing in a pipe."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        items, label, total=total, console=console, disable=not console.is_terminal, transient=True
    )
