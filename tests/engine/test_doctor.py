"""`clairai doctor` says for every point whether it is served, or why not, without any weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


UNKNOWN = "import vllm; vllm.__version__ = '0.99.0'; from clairai.cli import main; main()"


def doctor(
    model: Path, *arguments: str, program: tuple[str, str] = ("-m", "clairai.cli")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "doctor", str(model), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)


def test_every_point_of_the_real_model_is_served() -> None:
    found = doctor(models.real())
    assert found.returncode == 0, found.stderr
    for layer in range(30):
        for kind in ("pre_attn", "post_attn", "post_block"):
            assert f" {kind}.{layer} " in found.stdout
    assert "90 of 90 points can be tapped" in found.stdout
    assert "refused" not in found.stdout


def test_a_point_that_a_model_does_not_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    found = doctor(models.tiny("gpt_neox", tmp_path / "gpt_neox"))
    assert found.returncode == 0, found.stderr
    assert "8 of 12 points can be tapped" in found.stdout
    assert "parallel block" in found.stdout


def test_a_model_that_computes_something_while_it_is_built_is_built(tmp_path: Path) -> None:
    """Bloom computes the slopes of its attention."""
    found = doctor(models.tiny("bloom", tmp_path / "bloom"))
    assert found.returncode == 0, found.stderr
    assert "12 of 12 points can be tapped" in found.stdout


def test_arguments_of_vllm_count_and_each_problem_is_said_beside_the_points(
    tmp_path: Path,
) -> None:
    """A mode that is refused, and a release that nobody has tested."""
    model = models.tiny("llama", tmp_path / "llama")
    arguments = ("--", "--trust-remote-code", "--enable-prompt-embeds")
    found = doctor(model, *arguments, program=("-c", UNKNOWN))
    assert found.returncode == 1
    assert "12 of 12 points can be tapped" in found.stdout
    assert "vLLM 0.99.0 is outside the tested range" in found.stderr
    assert "prompt embeddings" in found.stderr
