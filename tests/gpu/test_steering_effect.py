"""On a GPU, under vLLM's default graphs: a vector moves its probe and the text with its scale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.demo import model as demo
from clairai.probe import files as probe_files
from clairai.vector import files as vector_files
from scripts.demo_questions import NUM_TOKENS, QUESTIONS
from tests.gpu.test_graphs import start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FOLDER: Final = Path(demo.__file__).parent
PROBE: Final = FOLDER / "probes" / "negative_sentiment.safetensors"
VECTOR: Final = FOLDER / "vectors" / "positive_sentiment.safetensors"
FACTORS: Final = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)  # of the suggested scale


def answers(llm: Any) -> list[tuple[float, float, list[str]]]:
    """For each scale: the probe's mean as steered, read plainly off the same text, and the texts.

    All scales and questions are one batch; runs in the engine's process.
    """
    vector = vector_files.load(VECTOR)
    clairai.ProbeBank(llm).add(probe_files.load(PROBE))
    clairai.VectorBank(llm).add(vector)
    asked = [(factor * vector.scale, question) for factor in FACTORS for question in QUESTIONS]
    given = [[{"vector": vector.name, "scale": scale}] if scale else [] for scale, _ in asked]
    outputs = _chat(llm, [question for _, question in asked], given)
    found = clairai.scores(llm, outputs)
    steered = [_mean(scores, scores.num_prompt) for (scores,) in found]
    plain = _read(llm, outputs)
    texts = [output.outputs[0].text for output in outputs]
    per = len(QUESTIONS)
    spans = [slice(at, at + per) for at in range(0, len(asked), per)]
    return [(float(np.mean(steered[s])), float(np.mean(plain[s])), texts[s]) for s in spans]


def _chat(llm: Any, questions: list[str], steer: list[Any]) -> Any:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, extra_args=clairai.request(steer=entries)
        )
        for entries in steer
    ]
    messages = [[{"role": "user", "content": question}] for question in questions]
    return llm.chat(messages, params, use_tqdm=False)


def _read(llm: Any, outputs: Any) -> list[float]:
    """The probe on prompt and answer, forwarded without steering: what the text itself shows."""
    from vllm import SamplingParams

    whole = [
        {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids]}
        for output in outputs
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=1, extra_args=clairai.request(prompt_scores=True)
    )
    found = clairai.scores(llm, llm.generate(whole, params, use_tqdm=False))
    firsts = [len(output.prompt_token_ids) for output in outputs]
    return [_mean(scores, first) for (scores,), first in zip(found, firsts, strict=True)]


def _mean(scores: clairai.Scores, first: int) -> float:
    """From this token on; the last one's is NaN, since no forward has seen it."""
    found = scores.scores_NP[first:, 0]
    return float(found[np.isfinite(found)].mean())


@pytest.mark.parametrize("runner", ["V2"])
def test_a_sentiment_vector_moves_its_probe_and_the_text_with_its_scale(
    runner: str, real_model: Path, runtime: Path, report: Callable[..., None]
) -> None:
    points = {str(probe_files.load(PROBE).point), *map(str, vector_files.load(VECTOR).points)}
    config = clairai.config(points=sorted(points), capacity=4, steering=True)
    with start(real_model, runtime, runner, additional_config=config) as engine:
        found = engine.call(answers)
    for factor, (steered, plain, texts) in zip(FACTORS, found, strict=True):
        report(test="effect", factor=factor, steered=steered, plain=plain, text=texts[0])
        sys.stdout.write(f"| {factor} | {steered:.3f} | {plain:.3f} | {texts[0][:90]!r} |\n")
    steered_means, plain_means = [one[0] for one in found], [one[1] for one in found]
    assert steered_means == sorted(steered_means, reverse=True)
    assert steered_means[0] - steered_means[-1] > 0.5
    coarse = [plain_means[FACTORS.index(factor)] for factor in (-1.5, -0.5, 0.5)]
    assert coarse == sorted(coarse, reverse=True)
    assert len({tuple(texts) for _, _, texts in found}) == len(FACTORS)
