"""Steps of a batch that only decodes are all alike: they share their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.step import RequestMark, StepBatch
from clairai.wire import ring_messages


@pytest.fixture(params=["python", "c"])
def compared_by(request: pytest.FixtureRequest) -> Any:
    """What compares two steps: both must find the same."""
    return load_step_extension() if request.param == "c" else None


def test_steps_that_are_all_alike_share_their_rows_and_flag_them_as_others_do(
    compared_by: Any,
) -> None:
    """Preempted after 9 tokens, computed again 2 at a time: 4 steps of old rows, then new ones."""
    builder = RowBuilder(compared_by)
    builder.add_request("a", RequestMark(7), 3)
    counts_R = np.array([2], np.int32)
    builder.build(StepBatch(["a"], np.array([9], np.int32), np.array([0], np.int32)))
    steps = [
        builder.build(StepBatch(["a"], counts_R, np.array([at], np.int32)))
        for at in range(0, 14, 2)
    ]
    assert len({id(rows) for rows in steps}) == 1
    flags = [
        rows.fill(np.array([at, at + 1]), np.zeros(2, np.int32))["flags"]
        for at, rows in pairs(steps)
    ]
    assert np.concatenate(flags).tolist() == [ring_messages.RECOMPUTED] * 9 + [0] * 5
    builder.finish_request("a")
    (finished,) = builder.build_idle().events
    assert finished["position"] == 14


def pairs(steps: list[StepRows]) -> list[tuple[int, StepRows]]:
    return [(2 * index, rows) for index, rows in enumerate(steps)]


@pytest.mark.parametrize("other", ["counts", "starts", "requests", "one request more", "an event"])
def test_a_step_that_differs_in_anything_has_rows_of_its_own(other: str, compared_by: Any) -> None:
    builder = RowBuilder(compared_by)
    for number, req_id in enumerate("abc", 1):
        builder.add_request(req_id, RequestMark(number), 1)
    one_R, at_R = np.ones(2, np.int32), np.array([4, 9], np.int32)
    builder.build(StepBatch(["a", "b"], one_R, at_R))
    last = builder.build(StepBatch(["a", "b"], one_R, at_R + 1))
    batch = StepBatch(["a", "b"], one_R, at_R + 2)
    if other == "counts":
        batch = replace(batch, counts_R=np.array([1, 2], np.int32))
    if other == "starts":
        batch = replace(batch, starts_R=np.array([6, 13], np.int32))
    if other == "requests":
        batch = replace(batch, req_ids=["b", "a"])
    if other == "one request more":
        batch = StepBatch(["a", "b", "c"], np.ones(3, np.int32), np.array([6, 11, 0], np.int32))
    if other == "an event":
        builder.finish_request("c")
    rows = builder.build(batch)
    assert rows is not last
    seen = {"requests": [11, 6], "one request more": [6, 11, 0]}.get(other, [6, 11])
    assert rows.seen_R.tolist() == seen
    skipped = [
        int(event["span"]) for event in rows.events if event["phase"] == ring_messages.CACHED
    ]
    assert skipped == {"starts": [2], "requests": [5]}.get(other, [])


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_equal_names_and_numbers_of_another_type_are_the_same_batch(
    kind: type[np.integer[Any]], compared_by: Any
) -> None:
    """Names come over a pipe: equal, not identical. Python compares numbers of other types."""
    builder = RowBuilder(compared_by)
    builder.add_request("request-a", RequestMark(7), 3)
    steps = [
        builder.build(
            StepBatch(["-".join(("request", "a"))], np.ones(1, kind), np.array([at], kind))
        )
        for at in range(6)
    ]
    assert len({id(rows) for rows in steps}) == (1 if kind is np.int32 else 6)
    assert [rows.num_tokens for rows in steps] == [1] * 6
    builder.finish_request("request-a")
    (finished,) = builder.build_idle().events
    assert finished["position"] == 6


def test_an_array_with_gaps_is_read_as_the_numbers_it_has(compared_by: Any) -> None:
    builder = RowBuilder(compared_by)
    for number, req_id in enumerate("ab", 1):
        builder.add_request(req_id, RequestMark(number), 1)
    one_R = np.ones(2, np.int32)
    builder.build(StepBatch(["a", "b"], one_R, np.array([4, 9], np.int32)))
    builder.build(StepBatch(["a", "b"], one_R, np.array([5, 7, 10, 7], np.int32)[::2]))
    rows = builder.build(StepBatch(["a", "b"], one_R, np.array([6, 11], np.int32)))
    assert rows.num_tokens == 2
    assert not len(rows.events)
