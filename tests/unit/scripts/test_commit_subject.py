"""Commit subjects: `area: change`, at most 72 characters."""

from __future__ import annotations

import pytest

from scripts.commit_subject import find_fault


@pytest.mark.parametrize("subject", ["ring: refuse a foreign reader", "docs, web: rename the page"])
def test_an_area_and_a_change_are_accepted(subject: str) -> None:
    assert find_fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "fault"),
    [("Fix it", "area: change"), ("ring:", "area: change"), ("ring: " + "x" * 70, "may have 72")],
)
def test_anything_else_is_refused_with_the_way_out(subject: str, fault: str) -> None:
    assert fault in (find_fault(subject) or "")
