"""Loads step.c, which handles steps that are like the last one.

Runs in: the worker.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

from clairai.engine.publish.header_layout import c_definitions
from clairai.local import c_extension

SOURCE: Final = Path(__file__).with_name("step.c")


@functools.cache
def load_step_extension() -> Any:
    """The module that step.c is; None, and a warning, where there is no C compiler."""
    without = "the host's work in each step takes longer without it"
    return c_extension.load_or_warn(SOURCE, without, c_definitions())
