"""The prefix cache is shared where steering leaves the KV alike, and nowhere else.

Every answer is compared with one that had no cache: the same request under a salt of its own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import clairai
from clairai.points import Point
from clairai.vector.safetensors_format import dumps
from tests.engine import steering
from tests.engine.process import EngineProcess
from tests.engine.steering import Answer, Ask

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WIDTH: Final = 576
PROMPT: Final = tuple(range(5000, 5100))
WHOLE_BLOCKS: Final = 96  # of the prompt, in blocks of 32
TOLERANCE: Final = 1e-4


def _row(seed: int) -> NDArray[np.float32]:
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
    return row / np.float32(6)


def _file(name: str, seed: int) -> bytes:
    return dumps(clairai.Vector(name, {Point.parse("pre_attn.0"): _row(seed)}))


@pytest.fixture(scope="module")
def named(engine: EngineProcess) -> Iterator[EngineProcess]:
    engine.call(steering.put, [_file("v", 21), _file("w", 22)])
    yield engine
    engine.call(steering.remove_all)


@pytest.fixture
def cached(named: EngineProcess) -> EngineProcess:
    named.call(steering.reset_cache)
    return named


class Salts:
    """A salt for each cache-less request: no two share a block."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> str:
        self._count += 1
        return f"alone-{self._count}"


@pytest.fixture(scope="module")
def salts() -> Salts:
    return Salts()


def _is_same(found: Answer, truth: Answer) -> bool:
    if found.token_ids != truth.token_ids:
        return False
    pairs = zip(found.logprobs, truth.logprobs, strict=True)
    return all(
        abs(one[t] - other[t]) <= TOLERANCE for one, other in pairs for t in one if t in other
    )


def _ask(engine: EngineProcess, salts: Salts, ask: Ask) -> int:
    """How many tokens of it came from the cache; its answer is that of a run without one."""
    found, truth = engine.call(steering.answer, [ask, replace(ask, salt=salts.next())])
    assert truth.num_cached == 0
    assert _is_same(found, truth)
    assert isinstance(found.num_cached, int)
    return found.num_cached


def _steer(vector: str = "v", **more: Any) -> tuple[dict[str, Any], ...]:
    return ({"vector": vector, **more},)


PLAIN: Final = Ask(PROMPT)


def test_a_steered_prompt_is_neither_taken_from_the_plain_one_nor_given_to_it(
    cached: EngineProcess, salts: Salts
) -> None:
    assert _ask(cached, salts, PLAIN) == 0
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == 0
    assert _ask(cached, salts, PLAIN) == WHOLE_BLOCKS
    cached.call(steering.reset_cache)
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == 0
    assert _ask(cached, salts, PLAIN) == 0


def test_equal_steering_shares_and_other_steering_does_not(
    cached: EngineProcess, salts: Salts
) -> None:
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == 0
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == WHOLE_BLOCKS
    assert _ask(cached, salts, Ask(PROMPT, _steer(when="prompt"))) == WHOLE_BLOCKS
    assert _ask(cached, salts, Ask(PROMPT, _steer(scale=1.5))) == 0
    assert _ask(cached, salts, Ask(PROMPT, _steer("w"))) == 0
    assert _ask(cached, salts, Ask(PROMPT, _steer(op="ablate"))) == 0


def test_what_acts_from_a_position_on_leaves_the_blocks_before_it_shared(
    cached: EngineProcess, salts: Salts
) -> None:
    assert _ask(cached, salts, PLAIN) == 0
    late = {"phase": "prompt", "positions": [[70, None]]}
    assert _ask(cached, salts, Ask(PROMPT, _steer(when=late))) == 64
    assert _ask(cached, salts, Ask(PROMPT, _steer(when="last_prompt"))) == WHOLE_BLOCKS


def test_steering_of_the_answer_alone_shares_the_prompt_but_nobody_gets_its_answer(
    cached: EngineProcess, salts: Salts
) -> None:
    """The second turn of a conversation holds the first one's answer as part of its prompt."""
    steered = Ask(PROMPT, _steer(when="generation"), num_new=40)
    assert _ask(cached, salts, PLAIN) == 0
    assert _ask(cached, salts, steered) == WHOLE_BLOCKS
    (first,) = cached.call(steering.answer, [steered])
    turn = (*PROMPT, *first.token_ids, *range(6000, 6010))
    assert _ask(cached, salts, Ask(turn)) == WHOLE_BLOCKS
    cached.call(steering.reset_cache)
    (first,) = cached.call(steering.answer, [steered])
    assert _ask(cached, salts, Ask(turn, _steer(when="generation"))) == WHOLE_BLOCKS


def test_an_answer_steered_as_its_prompt_was_is_shared_with_the_next_turn(
    cached: EngineProcess, salts: Salts
) -> None:
    """Acting on all tokens alike, it leaves the same KV, generated or not."""
    (first,) = cached.call(steering.answer, [Ask(PROMPT, _steer(), num_new=40)])
    turn = (*PROMPT, *first.token_ids, *range(6000, 6010))
    assert _ask(cached, salts, Ask(turn, _steer())) == 128
    assert _ask(cached, salts, Ask(turn)) == 0


def test_a_vector_that_comes_along_is_the_named_one_of_equal_content(
    cached: EngineProcess, salts: Salts
) -> None:
    packed = base64.b64encode(_row(21).tobytes()).decode()
    inline = {"dtype": "f32", "points": {"pre_attn.0": packed}}
    (named,) = cached.call(steering.answer, [Ask(PROMPT, _steer())])
    assert _ask(cached, salts, Ask(PROMPT, ({"vector": inline},))) == WHOLE_BLOCKS
    (found,) = cached.call(steering.answer, [Ask(PROMPT, ({"vector": inline},))])
    assert _is_same(found, named)


def test_a_name_with_new_content_never_acts_through_old_kv(
    cached: EngineProcess, salts: Salts
) -> None:
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == 0
    (old,) = cached.call(steering.answer, [Ask(PROMPT, _steer())])
    cached.call(steering.put, [_file("v", 23)])
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == 0
    (new,) = cached.call(steering.answer, [Ask(PROMPT, _steer())])
    assert old.logprobs != new.logprobs
    cached.call(steering.put, [_file("v", 21)])
    assert _ask(cached, salts, Ask(PROMPT, _steer())) == WHOLE_BLOCKS  # the old content again


def test_a_change_of_what_steers_everybody_serves_no_stale_kv(
    cached: EngineProcess, salts: Salts
) -> None:
    assert _ask(cached, salts, PLAIN) == 0
    cached.call(steering.set_tiers, base=[{"vector": "v"}])
    assert _ask(cached, salts, PLAIN) == 0
    assert _ask(cached, salts, PLAIN) == WHOLE_BLOCKS
    cached.call(steering.set_tiers, base=[{"vector": "v", "scale": 2.0}])
    assert _ask(cached, salts, PLAIN) == 0
    cached.call(steering.set_tiers, base=[], decode=[{"vector": "w"}])
    assert _ask(cached, salts, PLAIN) == WHOLE_BLOCKS  # of the first request, which was plain
    cached.call(steering.set_tiers, decode=[])


def test_these_tests_notice_kv_that_is_given_to_the_wrong_request(
    cached: EngineProcess, salts: Salts
) -> None:
    """Without our keys in the hash the plain request gets steered blocks."""
    cached.call(steering.forget_keys)
    try:
        (steered,) = cached.call(steering.answer, [Ask(PROMPT, _steer(scale=3.0))])
        (plain,) = cached.call(steering.answer, [PLAIN])
        (truth,) = cached.call(steering.answer, [Ask(PROMPT, salt=salts.next())])
    finally:
        cached.call(steering.remember_keys)
        cached.call(steering.reset_cache)
    assert plain.num_cached == WHOLE_BLOCKS
    assert not _is_same(plain, truth)
    assert steered.num_cached == 0
