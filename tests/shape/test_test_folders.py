"""Every folder of tests is run, and tests/unit mirrors the package folder for folder."""

from __future__ import annotations

import tomllib
from typing import Final

from tests.shape.source import PACKAGE, ROOT

NOT_OF_TESTS: Final = {"tests/support"}
BESIDE_THE_PACKAGE: Final = {"scripts", "bench"}  # folders of the repository with unit tests


def test_every_folder_of_tests_is_run() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/__init__.py")}
    assert set(listed["testpaths"]) == folders - NOT_OF_TESTS


def test_unit_tests_lie_where_the_code_they_test_lies() -> None:
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    strange = [str(folder) for folder in folders if not (PACKAGE / folder).is_dir()]
    assert sorted(set(strange) - BESIDE_THE_PACKAGE) == []
