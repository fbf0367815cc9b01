"""vLLM's extra keys of a block: its own, and ours where the block was steered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clairai.compat.engine_core import wrap_extra_keys
from clairai.compat.extra_args import STEERING_KEY, EncodedSteeringPlan
from clairai.engine.steer.cache_keys import block_key
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.fields.ranges import OPEN_END
from tests.support.steering_plans import action, plan


def own_keys(request: Any, start: int, end: int, mm_index: int) -> tuple[Any, int]:
    """What vLLM would give: keys of its own for the request's first block."""
    return (request.own if start == 0 else None), mm_index + end


def keys_of(sealed: object, start: int, end: int, own: Any = None) -> tuple[Any, int]:
    params = SimpleNamespace(extra_args=None if sealed is None else {STEERING_KEY: sealed})
    found: tuple[Any, int] = wrap_extra_keys(own_keys)(
        SimpleNamespace(sampling_params=params, own=own), start, end, 3
    )
    return found


STEERED = plan(action((20, OPEN_END)))


@pytest.mark.parametrize("own", [None, ("lora",)])
def test_a_request_that_is_not_steered_has_the_keys_it_always_had(own: Any) -> None:
    assert keys_of(None, 0, 16, own) == (own, 19)
    assert keys_of(EncodedSteeringPlan.encode(STEERED), 0, 16, own) == (own, 19)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_steered_block_has_the_key_of_its_course(is_elsewhere: bool) -> None:
    """Sealed in this process, or as plain bytes from another."""
    sealed: bytes = EncodedSteeringPlan.encode(STEERED)
    sealed = bytes(sealed) if is_elsewhere else sealed
    ((tag, key),), index = keys_of(sealed, 16, 32)
    assert (tag, key) == ("clairai", block_key(STEERED, 16, 32))
    assert index == 35


def test_our_key_comes_behind_vllms_own() -> None:
    early: SteeringPlan = plan(action((0, 4)))
    keys, _ = keys_of(EncodedSteeringPlan.encode(early), 0, 16, ("lora", "salt"))
    assert keys == ("lora", "salt", ("clairai", block_key(early, 0, 16)))
