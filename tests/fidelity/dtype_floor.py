"""How far an engine's values, steering and captures are from Hugging Face in float64.

Beside it, how far Hugging Face itself is in the engine's dtype, on the same tokens: what that dtype
allows. Hugging Face may be changed to round the inputs of its layers, as a quantised model does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.engine import capturing, steering
from tests.engine.hooked import vector_file
from tests.engine.process import EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity import scenarios
from tests.fidelity.observe_model import Streams
from tests.fidelity.oracle import Floats, HuggingFace, relative_error
from tests.fidelity.scenarios import Tapped

RAW: Final = {"positions": "all", "encoder": "raw"}
NUM_NEW: Final = 6
MANY: Final = 40
Vectors = Mapping[str, Mapping[str, Floats]]  # by name, then by point


@dataclass(frozen=True)
class Wanted:
    """What is observed of an engine: prompts, points, and where it is steered."""

    prompts: list[list[int]]
    points: list[str]
    width: int
    steered: tuple[str, ...]
    strength: float = 1.0  # of the vectors: their effect must be larger than what rounding does

    @property
    def vectors(self) -> Vectors:
        row_D = np.random.default_rng(5).standard_normal(self.width).astype(np.float32)
        row_D *= np.float32(self.strength)
        return {point: {point: row_D.astype(np.float64)} for point in self.steered}

    @property
    def asks(self) -> list[Ask]:
        prompt = tuple(self.prompts[-1])
        return [Ask(prompt, ({"vector": point},), num_new=4) for point in self.steered]


@dataclass(frozen=True)
class Observed:
    tapped: Tapped
    plain: list[Answer]
    steered: list[Answer]
    captured: capturing.Found


def observe(engine: EngineProcess, wanted: Wanted) -> Observed:
    files = [vector_file(name, dict(rows)) for name, rows in wanted.vectors.items()]
    engine.call(steering.put, files)
    unsteered = [Ask(ask.prompt, num_new=4) for ask in wanted.asks]
    captured = capturing.Ask(tuple(wanted.prompts[-1]), RAW, num_new=4)
    return Observed(
        engine.call(scenarios.tap_everything, wanted.prompts, wanted.points, wanted.width, NUM_NEW),
        engine.call(steering.answer, unsteered),
        engine.call(steering.answer, wanted.asks),
        engine.call(capturing.capture, [captured])[0][0],
    )


class Truth:
    """Hugging Face's model of a folder, changed or not, in float64 and in the engine's dtype."""

    def __init__(
        self, folder: Path, dtype: str, change: Callable[[Any], None] | None = None
    ) -> None:
        self.exact = HuggingFace(str(folder), "float64", change=change)
        self.coarse = HuggingFace(str(folder), dtype, change=change)


@dataclass(frozen=True)
class Distance:
    """Of every row its worst value, relative; of every steered answer its worst logprob."""

    engine: NDArray[np.float64]
    floor: NDArray[np.float64]

    @property
    def is_near(self) -> bool:
        """True if the engine is about as near as its dtype allows; few errors say less of it."""
        most, worst = (1.5, 2.5) if self.engine.size >= MANY else (4.0, 4.0)
        p90, p90_floor = (np.quantile(errors, 0.9) for errors in (self.engine, self.floor))
        return bool(p90 <= most * p90_floor and self.engine.max() <= worst * self.floor.max())

    @property
    def numbers(self) -> dict[str, float]:
        return {
            "p90": float(np.quantile(self.engine, 0.9)),
            "floor": float(np.quantile(self.floor, 0.9)),
        }


def measure_values(found: Observed, truth: Truth, points: Sequence[str]) -> dict[str, Distance]:
    """By point; the last sampled token is never forwarded."""
    sequences = [one.token_ids.tolist() for one in found.tapped[points[0]]]
    exact, coarse = (
        [model.streams(sequence) for sequence in sequences] for model in (truth.exact, truth.coarse)
    )
    return {
        point: Distance(
            errors_of_rows([one.scores_NP[:-1] for one in found.tapped[point]], exact, point),
            errors_of_rows([streams[point][:-1] for streams in coarse], exact, point),
        )
        for point in points
    }


def errors_of_rows(
    rows: Sequence[NDArray[np.float32]], exact: Sequence[Streams], point: str
) -> NDArray[np.float64]:
    """Of each row that of its worst value."""
    pairs = zip(rows, exact, strict=True)
    return np.concatenate(
        [relative_error(found, streams[point][:-1]).max(axis=1) for found, streams in pairs]
    )


def measure_shares(
    found: Observed, truth: Truth, unrounded: Truth, points: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """How much of what rounding its inputs does to the model is there: in the engine, and in
    Hugging Face in the engine's dtype. Nothing is 0; few of many roundings come out otherwise.
    """
    sequences = [one.token_ids.tolist() for one in found.tapped[points[0]]]
    exact, coarse, plain = (
        [model.streams(sequence) for sequence in sequences]
        for model in (truth.exact, truth.coarse, unrounded.exact)
    )
    shares = {}
    for point in points:
        rows = [one.scores_NP[:-1] for one in found.tapped[point]]
        ours, rounded, theirs, given = (
            np.concatenate(parts).astype(np.float64)
            for parts in (
                rows,
                *([one[point][:-1] for one in made] for made in (exact, coarse, plain)),
            )
        )
        change = rounded - given
        shares[point] = (
            float(((ours - given) * change).sum() / np.square(change).sum()),
            float(((theirs - given) * change).sum() / np.square(change).sum()),
        )
    return shares


def measure_captures(
    kept: capturing.Found, truth: Truth, prompt: Sequence[int], points: Sequence[str]
) -> dict[str, Distance]:
    """Of all positions of one request."""
    assert (kept.state, kept.lost, {*kept.rows}) == ("kept", 0, {*points})
    sequence = [*prompt, *kept.token_ids]
    exact, coarse = (model.streams(sequence) for model in (truth.exact, truth.coarse))
    return {
        point: Distance(
            errors_of_rows([kept.rows[point]], [exact], point),
            errors_of_rows([coarse[point][:-1]], [exact], point),
        )
        for point in points
    }


def measure_steering(answers: list[Answer], truth: Truth, wanted: Wanted) -> Distance:
    """Against hooks that add the vectors at every token."""
    found = [
        measure_logprobs(ask, answer, truth, rows)
        for ask, answer, rows in zip(wanted.asks, answers, wanted.vectors.values(), strict=True)
    ]
    engine, floor = (
        np.concatenate([getattr(one, name) for one in found]) for name in ("engine", "floor")
    )
    return Distance(engine, floor)


def measure_logprobs(
    ask: Ask, answer: Answer, truth: Truth, added: Mapping[str, Floats]
) -> Distance:
    """Of each generated token, the worst of the most likely ones' logprobs."""
    sequence = [*ask.prompt, *answer.token_ids]
    exact_TV, coarse_TV = (
        logprobs_of(model.logits(sequence, added))[len(ask.prompt) - 1 : -1]
        for model in (truth.exact, truth.coarse)
    )
    found, floor = [], []
    for exact_V, coarse_V, step in zip(exact_TV, coarse_TV, answer.logprobs, strict=True):
        tokens = [*step]
        found.append(np.abs(exact_V[tokens] - np.array([*step.values()])).max())
        floor.append(np.abs(exact_V[tokens] - coarse_V[tokens]).max())
    return Distance(np.array(found), np.array(floor))


def logprobs_of(logits_TV: Floats) -> Floats:
    largest_T1 = logits_TV.max(axis=1, keepdims=True)
    sums_T1 = np.log(np.exp(logits_TV - largest_T1).sum(axis=1, keepdims=True))
    found: Floats = logits_TV - largest_T1 - sums_T1
    return found
