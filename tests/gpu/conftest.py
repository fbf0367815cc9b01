"""Gives GPU tests a GPU, or skips them with the reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine import models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; results are in docs/numbers.md")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], check=False).returncode == 0


@pytest.fixture(scope="session")
def real_model() -> Path:
    return models.real()
