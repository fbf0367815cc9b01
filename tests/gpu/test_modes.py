"""On a GPU: full graphs, piecewise graphs and eager give the same scores, steered or not.

Where the residual stream is the same in every mode, so are the bits of its scores: that is before
the first attention, which sums in another order under another graph. Every generated token is
forced, so that the modes forward the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from tests.engine.process import EngineProcess
from tests.gpu import forced
from tests.gpu.forced import FIRST, FORCED, LAST, MIDDLE, NUM_NEW, PROMPTS, Answer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]

MODES: Final[dict[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "default": {},
}
CLOSE: Final = 0.25  # of a logprob, in bfloat16, after four layers
ALONE: Final = "steered, each alone"

# By mode; steered or not, in one batch, or steered and alone; one answer for each prompt.
Answers = dict[str, dict[bool | str, list[Answer]]]


def start(mode: str, model: Path, runtime: Path) -> EngineProcess:
    config = clairai.config(points=[FIRST, MIDDLE, LAST], capacity=16, steering=True)
    return EngineProcess(
        runtime=runtime,
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,  # the longest prompt comes in two chunks
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        additional_config=config,
        **MODES[mode],
    )


def answers_of(mode: str, model: Path, runtime: Path) -> dict[bool | str, list[Answer]]:
    with start(mode, model, runtime) as engine:
        engine.call(forced.fill)
        return {
            False: engine.call(forced.ask, False),
            True: engine.call(forced.ask, True),
            ALONE: engine.call(forced.ask_alone, True),
        }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Answers]:
    """An engine for each mode, all at the same time."""
    model = forced.model(tmp_path_factory.mktemp("modes") / "tiny")
    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(ThreadPoolExecutor(len(MODES)))
        asked = {mode: pool.submit(answers_of, mode, model, runtime) for mode in MODES}
        yield {mode: future.result() for mode, future in asked.items()}


def differences(answers: Answers, point: str, is_steered: bool) -> dict[str, float]:
    """The largest difference of a score from eager's, for each mode."""
    expected = answers["eager"][is_steered]
    return {
        mode: max(
            float(np.abs(mine.scores[point] - theirs.scores[point]).max())
            for mine, theirs in zip(found[is_steered], expected, strict=True)
        )
        for mode, found in answers.items()
    }


@pytest.mark.parametrize("is_steered", [False, True])
def test_the_same_residual_has_the_same_scores_to_the_bit_in_every_mode(
    answers: Answers, is_steered: bool, report: Callable[..., None]
) -> None:
    for point in (FIRST, MIDDLE, LAST):
        worst = differences(answers, point, is_steered)
        report(test="modes", point=point, steered=is_steered, worst=worst)
    for found in answers.values():
        for mine, theirs, prompt, token in zip(
            found[is_steered], answers["eager"][is_steered], PROMPTS, FORCED, strict=True
        ):
            assert mine.token_ids == prompt + [token] * NUM_NEW
            assert mine.scores[FIRST].shape == (len(prompt) + NUM_NEW - 1, 16)
            assert mine.scores[FIRST].tobytes() == theirs.scores[FIRST].tobytes()


def logprobs(answers: list[Answer]) -> NDArray[np.float64]:
    return np.array([answer.logprobs for answer in answers])


@pytest.mark.parametrize("asked", [True, ALONE])
def test_a_steered_request_is_answered_alike_in_every_mode(
    answers: Answers, asked: bool | str, report: Callable[..., None]
) -> None:
    """Batches in full graphs are left out.

    There vLLM 0.32 itself, without clairai, differs from eager by up to 2.8 of a logprob when
    requests of different lengths decode together.
    """
    plain, eager = logprobs(answers["eager"][False]), logprobs(answers["eager"][asked])
    for mode, found in answers.items():
        worst = float(np.abs(logprobs(found[asked]) - eager).max())
        report(test="modes", mode=mode, asked=str(asked), worst_logprob=worst)
        assert worst <= CLOSE or (mode == "full" and asked is True), mode
    assert np.abs(eager - plain).max() > 4 * CLOSE  # the vector changes far more than a mode does


def test_a_steered_residual_has_other_scores(answers: Answers) -> None:
    """The comparison above can fail."""
    for found in answers.values():
        for steered, plain in zip(found[True], found[False], strict=True):
            assert (steered.scores[FIRST] != plain.scores[FIRST]).any(axis=1).all()
