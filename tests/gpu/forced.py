"""Scores of answers whose every token is forced, from a running engine of a small model.

So that engines of different modes, or one engine at different times, forward the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from tests.engine import models

WIDTH, VOCABULARY, NUM_NEW = 256, 2048, 12
FIRST, MIDDLE, LAST = "pre_attn.0", "post_block.1", "post_block.3"
PROMPTS: Final = models.random_prompts(5, (1, 5, 40, 200, 300), VOCABULARY)
FORCED: Final = (7, 70, 700, 1007, 2000)


SHAPE: Final = {
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_attention_heads": 4,  # of 64, which every attention of a GPU takes
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}


def model(target: Path) -> Path:
    return models.tiny("llama", target, **SHAPE)


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    scores: dict[str, NDArray[np.float32]]  # by point; one row for each token but the last
    logprobs: list[float]


def directions(point: str) -> NDArray[np.float32]:
    seed = [FIRST, MIDDLE, LAST].index(point)
    return np.random.default_rng(seed).standard_normal((16, WIDTH)).astype(np.float32)


def fill(llm: Any) -> None:
    clairai.ProbeBank(llm).add(
        *(
            clairai.Probe(f"{point}:{index}", clairai.Point.parse(point), direction_D)
            for point in (FIRST, MIDDLE, LAST)
            for index, direction_D in enumerate(directions(point))
        )
    )


def ask_alone(llm: Any, is_steered: bool) -> list[Answer]:
    """One prompt after the other; runs in the engine's process."""
    return [ask(llm, is_steered, [index])[0] for index in range(len(PROMPTS))]


def ask(llm: Any, is_steered: bool, indices: Sequence[int] = range(len(PROMPTS))) -> list[Answer]:
    """These prompts in one batch; runs in the engine's process."""
    from vllm import SamplingParams

    rows = {clairai.Point.parse(point): 4 * directions(point)[0] for point in (FIRST, MIDDLE)}
    steer = [{"vector": clairai.Vector("v", rows)}] if is_steered else []
    params = [
        SamplingParams(
            max_tokens=NUM_NEW,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            allowed_token_ids=[token],
            extra_args=clairai.request(prompt_scores=True, steer=steer),
        )
        for token in (FORCED[index] for index in indices)
    ]
    inputs = [{"prompt_token_ids": PROMPTS[index]} for index in indices]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    found = [answers[0] for answers in clairai.scores(llm, outputs)]
    return [read(*pair) for pair in zip(outputs, found, strict=True)]


def read(output: Any, scores: clairai.Scores) -> Answer:
    (answer,) = output.outputs
    chosen = zip(answer.token_ids, answer.logprobs, strict=True)
    by_point = {
        point: scores.scores_NP[
            :-1, [at for at, name in enumerate(scores.names) if name.startswith(f"{point}:")]
        ]
        for point in (FIRST, MIDDLE, LAST)
    }
    logprobs = [found[token].logprob for token, found in chosen]
    return Answer(scores.token_ids.tolist(), by_point, logprobs)
