"""How many processes answer completions, unless somebody says."""

from __future__ import annotations

import os

import pytest

from clairai.cli.commands import choose_processes


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, 1), (2, 1), (7, 1), (8, 2), (12, 3), (16, 4), (64, 4)]
)
def test_there_is_one_for_four_cores_and_at_most_four(
    cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert choose_processes(None) == expected
    assert choose_processes(7) == 7
