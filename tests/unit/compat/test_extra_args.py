"""What the engine core writes for the workers reads the same in every process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from clairai.compat.extra_args import (
    CAPTURE_KEY,
    MARK_KEY,
    STEERING_KEY,
    read_cache_keys,
    read_capture_plan,
    read_mark,
    read_steering_plan,
    with_plans,
)
from clairai.engine.step import RequestMark
from clairai.fields.ranges import OPEN_END
from tests.support.capture_parts import capture_plan
from tests.support.steering_plans import action, plan

MARK = RequestMark(2**64 - 1, 3)
STEERING, CAPTURE = plan(action((20, OPEN_END))), capture_plan()


def _params(**extra_args: Any) -> Any:
    written = with_plans(extra_args, MARK, "chat-1", STEERING, CAPTURE)
    return SimpleNamespace(extra_args=written)


def _in_another_process(params: Any) -> Any:
    return pickle.loads(pickle.dumps(params))  # noqa: S301


def test_this_process_reads_the_plans_without_decoding_them() -> None:
    params = _params()
    assert read_steering_plan(params) is STEERING
    assert read_capture_plan(params) is CAPTURE
    assert read_cache_keys(params) is read_cache_keys(params)


def test_another_process_decodes_the_same_from_plain_bytes() -> None:
    params = _in_another_process(_params())
    assert type(params.extra_args[STEERING_KEY]) is bytes
    assert type(params.extra_args[CAPTURE_KEY]) is bytes
    assert read_steering_plan(params) == STEERING
    assert read_capture_plan(params) == CAPTURE
    assert read_mark(params, "0_chat-1") == (MARK, "chat-1")


def test_cache_keys_are_the_same_in_every_process() -> None:
    here, there = read_cache_keys(_params()), read_cache_keys(_in_another_process(_params()))
    assert here is not None
    assert there is not None
    assert [here.key(end) for end in (16, 32)] == [there.key(end) for end in (16, 32)]


@pytest.mark.parametrize("key", [MARK_KEY, STEERING_KEY, CAPTURE_KEY])
def test_what_a_client_sends_under_our_keys_is_dropped(key: str) -> None:
    written = with_plans({key: b"forged", "other": 1}, MARK, "chat-1", None, None)
    assert written == {"other": 1, MARK_KEY: [MARK.stream, MARK.choice, "chat-1"]}


def test_a_request_without_plans_has_none() -> None:
    params = SimpleNamespace(extra_args=with_plans(None, MARK, "chat-1", None, None))
    assert read_steering_plan(params) is None
    assert read_capture_plan(params) is None
    assert read_cache_keys(params) is None
