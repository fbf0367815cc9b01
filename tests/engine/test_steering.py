"""Steered answers equal Hugging Face's under hooks, and nobody else's are changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from clairai.steer.files import dumps
from tests.engine import asks, steering
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity.oracle import hidden_states
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
    given = [Ask(LONG, tuple(entries)) for entries, _ in CASES.values()]
    answers = steered.call(steering.answer, [*given, Ask(LONG), Ask(SHORT)])
    wanted = [*(changes for _, changes in CASES.values()), [], []]
    errors = {
        name: _error(cut_model, ask, answer, changes)
        for name, ask, answer, changes in zip(
            [*CASES, "plain", "plain and short"],
            [*given, Ask(LONG), Ask(SHORT)],
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


GATE: Final = Gated("pre_attn.0", _noise(11, 1.0), threshold=0.0)
GATES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "hard": ({}, {}),
    "soft": ({"sharpness": 4.0}, {"sharpness": 4.0}),
    "latched": ({"latch": True}, {"latch": True}),
    "soft and latched": ({"sharpness": 2.0, "latch": True}, {"sharpness": 2.0, "latch": True}),
    "closes late": ({"release": -0.05}, {"release": -0.05}),
}


@pytest.fixture(scope="module")
def gated(steered: EngineProcess, cut_model: Path) -> Iterator[tuple[EngineProcess, float]]:
    """With a probe whose score is above its threshold for about half of the tokens."""
    scores = _scores(cut_model, [*LONG], GATE)
    threshold = float(np.sort(scores)[len(scores) * 3 // 4])
    probe = clairai.Probe(
        "gate", Point.parse(GATE.point), GATE.direction_D.astype(np.float32), threshold=threshold
    )
    steered.call(steering.add_probes, [probe])
    yield steered, threshold
    steered.call(steering.remove_probes, ["gate"])


def _scores(folder: Path, token_ids: list[int], gate: Gated) -> Floats:
    return hidden_states(str(folder), token_ids)[gate.point].astype(np.float64) @ gate.direction_D


@pytest.mark.parametrize("when", ["both", "generation"])
def test_a_gate_opens_and_closes_as_a_reference_does_token_by_token(
    gated: tuple[EngineProcess, float], cut_model: Path, when: str
) -> None:
    """At the gate's own point and behind it; in chunks of a prompt, and in its answer."""
    engine, threshold = gated
    positions = ALWAYS if when == "both" else _positions(N)
    given, wanted = [], []
    for asked, told in GATES.values():
        entry = {"vector": "everywhere", "when": when, "gate": {"probe": "gate", **asked}}
        if "release" in told:
            told = {"release": threshold + told["release"]}
            entry["gate"] = {"probe": "gate", **told}
        given.append(Ask(LONG, (entry,)))
        gate = replace(GATE, threshold=threshold, **told)
        wanted.append([Change("add", ROWS["everywhere"], positions, gate=gate)])
    answers = engine.call(steering.answer, given)
    errors = {
        name: _error(cut_model, ask, answer, changes)
        for name, ask, answer, changes in zip(GATES, given, answers, wanted, strict=True)
    }
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    if when == "both":
        kinds = {answer.logprobs[0][answer.token_ids[0]] for answer in answers}
        assert len(kinds) == len(GATES)  # no two of them do the same


def test_tiers_of_the_engine_and_of_the_request_add_up(
    steered: EngineProcess, cut_model: Path
) -> None:
    tiers = {
        "base": [{"vector": "early", "scale": 0.5}],
        "prefill": [{"vector": "middle"}],
        "decode": [{"vector": "late", "scale": -0.5}],
    }
    shown = steered.call(steering.set_tiers, **tiers)
    ask = Ask(LONG, ({"vector": "everywhere", "when": "generation"},))
    changes = [
        Change("add", ROWS["early"], ALWAYS, 0.5),
        Change("add", ROWS["middle"], _positions(0, N)),
        Change("add", ROWS["late"], _positions(N), -0.5),
        Change("add", ROWS["everywhere"], _positions(N)),
    ]
    answer, plain = steered.call(steering.answer, [ask, Ask(LONG)])
    steered.call(steering.set_tiers, base=[], prefill=[], decode=[])
    assert [entry["vector"] for entry in shown["base"]] == ["early"]
    assert _error(cut_model, ask, answer, changes) <= TOLERANCE
    assert _error(cut_model, Ask(LONG), plain, changes[:3]) <= TOLERANCE
    (after,) = steered.call(steering.answer, [Ask(LONG)])
    assert _error(cut_model, Ask(LONG), after, []) <= TOLERANCE


def test_steering_of_one_changes_no_bit_of_another_and_scale_0_none_at_all(
    steered: EngineProcess,
) -> None:
    def batch(steer: tuple[dict[str, Any], ...]) -> list[Answer]:
        steered.call(steering.reset_cache)
        given = [Ask(LONG), Ask(SHORT, steer), Ask(SHORT)]
        answers: list[Answer] = steered.call(steering.answer, given)
        return answers

    plain = batch(())
    assert batch(({"vector": "everywhere", "scale": 0.0},)) == plain
    other = batch(({"vector": "everywhere", "scale": 3.0},))
    assert (other[0], other[2]) == (plain[0], plain[2])
    assert other[1].logprobs != plain[1].logprobs


def test_special_tokens_are_left_alone_where_that_is_asked(
    steered: EngineProcess, cut_model: Path
) -> None:
    """Ids 0, 1 and 2 are this tokenizer's; the first is also what a prompt may hold twice."""
    prompt = (1, *SHORT, 2, 1, *SHORT)
    special = {i for i, token in enumerate(prompt) if token in (0, 1, 2)}
    when = {"phase": "prompt", "skip_special": True}
    ask = Ask(prompt, ({"vector": "early", "when": when},))
    (answer,) = steered.call(steering.answer, [ask])
    spared = [Change("add", ROWS["early"], _positions(0, len(prompt)) - special)]
    whole = [Change("add", ROWS["early"], _positions(0, len(prompt)))]
    assert _error(cut_model, ask, answer, spared) <= TOLERANCE
    assert _error(cut_model, ask, answer, whole) > 10 * TOLERANCE


def test_a_request_that_is_preempted_comes_back_steered_as_before(
    gated: tuple[EngineProcess, float], cut_model: Path
) -> None:
    """26 blocks of 32 tokens do not hold ten answers of 200 tokens."""
    engine, threshold = gated
    entry = {"vector": "middle", "gate": {"probe": "gate", "latch": True}, "when": "generation"}
    plain = {"vector": "late", "scale": 0.5}
    prompts = [tuple(range(3000 + 100 * i, 3000 + 100 * i + 70)) for i in range(10)]
    given = [Ask(prompt, (entry, plain), num_new=100) for prompt in prompts]
    preempted, answers = engine.call(steering.answer_and_count_preemptions, given)
    assert preempted > 0
    for ask, answer in zip(given[::3], answers[::3], strict=True):
        latch = replace(GATE, threshold=threshold, latch=True)
        start = len(ask.prompt)
        changes = [
            Change("add", ROWS["middle"], _positions(start), gate=latch),
            Change("add", ROWS["late"], ALWAYS, 0.5),
        ]
        assert _error(cut_model, ask, answer, changes) <= TOLERANCE


REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"vector": "erly"}, "early"),
    ({"vector": "early", "scale": float("nan")}, "scale"),
    ({"vector": "early", "points": ["post_block.3"]}, "post_block.3"),
    ({"vector": "early", "gate": {"probe": "nobody", "threshold": 0.0}}, "nobody"),
    ({"vector": "early", "when": {"phase": "prompt", "positions": [[500, 600]]}}, "20 tokens"),
    ({"vector": "early", "digest": "0" * 64}, "digest"),
]


@pytest.mark.parametrize(("entry", "said"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_cannot_be_done_is_refused_before_any_token(
    steered: EngineProcess, entry: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineFailed, match=r"RequestError|PointError") as caught:
        steered.call(steering.answer, [Ask(SHORT, (entry,))])
    assert said in str(caught.value)
    steered.call(asks.drop_unfinished)
    (after,) = steered.call(steering.answer, [Ask(SHORT)])
    assert len(after.token_ids) == NUM_NEW
