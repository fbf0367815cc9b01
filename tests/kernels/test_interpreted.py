"""The kernels of taps and ring give what their plain twins give, in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

HERE = Path(__file__).parent


@pytest.mark.skipif(
    Version(version("triton")) < Version("3.8"),
    reason="before 3.8 Triton's interpreter cannot count a loop with numpy 2.4",
)
@pytest.mark.timeout(1800)
def test_every_kernel_equals_its_plain_twin_in_the_interpreter() -> None:
    """One process for all of them: see conftest.py."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--durations=3", "--timeout=600", str(HERE)],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert "skipped" not in done.stdout
    assert int(passed[1]) > 30
