"""What a killed guard leaves to its launcher: processes, and their shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clairai.launch.engine_folder import end_leftovers, find_processes
from clairai.local.heartbeat import VARIABLE
from tests.support.ring_engine import until

# As vLLM's processes: shared memory that Python's resource tracker is to unlink.
ENGINE = (
    "import pathlib, sys, time\n"
    "from multiprocessing.shared_memory import SharedMemory\n"
    "memory = SharedMemory(create=True, size=64)\n"
    "pathlib.Path(sys.argv[1]).write_text(memory.name)\n"
    "time.sleep(600)\n"
)


@pytest.mark.attack(814)
@pytest.mark.parametrize("is_urgent", [False, True])
def test_shared_memory_of_killed_processes_is_unlinked(tmp_path: Path, is_urgent: bool) -> None:
    told = tmp_path / "told"
    environ = {**os.environ, VARIABLE: str(tmp_path)}
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(told)], env=environ)
    try:
        until(lambda: told.exists() and told.read_text())
        memory = Path("/dev/shm") / told.read_text()  # noqa: S108
        assert memory.exists()
        until(lambda: len(find_processes(tmp_path)) == 2)  # with its tracker
        end_leftovers(tmp_path, lambda: is_urgent)
        assert find_processes(tmp_path) == []
        assert not memory.exists()
    finally:
        engine.kill()
        engine.wait()
