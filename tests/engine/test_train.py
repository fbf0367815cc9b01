"""A probe is trained by the command, on rows that real vLLM computed; the demo's probes hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clairai
from clairai.probe.files import load
from scripts.demo_documents import texts
from scripts.demo_examples import FOLDER, Shown, examples, measure
from tests.engine import models
from tests.engine.process import ENVIRONMENT, EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def _labelled_lines() -> list[dict[str, Any]]:
    """French and English, as texts and as the last message of a chat, in turn."""
    named = [(True, texts("french", 0) + texts("french", 1)), (False, texts("prose", 0))]
    lines: list[dict[str, Any]] = []
    for label, found in named:
        for number, text in enumerate(found):
            asked = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]
            said = {"text": text} if number % 2 else {"messages": asked}
            lines.append(said | {"label": label})
    return lines


def test_the_command_trains_a_probe_and_says_how_good_it_is(
    cut_model: Path, tmp_path: Path
) -> None:
    data, out = tmp_path / "set.jsonl", tmp_path / "french.safetensors"
    data.write_text("\n".join(map(json.dumps, _labelled_lines())))
    command = [
        *(sys.executable, "-m", "clairai.cli", "probes", "train", "french", "--data", str(data)),
        *("--model", str(cut_model), "--points", "post_block.1-3", "--out", str(out)),
        *("--description", "Text in French.", "--engine", '{"dtype": "float32"}'),
    ]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    probe = load(out)
    assert probe.name == "french"
    assert probe.model == "SmolLM2-135M-Instruct"
    assert probe.description == "Text in French."
    assert str(probe.point) in ("post_block.1", "post_block.2", "post_block.3")
    assert probe.auroc is not None
    assert probe.auroc > 0.95
    assert probe.histogram is not None
    printed = done.stdout.splitlines()
    assert sum("<- chosen" in line for line in printed) == 1
    assert f"AUROC of tokens      {probe.auroc:.4f}" in done.stdout
    assert printed[-1] == f"{out}: french at {probe.point}"
    assert "cross-validation" in done.stderr


def test_each_example_lights_up_its_probe_and_no_other(runtime: Path) -> None:
    with EngineProcess(
        runtime=runtime,
        model=str(models.real()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        additional_config=clairai.config(probes=FOLDER / "probes"),
    ) as engine:
        shown: list[Shown] = engine.call(measure, examples())
    assert len(shown) == 7
    for one in shown:
        for name, cell in one.on_answer.items():
            if name == one.probe:
                assert cell.mean > 0.4, (one.title, name, cell)
                assert cell.highest > 0.95, (one.title, name, cell)
                assert cell.share > 0.35, (one.title, name, cell)
            else:
                assert cell.mean < 0.15, (one.title, name, cell)
                assert cell.share < 0.06, (one.title, name, cell)
