"""A kernel's module with a bug planted in its source."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def planted(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """From a file of its own, as Triton reads a kernel's source; `old` must stand there once."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    path = folder / "planted.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
