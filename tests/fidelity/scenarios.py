"""Takes a running engine; gives how far each tapped value is from Hugging Face's.

The probes are the unit vectors, so that the scores at a point are the residual stream itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clairai
from tests.fidelity.oracle import hidden_states, relative_error


@dataclass(frozen=True)
class Fidelity:
    """Errors at one point over all rows of all requests."""

    point: str
    num_values: int
    num_decode_rows: int
    p999: float
    worst: float


def unit_probes(point: str, width: int) -> list[clairai.Probe]:
    eye = np.eye(width, dtype=np.float32)
    return [
        clairai.Probe(f"{point}:{index}", clairai.Point.parse(point), eye[index])
        for index in range(width)
    ]


def compare(
    llm: Any, folder: str, prompts: list[list[int]], points: list[str], width: int, num_new: int
) -> list[Fidelity]:
    """Generate once for each point with the bank swapped in between, while the engine serves."""
    from vllm import SamplingParams

    bank = clairai.ProbeBank(llm)
    params = SamplingParams(
        max_tokens=num_new,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=clairai.request(prompt_scores=True),
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: dict[str, list[clairai.Scores]] = {}
    for point in points:
        bank.add(*unit_probes(point, width))
        outputs = llm.generate(inputs, params, use_tqdm=False)
        found[point] = [answers[0] for answers in clairai.scores(llm, outputs)]
        bank.remove(*(info.name for info in bank.list()))
    sequences = [scores.token_ids.tolist() for scores in found[points[0]]]
    truths = [hidden_states(folder, sequence) for sequence in sequences]
    return [_fidelity(point, sequences, rows, truths) for point, rows in found.items()]


def _fidelity(
    point: str,
    sequences: list[list[int]],
    found: list[clairai.Scores],
    truths: list[dict[str, NDArray[np.float32]]],
) -> Fidelity:
    errors = []
    for sequence, scores, truth in zip(sequences, found, truths, strict=True):
        assert scores.token_ids.tolist() == sequence, "a change of the bank changed the tokens"
        # All rows but the last: the last sampled token is never forwarded.
        errors.append(relative_error(scores.scores_NP[:-1], truth[point][:-1]).ravel())
    error = np.concatenate(errors)
    num_decode = sum(len(scores.token_ids) - scores.num_prompt - 1 for scores in found)
    p999 = float(np.quantile(error, 0.999))
    return Fidelity(point, error.size, num_decode, p999, float(error.max()))
