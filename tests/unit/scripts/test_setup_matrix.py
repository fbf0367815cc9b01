"""What `make matrix` installs for a wheel, and how it reports the outcome of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import matrix, numbers
from scripts.environment import Environment, SetupError
from scripts.matrix import Measured, Verdict
from scripts.matrix_requirements import fitted, listed

GOOD = (("PASSED", "fidelity"), ("PASSED", "fidelity"), ("PASSED", "engine"))


def test_bounds_come_from_the_wheel() -> None:
    ours = listed("transformers>=5.16.1,<5.20  # a comment\n\n# another\nxgrammar==0.2.8\ngguf\n")
    asked = ["transformers<5.18.0,>=5.10.4", "xgrammar==0.2.7; python_version > '3'", "numba"]
    assert fitted(ours, asked) == ["transformers<5.18.0,>=5.10.4", "xgrammar==0.2.7", "gguf"]


def test_an_open_end_is_closed_by_our_own_bound() -> None:
    ours = listed("transformers>=5.16.1,<5.20")
    assert fitted(ours, ["transformers>=5.5.3"]) == ["transformers<5.20,>=5.5.3"]


def test_extras_and_former_names_are_kept() -> None:
    ours = listed("fastapi[standard]>=0.133\noss-harmony>=0.0.11")
    asked = ["fastapi[standard]<0.137.0", "openai-harmony>=0.0.3", "requests; extra == 'bench'"]
    assert fitted(ours, asked) == ["fastapi[standard]<0.137.0", "openai-harmony>=0.0.3"]


def test_a_row_shows_the_worst_error_and_every_wrong_row() -> None:
    measured = (
        Measured("fidelity", p999=3e-7),
        Measured("fidelity", p999=2e-6),
        Measured("attribution", rows=12000, wrong=3),
    )
    cells = Verdict("0.32.0", GOOD, measured, 61.4).cells()
    assert cells == ("0.32.0", "2 of 2", "2.0e-06", "1 of 1", "12000", "3", "61")


@pytest.mark.parametrize(
    ("outcomes", "is_good"),
    [
        (GOOD, True),
        ((*GOOD, ("FAILED", "engine")), False),
        ((*GOOD, ("ERROR", "fidelity")), False),
        (GOOD[:2], False),  # no attribution test ran
        ((), False),
    ],
)
def test_only_a_full_and_clean_run_is_good(
    outcomes: tuple[tuple[str, str], ...], *, is_good: bool
) -> None:
    assert Verdict("0.32.0", outcomes, (), 1.0).is_good is is_good


def test_outcomes_are_read_from_pytest() -> None:
    output = (
        "..F\nPASSED tests/fidelity/test_a.py::test_x[y]\nFAILED tests/engine/test_b.py::z - e\n"
    )
    found = [(match[1], match[2]) for match in matrix.OUTCOME.finditer(output)]
    assert found == [("PASSED", "fidelity"), ("FAILED", "engine")]


def test_a_release_that_cannot_be_installed_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_environment: Environment, _version: str) -> None:
        raise SetupError("no such wheel")

    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "install", fail)
    verdict = matrix.tried("9.9.9")
    assert verdict.problem == "no such wheel"
    assert not verdict.is_good
    assert verdict.cells()[:3] == ("9.9.9", "0 of 0", "not measured")


def test_an_environment_that_imports_another_vllm_is_refused(tmp_path: Path) -> None:
    target = Environment(tmp_path)
    target.python.parent.mkdir()
    own = target.packages / "vllm" / "__init__.py"
    for origin, version in ((own, "0.28.0"), ("/elsewhere/vllm/__init__.py", "0.31.0")):
        target.python.write_text(f"#!/bin/sh\necho {origin} {version}\n")
        target.python.chmod(0o755)
        with pytest.raises(SetupError, match="has to be"):
            matrix.refuse_other_engine(target, "0.31.0")
    target.python.write_text(f"#!/bin/sh\necho {own} 0.31.0\n")
    matrix.refuse_other_engine(target, "0.31.0")


def test_a_section_is_replaced_and_the_others_are_kept(tmp_path: Path) -> None:
    page = tmp_path / "numbers.md"
    for heading, text in (("A", "one"), ("B", "two"), ("A", "three")):
        numbers.write_section(heading, [text], page=page)
    written = page.read_text()
    assert "one" not in written
    assert written.endswith("## B\n\ntwo\n\n## A\n\nthree\n")
    assert written.startswith(numbers.OPENING)
