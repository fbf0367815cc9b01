"""The page of numbered attempts lists exactly the tests that are marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.list_attacks import PAGE, find_attacks, render


def test_the_page_lists_every_marked_test() -> None:
    assert PAGE.read_text() == render(find_attacks()), "run: python -m scripts.list_attacks"


def test_a_number_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    mark = "@pytest.mark.attack(7)\ndef test_{}() -> None: ...\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(mark.format("one") + mark.format("two"))
    with pytest.raises(ValueError, match="7"):
        find_attacks(tmp_path)
