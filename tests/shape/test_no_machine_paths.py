"""No file of the repository names a developer's machine or a registry's host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.shape.source import ROOT

# Spelt in two halves, so that this file does not name them either.
FORBIDDEN: Final = re.compile(
    "|".join(
        (
            *(rf"(?<![\w.]){path}" for path in ("/ro" + "ot/", "/Use" + "rs/")),
            r"(?<![\w.])/ho" + "me/(?!someone)",  # the tests' made-up user
            *(rf"(?<![\w.]){path}" for path in ("/wo" + "rk/", "/tm" + "p/dev/")),
            *("/opt/" + "wheels", "py" + r"pi\.org", "npm" + "js"),
        )
    )
)
# What the targets of the Makefile and the tools make beside the sources.
MADE: Final = frozenset(
    (
        *(".git", ".matrix", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
        *(".hypothesis", "__pycache__", "node_modules", "dist", "build"),
    )
)
MADE_STARTS: Final = (".venv", ".gpu")
MAX_NBYTES: Final = 1 << 20


def files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name in MADE or entry.name.startswith(MADE_STARTS) or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from files(entry)
        elif entry.stat().st_size <= MAX_NBYTES:
            yield entry


def mentions(raw: bytes) -> list[str]:
    """Lines of a text that name a machine; a binary file has none."""
    if b"\0" in raw:
        return []
    lines = raw.decode(errors="replace").splitlines()
    return [line.strip()[:120] for line in lines if FORBIDDEN.search(line)]


def test_no_file_names_a_developers_machine_or_a_registry() -> None:
    found = {str(file.relative_to(ROOT)): mentions(file.read_bytes()) for file in files(ROOT)}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert "pyproject.toml" in found  # the rule looks at something


@pytest.mark.parametrize(
    "text",
    [
        "cd /ro" + "ot/clairai",
        'path = "/ho' + 'me/me/models"',
        "(/wo" + "rk/main/src)",
        "/opt/" + "wheels/vllm.whl",
        "https://py" + "pi.org/simple",
        "https://registry.npm" + "js.org",
    ],
)
def test_a_path_of_a_machine_is_found(text: str) -> None:
    assert len(mentions(f"first\n{text}\n".encode())) == 1


@pytest.mark.parametrize(
    "text", ["the framework/plugin", "PyPI", "~/.cache/clairai", "/models/tiny", "a/wo" + "rk/b"]
)
def test_other_paths_are_let_be(text: str) -> None:
    assert mentions(text.encode()) == []
