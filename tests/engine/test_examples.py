"""The examples run as written, in vLLM's default mode: an engine core in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.process import ENVIRONMENT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_offline_example_finds_code_in_the_answer_that_has_it(runtime: Path) -> None:
    environment = os.environ | ENVIRONMENT | {"CLAIRAI_RUNTIME_DIR": str(runtime)}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    code = [float(mean) for mean in re.findall(r"code +mean over the answer ([\d.]+)", ran.stdout)]
    assert len(code) == 2
    assert code[0] > 0.5 > code[1]
