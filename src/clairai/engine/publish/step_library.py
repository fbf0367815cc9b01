"""Takes the name of a C file beside this one; gives the module the machine's compiler makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clairai.local import c_extension


def find_step_library() -> Any:
    """The module that step.c is; None, and a warning, where there is no compiler."""
    source = Path(__file__).with_name("step.c")
    return c_extension.load_or_warn(source, "the host's work in each step takes longer without it")


def load_library(name: str) -> Any:
    """Its functions keep Python's lock: they are short."""
    return c_extension.load_extension(Path(__file__).with_name(name))
