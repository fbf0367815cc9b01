"""How a process of ours is started from a process of vLLM: a module of this package, no shell."""

from __future__ import annotations

import os
import sys
from typing import Final

# Such a process handles a few rows at a time: these libraries need no threads of their own.
SINGLE_THREADED: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """It finds the packages of this process, and nothing in the current folder."""
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    return {**os.environ, **SINGLE_THREADED, "PYTHONPATH": path}
