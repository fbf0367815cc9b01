"""The walks of ARCHITECTURE.md pass files that exist, each of which imports or feeds the next."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.shape.source import ROOT, Module, ours, package

PAGE: Final = (ROOT / "ARCHITECTURE.md").read_text()
WALKS: Final = ("a score", "a steering entry", "a captured row", "a weight update")
_ITEM: Final = re.compile(r"^\d+\. `([\w./]+)`(?: \(through `([\w./]+)`\))?", re.MULTILINE)


class Stop(NamedTuple):
    """One file of a walk, and the file through which its predecessor feeds it."""

    file: str
    through: str | None


def walk(title: str, page: str = PAGE) -> list[Stop]:
    """The files that the section "The walk of ..." lists, in order."""
    section = page.split(f"## The walk of {title}\n", 1)[1].split("\n## ", 1)[0]
    return [Stop(file, through or None) for file, through in _ITEM.findall(section)]


@cache
def _modules() -> dict[str, Module]:
    return {module.name: module for module in package()}


def _dotted(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def is_linked(first: str, second: str) -> bool:
    """Whether one of two files imports the other; a file that is not Python names it."""
    known = frozenset(_modules())
    for importer, imported in ((first, second), (second, first)):
        module = _modules().get(_dotted(importer))
        if module is not None and _dotted(imported) in ours(module, known):
            return True
        if module is None and Path(imported).stem in _read(importer):
            return True
    return False


def _read(file: str) -> str:
    path = ROOT / file if file.startswith("web/") else ROOT / "src" / "clairai" / file
    return path.read_text()


def broken_links(stops: list[Stop]) -> list[str]:
    """Pairs of neighbours between which nothing passes."""
    return [
        f"{first.file} -> {second.file}"
        for first, second in pairwise(stops)
        if not _feeds(first.file, second.file, second.through)
    ]


def _feeds(first: str, second: str, through: str | None) -> bool:
    if through is None:
        return is_linked(first, second)
    return is_linked(first, through) and is_linked(through, second)


@pytest.mark.parametrize("title", WALKS)
def test_every_file_of_a_walk_exists(title: str) -> None:
    files = [file for stop in walk(title) for file in stop if file is not None]
    assert len(files) >= 5
    assert [file for file in files if not _read(file)] == []


@pytest.mark.parametrize("title", WALKS)
def test_each_file_of_a_walk_imports_or_feeds_the_next(title: str) -> None:
    assert broken_links(walk(title)) == []


def test_every_room_is_described() -> None:
    rooms = {module.name.split(".")[0] for module in package() if "." in module.name}
    assert {room for room in rooms if f"| `{room}/` |" not in PAGE} == set()


def test_a_walk_that_skips_a_file_is_found_out() -> None:
    page = (
        "## The walk of x\n\n1. `ring/layout.py`: a\n2. `train/fit.py` (through `points.py`): b\n"
    )
    assert broken_links(walk("x", page)) == ["ring/layout.py -> train/fit.py"]
    assert is_linked("ring/reader.py", "ring/layout.py")
