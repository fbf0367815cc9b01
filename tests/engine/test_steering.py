"""Steered answers equal Hugging Face's under hooks, and nobody else's are changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.steer.files import dumps
from tests.engine import steering
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity.steered import Change, Floats, Gated, logits

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WIDTH: Final = 576
POINTS: Final = ("pre_attn.0", "post_attn.1", "post_block.3")
LONG: Final = tuple(range(1000, 1100))  # more than a step: prefilled in chunks
SHORT: Final = tuple(range(2000, 2020))
TOLERANCE: Final = 1e-4
# What each means is in the Change beside it; Hugging Face is steered by that one.
NUM_NEW: Final = 12
FOREVER: Final = 10_000


def _noise(seed: int, size: float) -> Floats:
    row = np.random.default_rng(seed).standard_normal(WIDTH)
    return np.asarray(row * size / np.linalg.norm(row), np.float32).astype(np.float64)


def _file(name: str, rows: dict[str, Floats]) -> bytes:
    points = {Point.parse(point): row.astype(np.float32) for point, row in rows.items()}
    return dumps(clairai.Vector(name, points))


ROWS: Final = {
    "early": {"pre_attn.0": _noise(1, 3.0)},
    "middle": {"post_attn.1": _noise(2, 8.0)},
    "late": {"post_block.3": _noise(3, 40.0)},
    "everywhere": {point: _noise(4 + i, 6.0) for i, point in enumerate(POINTS)},
}
PROMPT_OF: Final = {"long": LONG, "short": SHORT}


@pytest.fixture(scope="module")
def steered(engine: EngineProcess) -> Iterator[EngineProcess]:
    engine.call(steering.put, [_file(name, rows) for name, rows in ROWS.items()])
    yield engine
    engine.call(steering.remove_all)


def _positions(start: int, end: int = FOREVER) -> frozenset[int]:
    return frozenset(range(start, end))


ALWAYS: Final = _positions(0)
N: Final = len(LONG)
CASES: Final[dict[str, tuple[list[dict[str, Any]], list[Change]]]] = {
    "add": (
        [{"vector": "early", "scale": 1.5}],
        [Change("add", ROWS["early"], ALWAYS, 1.5)],
    ),
    "add matched to the row's length": (
        [{"vector": "middle", "scale": 0.5, "match_norm": True}],
        [Change("add", ROWS["middle"], ALWAYS, 0.5, matched=True)],
    ),
    "ablate": (
        [{"vector": "everywhere", "op": "ablate"}],
        [Change("ablate", ROWS["everywhere"], ALWAYS)],
    ),
    "clamp to both sides": (
        [{"vector": "late", "op": "clamp", "low": -0.5, "high": 0.25}],
        [Change("clamp", ROWS["late"], ALWAYS, low=-0.5, high=0.25)],
    ),
    "clamp to one side": (
        [{"vector": "middle", "op": "clamp", "low": 2.0}],
        [Change("clamp", ROWS["middle"], ALWAYS, low=2.0)],
    ),
    "replace one row of the prompt": (
        [
            {
                "vector": "middle",
                "op": "replace",
                "when": {"phase": "prompt", "positions": [[-3, -2]]},
            }
        ],
        [Change("replace", ROWS["middle"], _positions(N - 3, N - 2))],
    ),
    "only the prompt": (
        [{"vector": "early", "when": "prompt"}],
        [Change("add", ROWS["early"], _positions(0, N))],
    ),
    "only what is generated": (
        [{"vector": "everywhere", "when": "generation", "scale": -1.0}],
        [Change("add", ROWS["everywhere"], _positions(N), -1.0)],
    ),
    "only the last token of the prompt": (
        [{"vector": "late", "when": "last_prompt", "scale": 2.0}],
        [Change("add", ROWS["late"], _positions(N - 1, N), 2.0)],
    ),
    "some of what is generated": (
        [{"vector": "late", "when": {"phase": "generation", "positions": [[2, 4], [6, None]]}}],
        [Change("add", ROWS["late"], _positions(N + 2, N + 4) | _positions(N + 6))],
    ),
    "several, in their order": (
        [
            {"vector": "everywhere", "scale": 2.0},
            {"vector": "middle", "op": "ablate", "when": "prompt"},
            {"vector": "late", "op": "clamp", "high": 1.0, "when": "generation"},
            {"vector": "everywhere", "points": ["post_block.3"], "op": "replace", "scale": 0.25},
        ],
        [
            Change("add", ROWS["everywhere"], ALWAYS, 2.0),
            Change("ablate", ROWS["middle"], _positions(0, N)),
            Change("clamp", ROWS["late"], _positions(N), high=1.0),
            Change("replace", {"post_block.3": ROWS["everywhere"]["post_block.3"]}, ALWAYS, 0.25),
        ],
    ),
}


def _error(folder: Path, ask: Ask, answer: Answer, changes: list[Change]) -> float:
    """The largest difference of a logprob from Hugging Face's, over all generated tokens."""
    sequence = [*ask.prompt, *answer.token_ids]
    found_TV = logits(str(folder), sequence, changes)
    logprobs_TV = found_TV - np.log(np.exp(found_TV).sum(axis=1, keepdims=True))
    worst = 0.0
    for index, step in enumerate(answer.logprobs):
        truth_V = logprobs_TV[len(ask.prompt) - 1 + index]
        worst = max(worst, *(abs(truth_V[token] - value) for token, value in step.items()))
    return worst


def test_every_operation_place_and_time_equals_hugging_face_with_hooks(
    steered: EngineProcess, cut_model: Path
) -> None:
    """All in one batch, with plain requests between them; prompts are prefilled in chunks."""
    asks = [Ask(LONG, tuple(entries)) for entries, _ in CASES.values()]
    answers = steered.call(steering.answer, [*asks, Ask(LONG), Ask(SHORT)])
    wanted = [*(changes for _, changes in CASES.values()), [], []]
    errors = {
        name: _error(cut_model, ask, answer, changes)
        for name, ask, answer, changes in zip(
            [*CASES, "plain", "plain and short"],
            [*asks, Ask(LONG), Ask(SHORT)],
            answers,
            wanted,
            strict=True,
        )
    }
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    plain = answers[-2]
    assert all(answer.logprobs != plain.logprobs for answer in answers[:-2])


def test_the_check_against_hugging_face_can_fail(steered: EngineProcess, cut_model: Path) -> None:
    """Half the strength, or one position too many, is far outside its bound."""
    ask = Ask(LONG, ({"vector": "early", "when": "prompt"},))
    (answer,) = steered.call(steering.answer, [ask])
    right = [Change("add", ROWS["early"], _positions(0, N))]
    weak = [Change("add", ROWS["early"], _positions(0, N), 0.5)]
    longer = [Change("add", ROWS["early"], _positions(0, N + 1))]
    assert _error(cut_model, ask, answer, right) <= TOLERANCE
    assert _error(cut_model, ask, answer, weak) > 100 * TOLERANCE
    assert _error(cut_model, ask, answer, longer) > 10 * TOLERANCE
