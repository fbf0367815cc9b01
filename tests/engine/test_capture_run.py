"""Many prompts through the command: killed and called again, each prompt's rows are there once.

The notebook then makes a probe of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from clairai.errors import StoreBusyError
from clairai.probe.files import load
from clairai.store.disk import claim_folder
from clairai.store.read import open as open_store
from scripts.demo_documents import NUM_FOLDS, texts
from tests.engine.process import ENVIRONMENT
from tests.support.ring_engine import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

NUM_PROMPTS = 60
END_S = 120.0  # for a writer whose engine is gone
# A kill from outside could come when all is done.
KILLED = """
import os, signal
from clairai.batch import capture_engine
from clairai.cli import main

captures, batches = capture_engine.captures, []

def captures_or_die(*given, **named):
    batches.append(given)
    if len(batches) == 4:  # its rows are on their way
        os.kill(os.getpid(), signal.SIGKILL)
    return captures(*given, **named)

capture_engine.captures = captures_or_die
main()
"""
MAX_LEN = 60
NOTEBOOK = Path(__file__).parents[2] / "examples" / "probe_from_captures.ipynb"


def _command(model: Path, prompts: Path, folder: Path, *program: str) -> list[str]:
    return [
        *(sys.executable, *(program or ("-m", "clairai.cli")), "capture", "run", str(model)),
        *("--prompts", str(prompts), "--to", str(folder), "--points", "post_block.*"),
        *("--max-tokens", "4", "--batch-mib", "1", "--positions", '[{"from": 5}]'),
        *("--engine", '{"dtype": "float32", "enforce_eager": true, "max_model_len": 128}'),
    ]


def _is_free(folder: Path) -> bool:
    try:
        with claim_folder(folder):
            return True
    except StoreBusyError:
        return False


def _prompts(model: Path) -> list[tuple[list[int], int]]:
    """French and English in turn, as tokens, and which it is."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    french, english = (
        [text for fold in range(NUM_FOLDS) for text in texts(name, fold)]
        for name in ("french", "prose")
    )
    both = [one for a, b in zip(french, english, strict=False) for one in ((a, 1), (b, 0))]
    found = [(tokenizer.encode(text)[:MAX_LEN], label) for text, label in both]
    return found[:NUM_PROMPTS]


def test_a_run_that_is_killed_goes_on_and_ends_with_every_prompt_once(
    cut_model: Path, tmp_path: Path
) -> None:
    prompts, folder = tmp_path / "p.jsonl", tmp_path / "captures"
    given = _prompts(cut_model)
    lines = [{"prompt_token_ids": ids, "tags": {"label": label}} for ids, label in given]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    environment = os.environ | ENVIRONMENT
    doomed, log = _command(cut_model, prompts, folder, "-c", KILLED), tmp_path / "killed.log"
    with log.open("wb") as said:  # a pipe would have its end when the writer has ended
        killed = subprocess.run(doomed, env=environment, stderr=said, check=False)
    assert killed.returncode == -signal.SIGKILL, log.read_text()[-4000:]
    until(lambda: _is_free(folder), END_S)  # what was on its way to a commit gets there
    done = Counter(one.tags["prompt"]["line"] for one in open_store(folder).requests())
    assert 0 < len(done) < NUM_PROMPTS

    command = _command(cut_model, prompts, folder)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"{NUM_PROMPTS - len(done)} prompts done, {len(done)} were done before" in ran.stdout
    assert "about 0 s left" in ran.stderr
    store = open_store(folder)
    found = {one.tags["prompt"]["line"]: one for one in store.requests()}
    assert sorted(found) == list(range(1, NUM_PROMPTS + 1))
    assert len(store.requests()) == NUM_PROMPTS
    for line, (ids, label) in enumerate(given, start=1):
        rows = store.rows(found[line].stream, point="post_block.1")
        num_prompt = len(ids) - 5
        assert rows.position[:num_prompt].tolist() == [*range(5, len(ids))]
        assert rows.token_id[:num_prompt].tolist() == ids[5:]
        assert num_prompt + 3 <= len(rows) <= num_prompt + 4
        assert found[line].tags["label"] == label
    _check_notebook(tmp_path)


def _check_notebook(folder: Path) -> None:
    """Its cells run as written, in a folder with `captures`."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len([line for line in code[0].splitlines() if line and "import" not in line]) <= 10
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    accuracy, *_ = ran.stdout.partition("%")
    assert int(accuracy) >= 90
    assert load(folder / "french.safetensors").name == "french"
