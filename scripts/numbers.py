"""Replaces one section of docs/numbers.md by newly measured numbers."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "numbers.md"
OPENING: Final = (
    "# Numbers\n\nEvery number this project publishes: the command, the day, the class of machine "
    "and the output.\n"
)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stamp(command: str, *, took: str) -> str:
    """The line that makes a number repeatable."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{os.cpu_count()} cores, CPU, Python {platform.python_version()}"
    return f"`{command}` on {today}, {machine}, took {took}."


def write_section(heading: str, paragraphs: Sequence[str], *, page: Path = PAGE) -> None:
    """Put `paragraphs` under `heading`, in place of what stood there; all else is kept."""
    text = page.read_text() if page.exists() else OPENING
    section = "\n\n".join([f"## {heading}", *paragraphs]) + "\n"
    parts = text.split("\n## ")
    kept = [part for part in parts[1:] if part.splitlines()[0] != heading]
    sections = [f"## {part.strip()}\n" for part in kept] + [section]
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join([parts[0].strip() + "\n", *sections]))
