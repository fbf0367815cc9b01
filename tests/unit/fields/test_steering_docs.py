"""Every example in docs/steering.md is parsed and resolved by the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from clairai.engine.steer import steering_plan
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.fields import json_fields, packed_vector, ranges, rules, steer
from clairai.fields.request_fields import KEY, RequestFields, parse_fields
from clairai.fields.steer import SteerEntry, parse_entries
from clairai.fields.steering_vectors import FIELD_PHASES
from clairai.points import Point
from clairai.server.core_cache import CoreView
from clairai.server.steering_preview import preview_steering
from tests.support.probes import numbers
from tests.support.steering_plans import probe, vector

PAGE: Final = (Path(__file__).resolve().parents[3] / "docs" / "steering.md").read_text()
PROMPT_LEN: Final = 7
TIERS: Final = ("base", "prefill", "decode")


def registry() -> SteeringRegistry:
    names = ("pre_attn.1", "post_block.3")
    known = SteeringRegistry(map(Point.parse, names), 2, SteeringLimits(100, 100))
    known.put([vector(name, *names, values=(1, 2)) for name in ("calm", "rude", "patch")])
    known.set_probes({"anger": probe("anger", direction_D=numbers(1, -1))})
    return known


def blocks() -> list[Any]:
    found = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    calm = registry().vector("calm").digest
    return [json.loads(block.replace("$DIGEST", calm)) for block in found]


def entries_of(block: Any) -> list[tuple[SteerEntry, ...]]:
    """What a block asks for, as the part of the code reads it that would."""
    if isinstance(block, list):
        return [parse_entries(block, what="steer")]
    if "steering" in block.get(KEY, {}):
        return [parse_entries(block[KEY]["steering"], what="steer")]
    if KEY in block:
        return [parse_fields(block).steer]
    if "vllm_xargs" in block:
        return [parse_fields(block["vllm_xargs"]).steer]
    if FIELD_PHASES.keys() & block.keys():
        assert block.keys() <= FIELD_PHASES.keys()
        return [parse_fields(block).steer]
    assert block.keys() <= set(TIERS)
    return [parse_entries(block[tier], what=tier) for tier in block]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: str(block)[:40])
def test_an_example_is_read_and_can_be_applied(block: Any) -> None:
    known = registry()
    for entries in entries_of(block):
        is_rule = isinstance(block, dict) and "stop" in block.get(KEY, {})
        assert bool(entries) != is_rule
        for entry in entries:
            assert known.resolve([entry], prompt_len=PROMPT_LEN) is not None


def test_the_example_of_tiers_can_be_set() -> None:
    (tiers,) = [b for b in blocks() if isinstance(b, dict) and TIERS[0] in b]
    known = registry()
    known.set_tiers(**{tier: parse_entries(tiers[tier], what=tier) for tier in tiers})
    assert known.resolve((), prompt_len=PROMPT_LEN) is not None


def test_the_example_of_a_response_is_what_the_server_returns() -> None:
    (expected,) = [b for b in blocks() if isinstance(b, dict) and "steering" in b.get(KEY, {})]
    gate = {"probe": "anger", "latch": True}
    asked = [{"vector": "calm", "scale": 4, "when": "generation", "gate": gate}]
    wanted = RequestFields(steer=parse_entries(asked, what="steer"))
    assert preview_steering(wanted, CoreView(registry()._snapshot)).complete() == expected[KEY]


def test_the_tables_name_every_key_and_value_of_the_language() -> None:
    known = {
        *steer._ENTRY_KEYS,
        *steer._GATE_KEYS,
        *rules._KEYS,
        *("phase", "positions", "skip_special"),
    }
    values = {
        *steer.OPS,
        *rules.RULE_ACTIONS,
        *packed_vector._NBYTES,
        *FIELD_PHASES,
        "both",
        "last_prompt",
    }
    spans = set(re.findall(r"`\"?(\w+)\"?`", PAGE))
    assert (known | values) - spans == set()


def test_the_limits_are_those_of_the_code() -> None:
    section = PAGE.split("## Limits")[1]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", section, re.MULTILINE))
    limits = SteeringLimits(1, 1)
    assert rows["entries of a request; of all tiers"] == f"{steer.MAX_ENTRIES}; {steer.MAX_ENTRIES}"
    assert rows["positions of an entry"] == str(ranges.MAX_RANGES)
    stretches = "stretches of tokens that are steered differently, in a request"
    assert rows[stretches] == str(steering_plan.MAX_SEGMENTS)
    assert rows["gates of a request, those of tiers included"] == str(steering_plan.MAX_GATES)
    crowded = "operations on one row at one point, readings of gates included"
    assert rows[crowded] == str(steering_plan.MAX_OPS)
    assert (limits.vectors, limits.nbytes) == (2048, 1 << 30)
    assert rows["named vectors; their numbers"] == "2048; 1 GiB"
    assert (json_fields.MAX_CHARS >> 20, json_fields.MAX_ITEMS >> 20) == (64, 1)
    assert f"At most {rules.MAX_RULES} in a request" in PAGE
    assert f"At most {steer.MAX_ENTRIES} in a request" in PAGE
    assert f"1 to {rules.MAX_TOKENS}" in PAGE
