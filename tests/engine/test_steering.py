"""Steered answers equal Hugging Face's under hooks, and nobody else's are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.engine import asks, steering
from tests.engine.hooked import (
    ALWAYS,
    LONG,
    NUM_NEW,
    ROWS,
    SHORT,
    TOLERANCE,
    N,
    error_of,
    positions,
)
from tests.engine.process import EngineFailed, EngineProcess
from tests.engine.steering import Answer, Ask
from tests.fidelity.steered import Change

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# What each means is in the Change beside it; Hugging Face is steered by that one.
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
        [Change("replace", ROWS["middle"], positions(N - 3, N - 2))],
    ),
    "only the prompt": (
        [{"vector": "early", "when": "prompt"}],
        [Change("add", ROWS["early"], positions(0, N))],
    ),
    "only what is generated": (
        [{"vector": "everywhere", "when": "generation", "scale": -1.0}],
        [Change("add", ROWS["everywhere"], positions(N), -1.0)],
    ),
    "only the last token of the prompt": (
        [{"vector": "late", "when": "last_prompt", "scale": 2.0}],
        [Change("add", ROWS["late"], positions(N - 1, N), 2.0)],
    ),
    "some of what is generated": (
        [{"vector": "late", "when": {"phase": "generation", "positions": [[2, 4], [6, None]]}}],
        [Change("add", ROWS["late"], positions(N + 2, N + 4) | positions(N + 6))],
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
            Change("ablate", ROWS["middle"], positions(0, N)),
            Change("clamp", ROWS["late"], positions(N), high=1.0),
            Change("replace", {"post_block.3": ROWS["everywhere"]["post_block.3"]}, ALWAYS, 0.25),
        ],
    ),
}


def test_every_operation_place_and_time_equals_hugging_face_with_hooks(
    steered: EngineProcess, cut_model: Path
) -> None:
    """All in one batch, with plain requests between them; prompts are prefilled in chunks."""
    given = [Ask(LONG, tuple(entries)) for entries, _ in CASES.values()]
    answers = steered.call(steering.answer, [*given, Ask(LONG), Ask(SHORT)])
    wanted = [*(changes for _, changes in CASES.values()), [], []]
    errors = {
        name: error_of(cut_model, ask, answer, changes)
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
    right = [Change("add", ROWS["early"], positions(0, N))]
    weak = [Change("add", ROWS["early"], positions(0, N), 0.5)]
    longer = [Change("add", ROWS["early"], positions(0, N + 1))]
    assert error_of(cut_model, ask, answer, right) <= TOLERANCE
    assert error_of(cut_model, ask, answer, weak) > 100 * TOLERANCE
    assert error_of(cut_model, ask, answer, longer) > 10 * TOLERANCE


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
        Change("add", ROWS["middle"], positions(0, N)),
        Change("add", ROWS["late"], positions(N), -0.5),
        Change("add", ROWS["everywhere"], positions(N)),
    ]
    answer, plain = steered.call(steering.answer, [ask, Ask(LONG)])
    steered.call(steering.set_tiers, base=[], prefill=[], decode=[])
    assert [entry["vector"] for entry in shown["base"]] == ["early"]
    assert error_of(cut_model, ask, answer, changes) <= TOLERANCE
    assert error_of(cut_model, Ask(LONG), plain, changes[:3]) <= TOLERANCE
    (after,) = steered.call(steering.answer, [Ask(LONG)])
    assert error_of(cut_model, Ask(LONG), after, []) <= TOLERANCE


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
    spared = [Change("add", ROWS["early"], positions(0, len(prompt)) - special)]
    whole = [Change("add", ROWS["early"], positions(0, len(prompt)))]
    assert error_of(cut_model, ask, answer, spared) <= TOLERANCE
    assert error_of(cut_model, ask, answer, whole) > 10 * TOLERANCE


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
