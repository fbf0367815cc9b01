"""Many prompts through the command: killed and called again, each prompt's rows are there once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clairai.store.reading import open as open_store
from tests.engine.process import ENVIRONMENT
from tests.process.parts import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NUM_PROMPTS = 60
START_S = 150.0


def _command(model: Path, prompts: Path, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "clairai.cli", "capture", "run", str(model)),
        *("--prompts", str(prompts), "--to", str(folder), "--points", "post_block.*"),
        *("--max-tokens", "4", "--batch-mib", "1", "--positions", '[{"from": -3}]'),
        *("--engine", '{"dtype": "float32", "enforce_eager": true, "max_model_len": 128}'),
    ]


def _commits(folder: Path) -> int:
    return len(open_store(folder).commits) if (folder / "manifest").exists() else 0


def test_a_run_that_is_killed_goes_on_and_ends_with_every_prompt_once(
    cut_model: Path, tmp_path: Path
) -> None:
    prompts, folder = tmp_path / "p.jsonl", tmp_path / "s"
    ids = [[5 + number % 40] * (20 + number) for number in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": one}) for one in ids))
    command = _command(cut_model, prompts, folder)
    environment = os.environ | ENVIRONMENT
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as first:
        until(lambda: _commits(folder) >= 3 or first.poll() is not None, timeout_s=START_S)
        first.send_signal(signal.SIGKILL)
    done = Counter(one.tags["prompt"]["line"] for one in open_store(folder).requests())
    assert 0 < len(done) < NUM_PROMPTS

    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"{NUM_PROMPTS - len(done)} prompts done, {len(done)} were done before" in ran.stdout
    assert "about 0 s left" in ran.stderr
    store = open_store(folder)
    found = {one.tags["prompt"]["line"]: one for one in store.requests()}
    assert sorted(found) == list(range(1, NUM_PROMPTS + 1))
    assert len(store.requests()) == NUM_PROMPTS
    for line, given in enumerate(ids, start=1):
        rows = store.rows(found[line].stream, point="post_block.1")
        assert rows.position[:3].tolist() == [len(given) - 3, len(given) - 2, len(given) - 1]
        assert rows.token_id[:3].tolist() == given[-3:]
        assert np.isfinite(np.asarray(rows)).all()
