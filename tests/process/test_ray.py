"""A real Ray actor is sent weights by the manifest alone, one that serves and one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; pip install ray")
@pytest.mark.timeout(180)
def test_an_actor_of_ray_takes_weights() -> None:
    # Its servers write their last lines when we have gone on.
    with tempfile.TemporaryDirectory(prefix="clairai-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.process.ray_actor", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    plain, serving = told["Plain"], told["Serving"]
    for one in (plain, serving):
        assert one["pid"] != told["pid"], "the engine is a process of its own"
        assert one["homes"] == ["host", "host"]
        assert one["versions"] == [1, 2]
        assert one["version"] == 2
        assert one["sums"] == told["expected"]
    assert plain["resets"] == 2
    assert serving["paused"] == ["wait True", "resume"] * 2
