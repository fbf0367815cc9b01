"""A vLLM plugin that lets processes of a test's engine sleep soon after they have done their work.

SpinCondition.__init__  distributed/device_communicators/shm_broadcast.py  0.32:133: whoever waits
for a message of another process of the engine calls sched_yield for a second before it sleeps. With
such a process on each of two CPUs, the test itself, and the one beside it, hardly run for that
second, after each answer and each call. vLLM finds the plugin by an entry point, in every process
of every engine that a test starts; where a release has no such class, it does nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any, Final

BUSY_S: Final = 0.01
_NAME: Final = "clairai_idle_workers"


def install(folder: Path) -> None:
    """Put the plugin into an empty folder, and have all processes that are started find it."""
    about = folder / f"{_NAME}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\nidle_workers = {_NAME}:register\n"
    (about / "entry_points.txt").write_text(entry)
    shutil.copy(__file__, folder / f"{_NAME}.py")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def register() -> None:
    """Called by vLLM, in each process of an engine."""
    from vllm.distributed.device_communicators import shm_broadcast

    condition: Any = getattr(shm_broadcast, "SpinCondition", None)
    if condition is not None and not hasattr(condition.__init__, "__wrapped__"):
        condition.__init__ = _with_less_spinning(condition.__init__)


def _with_less_spinning(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_reader:
            self.busy_loop_s = min(self.busy_loop_s, BUSY_S)

    return init
