"""`clairai doctor` says for every point whether it is served, or why not, without any weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


def doctor(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clairai.cli", "doctor", str(model)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_every_point_of_the_real_model_is_served() -> None:
    found = doctor(models.real())
    assert found.returncode == 0, found.stderr
    for layer in range(30):
        for kind in ("pre_attn", "post_attn", "post_block"):
            assert f" {kind}.{layer} " in found.stdout
    assert "90 of 90 points can be tapped" in found.stdout
    assert "refused" not in found.stdout


def test_a_post_norm_model_is_refused_with_the_reason_and_a_failing_exit_code(
    tmp_path: Path,
) -> None:
    found = doctor(models.tiny("olmo2", tmp_path / "olmo2"))
    assert found.returncode == 1
    assert "0 of 12 points can be tapped" in found.stdout
    assert "post-LN" in found.stdout
    assert "no point of this architecture can be tapped" in found.stderr
