"""A C extension of a few lines, whose one constant says which build of it was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

TINY: Final = """
#include <Python.h>
#include "tiny.h"
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_tiny(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "ANSWER", ANSWER);
    return module;
}
"""
HEADER: Final = """
#ifndef ANSWER
#define ANSWER 42
#endif
"""


def write_source(folder: Path) -> Path:
    """Write tiny.c and its header into a new folder; return tiny.c."""
    folder.mkdir()
    (folder / "tiny.c").write_text(TINY)
    (folder / "tiny.h").write_text(HEADER)
    return folder / "tiny.c"


def kept_library(cache_home: Path) -> Path:
    """The one kept library below $XDG_CACHE_HOME."""
    (library,) = (cache_home / "clairai" / "native").glob("*.so")
    return library


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are kept, and nothing is yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
