"""Folders of tiny models, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(architecture: str) -> Path:
        target = root / architecture
        return target if target.exists() else models.tiny(architecture, target)

    return make
