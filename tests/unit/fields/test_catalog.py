"""The API server, which has no numbers, refuses what the engine core refuses, in the same words."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import ClairaiError
from clairai.fields.catalog import rule_threshold
from clairai.fields.request_fields import KEY, parse_fields
from clairai.points import Point
from clairai.server.core_cache import CoreCache, CoreView
from clairai.server.steering_preview import preview_steering
from clairai.wire.control_messages import BankState, ListedProbe
from clairai.wire.steering_messages import SteeringState
from tests.support.probes import numbers
from tests.support.steering_plans import probe, vector

POINTS = ("pre_attn.1", "post_block.3")
PROBES = {
    "early": probe("early", "pre_attn.1", direction_D=numbers(1, 0), threshold=0.5),
    "late": probe("late", "post_block.3", direction_D=numbers(0, 1), threshold=None),
    "elsewhere": probe("elsewhere", "post_block.9", direction_D=numbers(0, 1), threshold=0.5),
}


def registry() -> SteeringRegistry:
    found = SteeringRegistry(map(Point.parse, POINTS), 2, SteeringLimits(100, 100))
    found.put([vector("calm", *POINTS, values=(3, 4))])
    found.set_probes(PROBES)
    return found


def view_of(core: SteeringRegistry) -> CoreView:
    """What an API server sees of this core."""
    listed = [
        ListedProbe(one.name, str(one.point), threshold=one.threshold) for one in PROBES.values()
    ]
    replies: dict[type, msgspec.Struct] = {
        BankState: BankState(1, 8, tuple(listed)),
        type(core.state()): core.state(),
        SteeringState: SteeringState(0, b"[]", b"[]", b"[]"),
    }

    async def ask(_: Any, kind: type) -> Any:
        cache.note(replies[kind])
        return replies[kind]

    cache = CoreCache(ask, is_shared=False)
    return asyncio.run(cache.view())


def refusal(check: Any, *arguments: Any, **options: Any) -> str | None:
    try:
        check(*arguments, **options)
    except ClairaiError as error:
        return f"{error.code}: {error.reason}"
    return None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"vector": "calm"}, None),
        ({"vector": "calm", "points": ["post_block.3"], "scale": 2}, None),
        ({"vector": "calm", "gate": {"probe": "early"}}, None),
        ({"vector": "cal"}, "no vector is named 'cal'; close to it: calm"),
        ({"vector": "calm", "digest": "0" * 64}, "it was changed"),
        ({"vector": "calm", "points": ["post_block.9"]}, "has no row for post_block.9"),
        ({"vector": "calm", "scale": 1e20}, "could become 1e+21 long"),
        ({"vector": "calm", "scale": 1e6, "match_norm": True}, "could become 1e+18 long"),
        ({"vector": "calm", "scale": -1e6, "op": "ablate"}, "could become 1e+18 long"),
        ({"vector": "calm", "low": 1e29, "op": "clamp"}, "could become 2e+29 long"),
        ({"vector": "calm", "scale": 1e18, "op": "replace"}, "use a smaller scale"),
        ({"vector": "calm", "gate": {"probe": "none"}}, "no probe is named 'none'"),
        ({"vector": "calm", "gate": {"probe": "late"}}, "has no threshold of its own"),
        ({"vector": "calm", "gate": {"probe": "late", "threshold": 1}}, "which comes after"),
        ({"vector": "calm", "gate": {"probe": "elsewhere"}}, "not tapped here"),
        ({"vector": "calm", "gate": {"probe": "early", "release": 1}}, "must not be above it"),
    ],
)
def test_an_entry_is_judged_alike_with_and_without_numbers(
    entry: dict[str, Any], reason: str | None
) -> None:
    core = registry()
    fields = parse_fields({KEY: {"steer": [entry]}})
    by_core = refusal(core.resolve, fields.steer, prompt_len=5)
    assert refusal(preview_steering, fields, view_of(core)) == by_core
    assert (by_core is None) == (reason is None)
    assert reason is None or reason in str(by_core)


@pytest.mark.parametrize("rule", [{"probe": "none"}, {"probe": "late"}, {"probe": "early"}])
def test_a_rule_is_judged_alike_with_and_without_numbers(rule: dict[str, Any]) -> None:
    fields = parse_fields({KEY: {"stop": [rule]}})
    by_core = refusal(rule_threshold, fields.stop[0], PROBES, what="stop[0]")
    assert refusal(preview_steering, fields, view_of(registry())) == by_core


def test_the_core_which_knows_the_models_dtype_may_refuse_more() -> None:
    core = SteeringRegistry(map(Point.parse, POINTS), 2, SteeringLimits(9, 9), dtype="float16")
    core.put([vector("calm", *POINTS, values=(3, 4))])
    fields = parse_fields({KEY: {"steer": [{"vector": "calm", "scale": 7000}]}})
    assert refusal(preview_steering, fields, view_of(core)) is None
    reason = str(refusal(core.resolve, fields.steer, prompt_len=5))
    assert "rows of this model are float16: at most 65504; use a smaller scale" in reason
