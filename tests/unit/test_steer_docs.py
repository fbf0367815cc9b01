"""Every example in docs/steering.md is read, and resolved, by the code it is about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from clairai.points import Point
from clairai.serve.mirror import View
from clairai.serve.ruling import judge
from clairai.steer import course, packed, rules, segments, spec, text
from clairai.steer.registry import Limits, Registry
from clairai.steer.seed_fields import PHASES
from clairai.steer.spec import Entry, parse_entries
from clairai.wanted import KEY, Wanted, parse
from tests.unit.tiny_courses import probe, vector
from tests.unit.tiny_probes import numbers

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "steering.md").read_text()
PROMPT_LEN: Final = 7
TIERS: Final = ("base", "prefill", "decode")


def registry() -> Registry:
    names = ("pre_attn.1", "post_block.3")
    known = Registry(map(Point.parse, names), 2, Limits(100, 100))
    known.put([vector(name, *names, values=(1, 2)) for name in ("calm", "rude", "patch")])
    known.set_probes({"anger": probe("anger", direction_D=numbers(1, -1))})
    return known


def blocks() -> list[Any]:
    found = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    calm = registry().vector("calm").digest
    return [json.loads(block.replace("$DIGEST", calm)) for block in found]


def entries_of(block: Any) -> list[tuple[Entry, ...]]:
    """What a block asks for, as the part of the code reads it that would."""
    if isinstance(block, list):
        return [parse_entries(block, what="steer")]
    if "steering" in block.get(KEY, {}):
        return [parse_entries(block[KEY]["steering"], what="steer")]
    if KEY in block:
        return [parse(block).steer]
    if "vllm_xargs" in block:
        return [parse(block["vllm_xargs"]).steer]
    if PHASES.keys() & block.keys():
        assert block.keys() <= PHASES.keys()
        return [parse(block).steer]
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


def test_the_example_of_an_answer_is_what_the_server_tells() -> None:
    (told,) = [b for b in blocks() if isinstance(b, dict) and "steering" in b.get(KEY, {})]
    gate = {"probe": "anger", "latch": True}
    asked = [{"vector": "calm", "scale": 4, "when": "generation", "gate": gate}]
    wanted = Wanted(steer=parse_entries(asked, what="steer"))
    assert judge(wanted, View(registry()._known)).echo() == told[KEY]


def test_the_tables_name_every_key_and_value_of_the_language() -> None:
    known = {*spec._KNOWN, *spec._GATE, *rules._KNOWN, *("phase", "positions", "skip_special")}
    values = {*spec.OPS, *rules.RULE_ACTIONS, *packed._NBYTES, *PHASES, "both", "last_prompt"}
    spans = set(re.findall(r"`\"?(\w+)\"?`", PAGE))
    assert (known | values) - spans == set()


def test_the_limits_are_those_of_the_code() -> None:
    section = PAGE.split("## Limits")[1]
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", section, re.MULTILINE))
    limits = Limits(1, 1)
    assert rows["entries of a request; of all tiers"] == f"{spec.MAX_ENTRIES}; {spec.MAX_ENTRIES}"
    assert rows["positions of an entry"] == str(course.MAX_RANGES)
    stretches = "stretches of tokens that are steered differently, in a request"
    assert rows[stretches] == str(segments.MAX_SEGMENTS)
    assert rows["gates of a request, those of tiers included"] == str(course.MAX_GATES)
    crowded = "operations on one row at one point, readings of gates included"
    assert rows[crowded] == str(course.MAX_OPS)
    assert (limits.vectors, limits.nbytes) == (2048, 1 << 30)
    assert rows["named vectors; their numbers"] == "2048; 1 GiB"
    assert (text.MAX_CHARS >> 20, text.MAX_ITEMS >> 20) == (64, 1)
    assert f"At most {rules.MAX_RULES} in a request" in PAGE
    assert f"At most {spec.MAX_ENTRIES} in a request" in PAGE
    assert f"1 to {rules.MAX_TOKENS}" in PAGE
