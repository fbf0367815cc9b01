"""Entries become a plan with content and absolute positions, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.steer.steering_plan import (
    MAX_GATES,
    MAX_OPS,
    SteeringPlan,
    decode_plan,
    describe_plan,
    encode_plan,
)
from clairai.engine.steer.steering_registry import SteeringRegistry
from clairai.errors import ClairaiError, PointError, RequestError, VectorError, quote
from clairai.fields.catalog import path_order
from clairai.fields.packed_vector import pack_vector
from clairai.fields.ranges import OPEN_END
from clairai.points import Point
from clairai.vector.model import Vector, digest_row
from tests.support.probes import numbers
from tests.support.steering_plans import entries, probe, registry, vector


def resolved(
    *given: Any, prompt_len: int = 10, known: SteeringRegistry | None = None
) -> SteeringPlan:
    plan = (known or registry()).resolve(entries(*given), prompt_len=prompt_len)
    assert plan is not None
    return plan


def test_a_named_vector_becomes_its_rows_with_absolute_positions() -> None:
    (action,) = resolved({"vector": "joy", "scale": 2, "when": "generation"}).actions
    assert (action.vector, action.digest) == ("joy", vector().digest)
    assert [row.point for row in action.rows] == ["pre_attn.1", "post_attn.2"]
    for row in action.rows:
        assert row.read().tolist() == [1, 2, -2]
        assert row.digest == digest_row(numbers(1, 2, -2))
    assert (action.op, action.scale, action.ranges) == ("add", 2.0, ((10, OPEN_END),))


def test_a_plan_survives_encoding() -> None:
    gated = {"vector": "joy", "gate": {"probe": "sad", "latch": True}, "op": "clamp", "low": 0}
    plan = resolved({"vector": pack_vector(vector()).to_json(), "match_norm": True}, gated)
    assert decode_plan(encode_plan(plan)) == plan


def test_an_inline_vector_acts_as_a_named_one_with_the_same_content() -> None:
    named = resolved({"vector": "joy"}).actions[0]
    inline = resolved({"vector": pack_vector(vector("other")).to_json()}).actions[0]
    assert inline.vector == ""
    assert (inline.digest, inline.rows) == (named.digest, named.rows)


def test_points_select_some_of_the_vectors_rows() -> None:
    plan = resolved({"vector": "joy", "points": ["post_attn.2"]})
    assert [row.point for row in plan.actions[0].rows] == ["post_attn.2"]


def test_a_gate_has_the_probes_own_direction_and_threshold_unless_another_is_given() -> None:
    own, other = resolved(
        {"vector": "joy", "gate": {"probe": "sad"}},
        {"vector": "joy", "gate": {"probe": "bare", "threshold": -1, "sharpness": 4}},
    ).gates
    assert (own.threshold, own.sharpness, own.row.point) == (0.5, None, "pre_attn.1")
    assert own.row.read().tolist() == [1, 0, -1]
    assert own.row.digest == digest_row(probe().direction_D)
    assert (other.threshold, other.sharpness) == (-1, 4)


def test_each_gated_action_has_a_gate_of_its_own() -> None:
    gated = {"vector": "joy", "gate": {"probe": "sad", "latch": True}}
    plan = resolved(gated, {"vector": "joy"}, gated)
    assert [action.gate for action in plan.actions] == [0, None, 1]
    assert plan.gates[0] == plan.gates[1]
    assert plan.is_stateful


def test_an_entry_of_scale_0_does_not_act_but_its_names_must_exist() -> None:
    known = registry()
    assert known.resolve(entries({"vector": "joy", "scale": 0}), prompt_len=5) is None
    assert known.resolve(entries({"vector": "joy", "scale": -0.0}), prompt_len=5) is None
    with pytest.raises(RequestError, match="no vector is named 'jay'"):
        known.resolve(entries({"vector": "jay", "scale": 0}), prompt_len=5)


def test_a_request_without_entries_has_no_plan_whatever_its_prompt_is() -> None:
    assert registry().resolve((), prompt_len=0) is None
    with pytest.raises(RequestError, match="a prompt without token ids cannot be steered"):
        registry().resolve(entries({"vector": "joy"}), prompt_len=0)


def test_post_block_of_a_layer_is_the_place_of_the_next_layers_pre_attn() -> None:
    path = [f"{kind}.{layer}" for layer in range(3) for kind in ("pre_attn", "post_attn")]
    assert [path_order(Point.parse(name)) for name in path] == list(range(6))
    assert path_order(Point("post_block", 1)) == path_order(Point("pre_attn", 2))


asked = st.fixed_dictionaries(
    {"vector": st.sampled_from(["joy", "joy", "gone"])},
    optional={
        "scale": st.sampled_from([0, 1, -2.5]),
        "op": st.sampled_from(["add", "ablate", "replace"]),
        "points": st.sampled_from([["pre_attn.1"], ["post_attn.2"]]),
        "when": st.sampled_from(["prompt", "generation", "last_prompt"])
        | st.fixed_dictionaries(
            {"positions": st.lists(st.sampled_from([[0, 2], [1, -1], [3, None]]), min_size=1)},
            optional={"skip_special": st.booleans(), "phase": st.just("prompt")},
        ),
        "gate": st.fixed_dictionaries(
            {"probe": st.sampled_from(["sad", "late"])}, optional={"latch": st.booleans()}
        ),
    },
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(asked, max_size=4), st.integers(1, 6))
def test_any_entries_become_a_valid_plan_or_a_refusal(
    every: list[dict[str, Any]], prompt_len: int
) -> None:
    known = registry()
    try:
        plan = known.resolve(entries(*every), prompt_len=prompt_len)
    except (RequestError, PointError):
        return
    acting = [one for one in every if one.get("scale", 1) != 0]
    assert (plan is None) == (not acting)
    if plan is None:
        return
    assert [action.scale for action in plan.actions] == [one.get("scale", 1) for one in acting]
    for action in plan.actions:
        edges = [edge for one in action.ranges for edge in one]
        assert edges
        assert edges == sorted(set(edges))
    numbered = [action.gate for action in plan.actions if action.gate is not None]
    assert numbered == list(range(len(plan.gates)))
    # What the engine describes, sent as a request, gives the same plan.
    assert known.resolve(entries(*describe_plan(plan)), prompt_len=prompt_len) == plan


LONG = {"vector": {"points": {"pre_attn.1": "A" * 10**6}}}
REFUSED: list[tuple[dict[str, Any], type[ClairaiError], str]] = [
    ({"vector": "jo"}, RequestError, "no vector is named 'jo'; close to it: joy"),
    ({"vector": "rage"}, RequestError, "no vector is named 'rage'; there are joy"),
    ({"vector": "joy", "digest": "0" * 64}, RequestError, "it was changed"),
    ({"vector": "joy", "points": ["post_attn.1"]}, PointError, "no row for post_attn.1; it has"),
    ({"vector": "joy", "scale": 1e18}, RequestError, "could become 6e[+]18 long.*smaller scale"),
    ({"vector": "joy", "scale": 3e38}, RequestError, "at most 1e[+]30 in size"),
    ({"vector": "joy", "scale": 1e-31}, RequestError, "must be 0 or of 1e-30 to 1e[+]30 in size"),
    (LONG, RequestError, "has 1000000 characters of base64; 3 numbers"),
    (
        {"vector": {"points": {"post_block.1": "AACAPwAAAAAAAAAA"}}},
        PointError,
        "is for post_block.1, not tapped here; tapped are pre_attn.0",
    ),
    ({"vector": "joy", "gate": {"probe": "sed"}}, RequestError, "'sed'; close to it: sad"),
    ({"vector": "joy", "gate": {"probe": "bare"}}, RequestError, "no threshold of its own"),
    (
        {"vector": "joy", "gate": {"probe": "sad", "release": 0.75}},
        RequestError,
        "release must not be above it",
    ),
    (
        {"vector": "joy", "gate": {"probe": "late"}},
        PointError,
        "reads post_attn.3, which comes after pre_attn.1, where the vector acts",
    ),
    (
        {"vector": "joy", "when": {"phase": "prompt", "positions": [[10, None]]}},
        RequestError,
        "hold none of this prompt's 10 tokens",
    ),
    (
        {"vector": "joy", "scale": 0, "when": {"positions": [[-30, -20]]}},
        RequestError,
        "hold none of this prompt's 10 tokens",
    ),
]


@pytest.mark.parametrize(("entry", "kind", "reason"), REFUSED, ids=quote)
def test_an_impossible_entry_is_refused_before_any_token(
    entry: dict[str, Any], kind: type[ClairaiError], reason: str
) -> None:
    with pytest.raises(kind, match=reason) as caught:
        resolved(entry)
    assert type(caught.value) is kind
    assert "steer[0]" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_entries_that_are_possible_alone_are_refused_where_together_they_overflow() -> None:
    one = {"vector": "joy", "scale": 1e2, "match_norm": True}
    assert resolved(one).actions
    with pytest.raises(RequestError, match=r"5 entries .*could become 1\.1e[+]26 long"):
        resolved(*[one] * 5)
    prompt, answer = {**one, "when": "prompt"}, {**one, "when": "generation"}
    assert len(resolved(prompt, answer, prompt, answer).actions) == 4  # no row has all of them


def test_a_gate_may_read_where_its_vector_acts_and_at_later_points_only() -> None:
    late = {"vector": "joy", "gate": {"probe": "late"}}
    known = registry(vector("joy", "post_attn.3", "post_block.3"))
    assert resolved(late, known=known).gates[0].row.point == "post_attn.3"
    both = registry(vector("joy", "pre_attn.0", "post_block.3"))
    with pytest.raises(PointError, match=r"comes after pre_attn.0"):
        resolved(late, known=both)
    assert resolved(late | {"points": ["post_block.3"]}, known=both).gates


def test_a_gate_at_an_untapped_point_is_refused() -> None:
    known = registry()
    known.set_probes({"off": probe("off", "post_block.0")})
    with pytest.raises(PointError, match=r"probe off is for post_block.0, not tapped"):
        resolved({"vector": "joy", "gate": {"probe": "off"}}, known=known)


def test_the_operations_on_one_row_at_one_point_are_limited() -> None:
    add = {"vector": "joy", "points": ["pre_attn.1"]}
    assert resolved(*[add] * MAX_OPS)
    with pytest.raises(
        RequestError, match=f"{MAX_OPS + 1} operations act on one row at pre_attn.1"
    ):
        resolved(*[add] * (MAX_OPS + 1))
    with pytest.raises(RequestError, match=f"{MAX_OPS + 2} operations .* at pre_attn.1"):
        resolved(*[add] * MAX_OPS, {**add, "gate": {"probe": "sad"}})
    elsewhere = {"vector": "joy", "points": ["post_attn.2"], "gate": {"probe": "sad"}}
    with pytest.raises(RequestError, match=f"{MAX_OPS + 1} operations .* at pre_attn.1"):
        resolved(*[add] * MAX_OPS, elsewhere)  # the gate reads where the others act


def test_operations_on_different_tokens_are_counted_apart() -> None:
    def halves(when: str) -> list[dict[str, Any]]:
        return [{"vector": "joy", "when": when}] * MAX_OPS

    assert len(resolved(*halves("prompt"), *halves("generation")).actions) == 2 * MAX_OPS


def test_the_gates_of_a_plan_are_limited() -> None:
    gated = {"vector": "joy", "points": ["post_attn.2"], "gate": {"probe": "sad"}}
    assert len(resolved(*[gated] * MAX_GATES).gates) == MAX_GATES
    with pytest.raises(RequestError, match=f"with {MAX_GATES + 1} gates.*at most 64 with 8"):
        resolved(*[gated] * (MAX_GATES + 1))


def test_the_segments_of_a_plan_are_limited() -> None:
    def entry(shift: int) -> dict[str, Any]:
        return {
            "vector": "joy",
            "when": {"positions": [[8 * i + shift, 8 * i + 8] for i in range(64)]},
        }

    assert resolved(*map(entry, range(4)), prompt_len=1000)
    with pytest.raises(RequestError, match=r"into 320 stretches.*at most 256"):
        resolved(*map(entry, range(5)), prompt_len=1000)


def test_skipping_special_tokens_needs_an_engine_with_a_tokenizer() -> None:
    entry = {"vector": "joy", "when": {"skip_special": True}}
    assert resolved(entry).actions[0].skips_special
    with pytest.raises(RequestError, match="skip_special needs a tokenizer"):
        resolved(entry, known=registry(can_skip_special=False))


def test_what_is_applied_is_described_in_the_form_of_a_request() -> None:
    gate = {"probe": "sad", "sharpness": 2.0, "latch": True}
    known = registry()
    plan = resolved(
        {"vector": "joy", "when": {"phase": "prompt", "skip_special": True}, "gate": gate},
        {"vector": vector("other"), "op": "clamp", "high": 1, "when": "generation"},
        known=known,
    )
    named, inline = describe_plan(plan)
    assert named == {
        "vector": "joy",
        "digest": vector().digest,
        "scale": 1.0,
        "op": "add",
        "points": ["pre_attn.1", "post_attn.2"],
        "when": {"phase": "both", "positions": [[0, 10]], "skip_special": True},
        "gate": gate | {"threshold": 0.5},
    }
    assert (inline["vector"], inline["high"]) == (None, 1.0)
    assert inline["when"]["positions"] == [[10, None]]
    assert resolved(named, known=known).actions == plan.actions[:1]


def test_a_wide_vector_is_refused_as_a_narrow_one_is() -> None:
    wide = Vector("wide", {Point("pre_attn", 1): np.ones(4, np.float32)})
    with pytest.raises(VectorError, match=r"steer\[0\].vector has width 4 and the model has 3"):
        resolved({"vector": wide})
