"""Every parser answers random inputs with a value or a refusal; what was found once stays mended.

A short run with fixed seeds. `make fuzz` makes a long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.run import CRASHES
from tests.fuzz.target import Target
from tests.fuzz.targets import all_targets

INPUTS = 300_000 // 16  # for the cheapest of the targets; others in proportion to their share
KEPT = sorted(path for path in CRASHES.glob("*/*.bin"))


def num_inputs(target: Target) -> int:
    most = max(one.share for one in all_targets().values())
    return int(INPUTS * target.share / most)


@pytest.mark.attack(700)
@pytest.mark.parametrize("name", all_targets())
def test_random_inputs_are_read_or_refused_in_few_words(name: str) -> None:
    target = all_targets()[name]
    outcome = Fuzzer(target, seed=2026).run(num_inputs(target))
    assert [(finding.what, finding.data) for finding in outcome.findings] == []
    assert outcome.accepted > 0
    if target.refusals:
        assert outcome.places, "no input was refused: the target cannot fail"


@pytest.mark.attack(701)
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_inputs_that_were_found_once_are_refused_or_read(path: Path) -> None:
    target = all_targets()[path.parent.name]
    alone = Target(**{**vars(target), "seeds": [path.read_bytes()]})
    assert Fuzzer(alone, seed=0).run(1).findings == []


@pytest.mark.parametrize("name", all_targets())
def test_the_seeds_of_a_target_are_valid_inputs(name: str) -> None:
    target = all_targets()[name]
    outcome = Fuzzer(target, seed=0).run(len(target.seeds))
    assert outcome.accepted >= len(target.seeds) * 0.5
