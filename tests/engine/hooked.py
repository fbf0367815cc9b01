"""How far a steered answer is from that of Hugging Face's model with hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine.steering import Answer, Ask
from tests.fidelity.steered import Change, Floats, logits

WIDTH: Final = 576
POINTS: Final = ("pre_attn.0", "post_attn.1", "post_block.3")
LONG: Final = tuple(range(1000, 1100))  # more than a step: prefilled in chunks
SHORT: Final = tuple(range(2000, 2020))
TOLERANCE: Final = 1e-4
NUM_NEW: Final = 12
FOREVER: Final = 10_000


def noise(seed: int, size: float) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH)
    return np.asarray(row * size / np.linalg.norm(row), np.float32).astype(np.float64)


def vector_file(name: str, rows: dict[str, Floats]) -> bytes:
    points = {Point.parse(point): row.astype(np.float32) for point, row in rows.items()}
    return dumps(clairai.Vector(name, points))


ROWS: Final = {
    "early": {"pre_attn.0": noise(1, 3.0)},
    "middle": {"post_attn.1": noise(2, 8.0)},
    "late": {"post_block.3": noise(3, 40.0)},
    "everywhere": {point: noise(4 + i, 6.0) for i, point in enumerate(POINTS)},
}


def positions(start: int, end: int = FOREVER) -> frozenset[int]:
    return frozenset(range(start, end))


ALWAYS: Final = positions(0)
N: Final = len(LONG)


def error_of(folder: Path, ask: Ask, answer: Answer, changes: list[Change]) -> float:
    """The largest difference of a logprob from Hugging Face's, over all generated tokens."""
    sequence = [*ask.prompt, *answer.token_ids]
    found_TV = logits(str(folder), sequence, changes)[len(ask.prompt) - 1 :]
    logprobs_TV = found_TV - np.log(np.exp(found_TV).sum(axis=1, keepdims=True))
    worst = 0.0
    for truth_V, step in zip(logprobs_TV, answer.logprobs, strict=False):
        worst = max(worst, *(abs(truth_V[token] - value) for token, value in step.items()))
    return worst
