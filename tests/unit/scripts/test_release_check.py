"""What `make release-check` makes of a release, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import matrix, release_check, vllm_surface
from scripts.environment import TORCH_BUILD, Environment, SetupError
from scripts.release_check import Changes, Check, Models
from scripts.vllm_surface import STORE
from tests.fidelity.verify_model import (
    CRASHED,
    NO_ENGINE,
    REFUSED,
    VERIFIED,
    VERIFIED_BLOCKS,
    Verdict,
)

SERVED = sorted(json.loads(STORE.read_text()))
PASSED = (("PASSED", "fidelity"), ("PASSED", "engine"))
ROW = matrix.Verdict("0.99.0", PASSED, (matrix.Measured("attribution", rows=7),), 60.0)
RIGHT = Verdict("LlamaForCausalLM", VERIFIED, prompt_error=1e-6, decode_error=2e-6)
MODELS = Models("sample", (RIGHT,))
GOOD = Check("0.99.0", "0.32.0", is_tested=False, row=ROW, models=MODELS, seconds=600.0)
RUNNER = "v1/worker/gpu_model_runner.py"


@pytest.mark.parametrize(
    ("version", "before"),
    [("0.33.0", "0.32.0"), ("0.32.0", "0.31.0"), ("0.100.0", "0.32.0"), ("0.26.0", "0.26.0")],
)
def test_a_release_is_compared_with_the_one_before_it(version: str, before: str) -> None:
    assert release_check.find_before(version, SERVED) == before


def test_a_release_that_passes_everything_is_fit() -> None:
    assert GOOD.faults == []
    page = release_check.write_page(GOOD)
    assert "**Fit**" in page
    assert "a release that is not served yet; it is compared with 0.32.0" in page
    assert "worst error 2.0e-06" in page
    assert "python -m bench.gpu_release --out gpu-0.99.0" in page


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"problem": "pip: ...\nno such wheel"}, "no such wheel"),
        ({"changes": Changes(unmet=("config/vllm.py: f is gone",))}, "is gone"),
        ({"row": replace(ROW, outcomes=(*PASSED, ("FAILED", "engine")))}, "test of the matrix"),
        ({"row": None}, "not everything was run"),
        ({"models": replace(MODELS, lost=("MambaForCausalLM",))}, "MambaForCausalLM was verified"),
        ({"models": Models("x", (RIGHT, Verdict("New", CRASHED)))}, "New: crashes"),
        ({"models": Models("x", untried=("OPT",), exit_code=-15)}, "code -15 and gave nothing"),
    ],
)
def test_what_is_not_fit_says_why(change: dict[str, Any], fault: str) -> None:
    check = replace(GOOD, **change)
    (found,) = check.faults
    assert fault in found
    page = release_check.write_page(check)
    assert "**Not fit**" in page
    assert fault.replace("_", "\\_") in page


def test_a_model_that_is_refused_now_is_lost_and_one_that_vllm_itself_cannot_serve_is_not() -> None:
    found = [
        RIGHT,
        Verdict("BloomForCausalLM", VERIFIED_BLOCKS),
        Verdict("OPTForCausalLM", NO_ENGINE, reason="no kernel"),
        Verdict("GPT2LMHeadModel", REFUSED),
        Verdict("NewForCausalLM", REFUSED),
    ]
    listed = [*(one.architecture for one in found), "PhiForCausalLM"]
    models = release_check.judge_models("some", [*listed, "Other"], listed, found)
    assert models.lost == ("GPT2LMHeadModel",)
    assert models.absent == ("Other",)
    assert models.untried == ("PhiForCausalLM",)
    assert models.num_verified == 2


def test_a_release_on_which_hardly_a_model_can_be_tried_is_not_fit() -> None:
    cannot = [Verdict(name, NO_ENGINE) for name in ("A", "B")]
    models = Models("sample", (RIGHT, *cannot))
    assert replace(GOOD, models=models).faults == [
        "less than half of the models that were tried could be verified"
    ]
    assert replace(GOOD, models=Models("sample", (RIGHT, cannot[0]))).faults == []


def test_the_sample_is_of_architectures_that_were_verified() -> None:
    chosen = release_check.choose_models("sample", [])
    assert set(chosen) <= set(release_check.choose_models("verified", []))
    assert release_check.choose_models("all", ["A", "B"]) == ["A", "B"]
    assert release_check.choose_models("A,C", ["A", "B"]) == ["A", "C"]


def write_release(folder: Path, body: str, models: str) -> Path:
    """A vLLM of one function that we wrap, and of a registry."""
    package = folder / "vllm"
    for file in (RUNNER, "model_executor/models/registry.py"):
        (package / file).parent.mkdir(parents=True)
    code = f"class GPUModelRunner:\n    def _prepare_inputs(self, a):\n{body}"
    (package / RUNNER).write_text(code)
    registry = f"_TEXT_GENERATION_MODELS = {{{models}}}\n"
    (package / "model_executor/models/registry.py").write_text(registry)
    return package


def test_changed_code_and_models_are_found_and_comments_are_not(tmp_path: Path) -> None:
    older = write_release(
        tmp_path / "old",
        '        """Say what."""\n        # one\n        return a\n',
        "'A': ('a', 'A'), 'B': ('b', 'B')",
    )
    same = write_release(tmp_path / "same", "        return a  # two\n", "'A': ('a', 'A')")
    newer = write_release(
        tmp_path / "new", "        b = a\n        return b\n", "'A': ('a', 'A'), 'C': ('c', 'C')"
    )
    before = vllm_surface.surface(older)
    assert release_check.compare(same, older, before).code == {}
    changes = release_check.compare(newer, older, before)
    (key,) = changes.code
    assert key == f"{RUNNER}: GPUModelRunner._prepare_inputs"
    assert release_check.count_lines(changes.code[key]) == (2, 1)
    assert (changes.new_models, changes.gone_models) == (("C",), ("B",))
    assert any("does not begin with" in fault for fault in changes.unmet)  # it takes too little


def test_a_signature_that_changed_is_shown_beside_the_old_one(tmp_path: Path) -> None:
    newer = write_release(tmp_path, "        return a\n", "")
    key = f"{RUNNER}: GPUModelRunner._prepare_inputs"
    changes = release_check.compare(newer, None, {key: "self, b"})
    assert changes.signatures == ((key, "self, b", "self, a"),)
    page = release_check.write_page(replace(GOOD, changes=changes))
    assert f"| `{key}` | `self, b` | `self, a` |" in page


def test_a_release_that_cannot_be_fetched_leaves_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_environment: Environment, version: str) -> None:
        raise SetupError(f"no wheel of {version}")

    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    monkeypatch.setattr(release_check, "PAGES", tmp_path / "releases")
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(release_check, "fetch", fail)
    assert release_check.main(["9.9.9"]) == 1
    assert "no wheel of 9.9.9" in (tmp_path / "releases" / "9.9.9.md").read_text()
    assert "not fit" in capsys.readouterr().out


def test_a_version_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("../0.33.0", "latest", "0.33.0;ls"):
        with pytest.raises(SystemExit):
            release_check.main([version])
    assert "is no version" in capsys.readouterr().err


def test_a_wheel_of_another_torch_is_refused() -> None:
    matrix.refuse_other_build([f"torch=={TORCH_BUILD}", "torchvision==99"])
    with pytest.raises(SetupError, match=r"asks for torch==9\.9"):
        matrix.refuse_other_build(["numpy", "torch==9.9"])
