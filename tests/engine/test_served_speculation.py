"""Scores of an engine that speculates, through the proxy: several tokens come out of one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.engine import attribution
from tests.engine import server as parts
from tests.engine.serving import Served, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_DRAFTS: Final = 3
NUM_NEW: Final = 40
OPTIONS: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")


@pytest.fixture(scope="module")
def served(cut_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The drafter is the model itself, so that most drafts stand."""
    speculative = {
        "method": "draft_model",
        "model": str(cut_model),
        "num_speculative_tokens": NUM_DRAFTS,
    }
    options = (*OPTIONS, "--speculative-config", json.dumps(speculative))
    scratch = tmp_path_factory.mktemp("speculating")
    with serving(cut_model, scratch, options, {}) as found:
        yield found


def _ask(served: Served, **more: Any) -> Iterator[dict[str, Any]]:
    """The choice of each chunk of a scored stream."""
    body = {
        "model": parts.MODEL,
        "prompt": "Once upon a time",
        "max_tokens": NUM_NEW,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "clairai": {},
    }
    with (
        served.client() as client,
        client.stream("POST", "/v1/completions", json=body | more) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line.removeprefix("data: "))["choices"]


def test_every_token_of_a_step_has_the_score_of_its_own_row(served: Served) -> None:
    choices = list(_ask(served))
    counts = [len(choice.get("token_ids") or ()) for choice in choices]
    assert max(counts) > 1, "no draft was accepted: the test shows nothing"
    token_ids = [one for choice in choices for one in choice.get("token_ids") or ()]
    assert len(token_ids) == NUM_NEW
    expected_NP = served.vocabulary_VD[token_ids] @ attribution.projections(served.vocabulary_VD)
    found: dict[int, list[float | None]] = {}
    for told in (choice["probe_scores"] for choice in choices if choice.get("probe_scores")):
        assert "lost" not in told
        for at, values in enumerate(told["scores"], told["start"]):
            assert at not in found, "a token has scores twice"
            found[at] = values
    assert list(found) == list(range(NUM_NEW)), "in the order of the tokens"
    scored = [at for at, values in found.items() if None not in values]
    # The last token is forwarded only if it was a draft.
    assert scored in (list(range(NUM_NEW - 1)), list(range(NUM_NEW)))
    found_NP = np.array([found[at] for at in scored], np.float32)
    np.testing.assert_allclose(found_NP, expected_NP[: len(scored)], rtol=1e-4, atol=1e-4)


def test_a_stopped_answer_has_no_scores_of_drafts_behind_its_end(served: Served) -> None:
    for max_tokens in range(5, 9):  # the end falls on each place within a step
        choices = list(_ask(served, max_tokens=max_tokens))
        token_ids = [one for choice in choices for one in choice.get("token_ids") or ()]
        assert len(token_ids) == max_tokens
        told = [choice["probe_scores"] for choice in choices if choice.get("probe_scores")]
        assert sum(len(one["scores"]) for one in told) == max_tokens
        assert not any("lost" in one for one in told)
