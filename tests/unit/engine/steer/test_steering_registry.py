"""Named vectors and tiers change atomically, and never for a running request."""

from __future__ import annotations

import pytest

from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.steering_registry import Mode, SteeringLimits, SteeringRegistry
from clairai.errors import ClairaiError, PointError, RequestError, VectorCapacityError, VectorError
from clairai.fields.ranges import OPEN_END
from clairai.vector.model import Vector
from tests.support.steering_plans import POINTS, entries, probe, registry, vector


def names(known: SteeringRegistry) -> list[str]:
    return [one.name for one in known.vectors()]


def test_vectors_are_listed_by_name_with_a_version_that_every_change_raises() -> None:
    known = registry(vector("b"), vector("a"))
    assert names(known) == ["a", "b"]
    before = known.state()
    assert [one.name for one in before.vectors] == ["a", "b"]
    assert before.points == tuple(map(str, sorted(POINTS)))
    assert (before.width, before.rows, before.programs) == (3, 100, 100)
    known.remove(["a"])
    assert known.state().version > before.version
    assert known.vector("b") == vector("b")


def test_add_refuses_a_name_that_is_taken_and_replace_one_that_is_not() -> None:
    known = registry(vector("joy"))
    with pytest.raises(VectorError, match="there is a vector named joy; replace it"):
        known.put([vector("new"), vector("joy")], "add")
    with pytest.raises(VectorError, match="no vector is named 'jo'; close to it: joy"):
        known.put([vector("joy", values=(9, 9, 9)), vector("jo")], "replace")
    assert known.vectors() == (vector("joy"),)  # none of either list
    known.put([vector("joy", values=(9, 9, 9)), vector("new")], "put")
    assert known.vectors() == (vector("joy", values=(9, 9, 9)), vector("new"))


@pytest.mark.parametrize("name", ["jo", "", "x" * 10**6])
def test_an_unknown_name_is_refused_with_the_close_ones(name: str) -> None:
    known = registry(vector("joy"), vector("fear"))
    for change in (known.vector, lambda one: known.remove(["fear", one])):
        with pytest.raises(VectorError, match="no vector is named") as caught:
            change(name)
        assert len(str(caught.value)) < 300
    assert names(known) == ["fear", "joy"]


def misfits() -> list[tuple[Vector, type[ClairaiError], str]]:
    wide = vector("wide", values=(1, 2, 3, 4))
    made_for = Vector("alien", dict(vector().rows), model="org/other-1b")
    untapped = vector("untapped", "pre_attn.1", "post_block.1", "post_block.2")
    return [
        (wide, VectorError, "vector wide has width 4 and the model has 3"),
        (made_for, VectorError, "was made for 'org/other-1b' and this engine serves"),
        (untapped, PointError, r"vector untapped is for post_block.1, post_block.2, not tapped"),
    ]


@pytest.mark.parametrize(("misfit", "kind", "reason"), misfits(), ids=lambda one: str(one)[:20])
def test_a_vector_that_does_not_fit_the_engine_is_refused(
    misfit: Vector, kind: type[ClairaiError], reason: str
) -> None:
    known = registry(vector("joy"), model="a/Tiny-3")
    with pytest.raises(kind, match=reason):
        known.put([vector("fine"), misfit])
    assert names(known) == ["joy"]


def test_a_model_is_the_same_wherever_it_was_downloaded_to() -> None:
    known = registry(model="/models/Tiny-3/")
    known.put([Vector("mine", dict(vector().rows), model="org/tiny-3")])
    assert names(known) == ["joy", "mine"]


def test_two_vectors_of_one_name_are_refused_together() -> None:
    with pytest.raises(VectorError, match="names are unique"):
        registry().put([vector("a"), vector("a", values=(1, 1, 1))])


@pytest.mark.parametrize(
    "limits", [SteeringLimits(9, 9, vectors=2), SteeringLimits(9, 9, nbytes=48)]
)
def test_the_vectors_of_an_engine_are_limited(limits: SteeringLimits) -> None:
    known = registry(vector("a"), vector("b"), limits=limits)  # 2 points of 3 numbers each
    with pytest.raises(VectorCapacityError, match="3 vectors of 72 bytes together"):
        known.put([vector("c")])
    known.put([vector("b", values=(5, 5, 5))])
    assert names(known) == ["a", "b"]


def test_a_plan_keeps_the_content_its_names_had_when_it_was_made() -> None:
    known = registry(vector("joy"))
    before = known.resolve(entries({"vector": "joy"}), prompt_len=4)
    known.put([vector("joy", values=(7, 7, 7))])
    after = known.resolve(entries({"vector": "joy"}), prompt_len=4)
    known.remove(["joy"])
    assert before is not None
    assert after is not None
    assert before.actions[0].rows[0].read().tolist() == [1, 2, -2]
    assert after.actions[0].rows[0].read().tolist() == [7, 7, 7]
    assert before.actions[0].rows[0].digest != after.actions[0].rows[0].digest
    with pytest.raises(RequestError, match="there are none"):
        known.resolve(entries({"vector": "joy"}), prompt_len=4)


# Tiers


def tiered() -> SteeringRegistry:
    known = registry(vector("joy"), vector("fear", values=(3, 3, 3)))
    known.set_tiers(
        base=entries({"vector": "joy", "scale": 1}, what="base"),
        prefill=entries({"vector": "joy", "scale": 2}, what="prefill"),
        decode=entries({"vector": "joy", "scale": 3}, what="decode"),
    )
    return known


def shape(plan: SteeringPlan | None) -> list[tuple[float, tuple[tuple[int, int], ...]]]:
    assert plan is not None
    return [(action.scale, action.ranges) for action in plan.actions]


def test_tiers_act_before_the_requests_own_entries_each_on_its_tokens() -> None:
    own = entries({"vector": "joy", "scale": 4})
    assert shape(tiered().resolve(own, prompt_len=6)) == [
        (1, ((0, OPEN_END),)),
        (2, ((0, 6),)),
        (3, ((6, OPEN_END),)),
        (4, ((0, OPEN_END),)),
    ]


def test_only_the_tiers_that_are_given_are_replaced() -> None:
    known = tiered()
    version = known.tiers().version
    known.set_tiers(prefill=(), decode=entries({"vector": "fear"}, what="decode"))
    tiers = known.tiers()
    assert [len(tier) for tier in (tiers.base, tiers.prefill, tiers.decode)] == [1, 0, 1]
    assert tiers.version == version + 1
    assert shape(known.resolve((), prompt_len=2)) == [(1, ((0, OPEN_END),)), (1, ((2, OPEN_END),))]


def test_a_tier_that_holds_none_of_a_prompts_tokens_does_not_act_on_it() -> None:
    known = registry()
    late = {"vector": "joy", "when": {"phase": "prompt", "positions": [[10, None]]}}
    known.set_tiers(base=entries(late, what="base"))
    assert known.resolve((), prompt_len=10) is None
    assert shape(known.resolve((), prompt_len=11)) == [(1, ((10, 11),))]


def test_positions_of_an_entry_are_limited_to_the_tokens_of_its_tier() -> None:
    known = registry()
    known.set_tiers(
        prefill=entries({"vector": "joy", "when": {"positions": [[2, None]]}}, what="prefill"),
        decode=entries({"vector": "joy", "when": {"positions": [[2, 9]]}}, what="decode"),
    )
    assert shape(known.resolve((), prompt_len=6)) == [(1, ((2, 6),)), (1, ((6, 9),))]


BROKEN = [
    ("base", {"vector": "jay"}, "no vector is named 'jay'"),
    ("base", {"vector": "joy", "gate": {"probe": "nobody"}}, "no probe is named 'nobody'"),
    ("prefill", {"vector": "joy", "when": "generation"}, "generation is not part of the prefill"),
    ("decode", {"vector": "joy", "when": "prompt"}, "prompt is not part of the decode tier"),
    ("decode", {"vector": "joy", "when": "last_prompt"}, "last_prompt is not part of the decode"),
]


@pytest.mark.parametrize(("tier", "entry", "reason"), BROKEN, ids=str)
def test_a_tier_that_cannot_act_is_refused_and_the_old_ones_stay(
    tier: str, entry: dict[str, object], reason: str
) -> None:
    known = tiered()
    before = known.tiers()
    with pytest.raises(RequestError, match=reason):
        known.set_tiers(**{tier: entries(entry, what=tier)})
    assert known.tiers() is before


def test_the_entries_of_all_tiers_together_are_limited() -> None:
    known = registry()
    here, there = ({"vector": "joy", "points": [one]} for one in ("pre_attn.1", "post_attn.2"))
    half = entries(*[here] * 9, *[there] * 8)
    known.set_tiers(base=half)
    with pytest.raises(RequestError, match="34 entries in all; give at most 32"):
        known.set_tiers(decode=half)


def test_tiers_with_which_every_request_would_be_refused_are_refused() -> None:
    known = registry()
    with pytest.raises(RequestError, match="17 operations act on one row"):
        known.set_tiers(base=entries(*[{"vector": "joy"}] * 17, what="base"))
    known.set_tiers(base=entries(*[{"vector": "joy"}] * 9, what="base"))
    with pytest.raises(RequestError, match="18 operations act on one row"):
        known.set_tiers(decode=entries(*[{"vector": "joy"}] * 9, what="decode"))
    assert known.resolve((), prompt_len=3) is not None


def test_a_vector_with_which_every_request_would_be_refused_does_not_replace_another() -> None:
    known = registry()
    here = {"vector": "joy", "scale": 1e3, "match_norm": True}
    known.set_tiers(base=entries(here, what="base"))
    wide = vector("joy", "pre_attn.1", "post_attn.1", "pre_attn.2", "post_attn.2", "pre_attn.3")
    with pytest.raises(VectorError, match=r"a global tier uses joy, .*could become .* long"):
        known.put([wide])
    assert known.resolve((), prompt_len=3) is not None


def test_a_vector_that_a_tier_uses_can_be_replaced_but_not_removed() -> None:
    known = tiered()
    with pytest.raises(VectorError, match=r"a global tier uses joy, .*change the tier first"):
        known.remove(["joy"])
    known.put([vector("joy", values=(5, 5, 5))])
    plan = known.resolve((), prompt_len=1)
    assert plan is not None
    assert plan.actions[0].rows[0].read().tolist() == [5, 5, 5]
    known.set_tiers(base=(), prefill=(), decode=())
    known.remove(["joy"])


def test_a_change_that_would_break_a_tier_is_refused_and_others_are_not() -> None:
    known = tiered()
    known.set_tiers(
        base=entries({"vector": "joy", "points": ["post_attn.2"]}, what="base"),
        prefill=(),
        decode=(),
    )
    with pytest.raises(VectorError, match=r"has no row for post_attn.2"):
        known.put([vector("joy", "pre_attn.1")])
    known.put([vector("fear", "pre_attn.1")])
    assert known.vector("joy") == vector("joy")


def test_a_tier_whose_probe_was_removed_refuses_requests_until_it_is_changed() -> None:
    known = registry()
    known.set_tiers(base=entries({"vector": "joy", "gate": {"probe": "sad"}}, what="base"))
    known.set_probes({})
    with pytest.raises(RequestError, match=r"base\[0\].gate: no probe is named 'sad'"):
        known.resolve((), prompt_len=3)
    known.put([vector("more")])  # what has nothing to do with it goes on
    known.set_probes({probe().name: probe()})
    assert known.resolve((), prompt_len=3) is not None


def test_an_inline_vector_of_a_tier_is_decoded_once() -> None:
    known = registry()
    known.set_tiers(base=entries({"vector": {"points": {"pre_attn.1": "AACAPwAAAAAAAAAA"}}}))
    held = known.tiers().base[0].vector
    assert isinstance(held, Vector)
    assert next(iter(held.rows.values())).tolist() == [1, 0, 0]


@pytest.mark.parametrize("mode", ["add", "put"])
def test_an_empty_list_of_vectors_is_accepted(mode: Mode) -> None:
    known = registry()
    known.put([], mode)
    assert names(known) == ["joy"]
