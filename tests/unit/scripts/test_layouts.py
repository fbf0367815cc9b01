"""The table of layouts says what was run, and names tests that exist."""

from __future__ import annotations

from scripts import layouts
from scripts.layouts import FEATURES, LAYOUTS, PAGE, ROOT, Layout


def test_the_page_has_a_row_for_every_layout() -> None:
    page = PAGE.read_text()
    assert layouts.replace_table(page, layouts.read_outcomes(page)) == page
    tested = {layout.name for layout in LAYOUTS if layout.test}
    assert layouts.read_outcomes(page).keys() == tested


def test_every_layout_has_a_test_or_says_why_not() -> None:
    for layout in LAYOUTS:
        assert layout.test or layout.fixed.keys() == {*FEATURES}
        assert not layout.test or (ROOT / layout.test[0]).is_file()


def test_a_layout_that_failed_is_not_said_to_run() -> None:
    failed = Layout("tensor parallel, 2 ranks", ("tests/unit/scripts/no_such_file.py",))
    assert layouts.run(failed) == "**failed**"
    table = layouts.render({failed.name: "**failed**"})
    assert "| tensor parallel, 2 ranks | **failed** |" in table
    assert "| tensor parallel, 4 ranks | not run | not run |" in table
    page = f"<!-- layouts -->\n{table}<!-- /layouts -->\n"
    assert layouts.read_outcomes(page)[failed.name] == "**failed**"
