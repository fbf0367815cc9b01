"""A gate opens and closes for each token as a reference says, also after a preemption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import clairai
from clairai.points import Point
from tests.engine import steering
from tests.engine.hooked import ALWAYS, LONG, ROWS, TOLERANCE, N, error_of, noise, positions
from tests.engine.process import EngineProcess
from tests.engine.steering import Ask
from tests.fidelity.oracle import hidden_states
from tests.fidelity.steered import Change, Floats, Gated

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GATE: Final = Gated("pre_attn.0", noise(11, 1.0), threshold=0.0)
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
    acted_on = ALWAYS if when == "both" else positions(N)
    given, wanted = [], []
    for asked, told in GATES.values():
        entry = {"vector": "everywhere", "when": when, "gate": {"probe": "gate", **asked}}
        if "release" in told:
            told = {"release": threshold + told["release"]}
            entry["gate"] = {"probe": "gate", **told}
        given.append(Ask(LONG, (entry,)))
        gate = replace(GATE, threshold=threshold, **told)
        wanted.append([Change("add", ROWS["everywhere"], acted_on, gate=gate)])
    answers = engine.call(steering.answer, given)
    errors = {
        name: error_of(cut_model, ask, answer, changes)
        for name, ask, answer, changes in zip(GATES, given, answers, wanted, strict=True)
    }
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    if when == "both":
        kinds = {answer.logprobs[0][answer.token_ids[0]] for answer in answers}
        assert len(kinds) == len(GATES)  # no two of them do the same


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
            Change("add", ROWS["middle"], positions(start), gate=latch),
            Change("add", ROWS["late"], ALWAYS, 0.5),
        ]
        assert error_of(cut_model, ask, answer, changes) <= TOLERANCE
