"""How far rows and logprobs of an engine are from the truth.

T = tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import clairai
from tests.engine.steering import Answer
from tests.fidelity.observe_model import Observed, Streams
from tests.fidelity.oracle import Floats
from tests.fidelity.oracle import relative_error as relative_error
from tests.fidelity.scenarios import Tapped

BOUND: Final = 1e-5
LOGPROB_BOUND: Final = 1e-4
OTHER_TOKENS: Final = "other tokens"  # when the prefix is cached


def sequences(tapped: Tapped) -> list[list[int]]:
    return [scores.token_ids.tolist() for scores in next(iter(tapped.values()))]


def errors(tapped: Tapped, truths: list[Streams], *, num_cached: int = 0) -> dict[str, Any]:
    """The worst point's 99.9th percentile, of prompt rows and of decode rows; points not judged.

    The first `num_cached` tokens of each prompt have no rows.
    """
    judged = [point for point in tapped if all(point in truth for truth in truths)]
    both = [
        _point_errors(tapped[point], [truth[point] for truth in truths], num_cached)
        for point in judged
    ]
    return {
        "prompt_error": max((prompt for prompt, _ in both), default=None),
        "decode_error": max((decode for _, decode in both), default=None),
        "unjudged": tuple(point for point in tapped if point not in judged),
    }


def worst_error(tapped: Tapped, truths: list[Streams], *, num_cached: int = 0) -> float:
    """Of prompt and decode rows; infinite if a point cannot be judged."""
    found = errors(tapped, truths, num_cached=num_cached)
    if found["unjudged"] or found["prompt_error"] is None:
        return float("inf")
    return float(max(found["prompt_error"], found["decode_error"]))


def _point_errors(
    answers: list[clairai.Scores], truths: list[NDArray[np.float32]], num_cached: int
) -> tuple[float, float]:
    prompt, decode = [], []
    for scores, truth_TD in zip(answers, truths, strict=True):
        num_rows = len(scores.token_ids) - 1  # the last sampled token is never forwarded
        error_TD = relative_error(scores.scores_NP[:num_rows], truth_TD[:num_rows])
        prompt.append(error_TD[num_cached : scores.num_prompt].ravel())
        decode.append(error_TD[scores.num_prompt :].ravel())
    return p999(np.concatenate(prompt)), p999(np.concatenate(decode))


def p999(found: NDArray[np.float64]) -> float:
    """Infinite if a row is missing."""
    value = float(np.quantile(found, 0.999))
    return value if np.isfinite(value) else float("inf")


def stream_error(found: list[Streams], truths: list[Streams]) -> float:
    worst = 0.0
    for point in found[0]:
        pairs = [
            (one[point], truth[point])
            for one, truth in zip(found, truths, strict=True)
            if point in truth
        ]
        each = [relative_error(rows, true[: len(rows)]).ravel() for rows, true in pairs]
        worst = max(worst, p999(np.concatenate(each))) if each else worst
    return worst


def judge_cache(observed: Observed) -> str:
    """Rows of a prompt that came again: those of its cached tokens are absent, all others equal."""
    for point, answers in observed.again.items():
        first = observed.forwarded[point]
        for scores, before, cached in zip(answers, first, observed.num_cached, strict=True):
            rows, truth = scores.scores_NP[:-1], before.scores_NP[:-1]
            if scores.token_ids.tolist() != before.token_ids.tolist():
                return f"{point}: {OTHER_TOKENS}"
            if not np.isnan(rows[:cached]).all():
                return f"{point}: rows of cached tokens"
            if p999(relative_error(rows[cached:], truth[cached:]).ravel()) > BOUND:
                return f"{point}: other rows"
    return "right" if any(observed.num_cached) else "no hit"


def logprob_error(answer: Answer, logits_TV: Floats, plain_TV: Floats) -> float:
    """The largest difference of a logprob from Hugging Face's, relative to the spread of logits.

    Infinite where the vector changed nothing in Hugging Face's: nothing was tested then.
    """
    first = len(logits_TV) - len(answer.token_ids) - 1
    steered_TV, bare_TV = _logprobs(logits_TV), _logprobs(plain_TV)
    if np.abs(steered_TV[first] - bare_TV[first]).max() < 100 * LOGPROB_BOUND:
        return float("inf")
    worst = 0.0
    for index, step in enumerate(answer.logprobs):
        truth_V = steered_TV[first + index]
        spread = max(1.0, float(truth_V.std()))
        worst = max(worst, *(abs(truth_V[token] - value) / spread for token, value in step.items()))
    return float(worst)


def _logprobs(logits_TV: Floats) -> Floats:
    shifted_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
    found: Floats = shifted_TV - np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True))
    return found
