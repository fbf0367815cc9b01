"""Steps of a batch that only decodes are all alike: they share what the host says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clairai import wire
from clairai.tap.rows import Batch, Mark, RowBook, StepRows


def test_steps_that_are_all_alike_share_what_they_say_and_flag_rows_as_others_do() -> None:
    """Preempted after 9 tokens, computed again 2 at a time: 4 steps of old rows, then new ones."""
    book = RowBook()
    book.open("a", Mark(7), 3)
    counts_R = np.array([2], np.int32)
    book.step(Batch(["a"], np.array([9], np.int32), np.array([0], np.int32)))
    steps = [book.step(Batch(["a"], counts_R, np.array([at], np.int32))) for at in range(0, 14, 2)]
    assert len({id(rows) for rows in steps}) == 1
    flags = [
        rows.fill(np.array([at, at + 1]), np.zeros(2, np.int32))["flags"]
        for at, rows in pairs(steps)
    ]
    assert np.concatenate(flags).tolist() == [wire.RECOMPUTED] * 9 + [0] * 5
    book.close("a")
    (finished,) = book.idle().events
    assert finished["position"] == 14


def pairs(steps: list[StepRows]) -> list[tuple[int, StepRows]]:
    return [(2 * index, rows) for index, rows in enumerate(steps)]


@pytest.mark.parametrize("other", ["counts", "starts", "requests", "an event"])
def test_a_step_that_differs_in_anything_has_rows_of_its_own(other: str) -> None:
    book = RowBook()
    for number, req_id in enumerate("abc", 1):
        book.open(req_id, Mark(number), 1)
    one_R, at_R = np.ones(2, np.int32), np.array([4, 9], np.int32)
    book.step(Batch(["a", "b"], one_R, at_R))
    last = book.step(Batch(["a", "b"], one_R, at_R + 1))
    batch = Batch(["a", "b"], one_R, at_R + 2)
    if other == "counts":
        batch = replace(batch, counts_R=np.array([1, 2], np.int32))
    if other == "starts":
        batch = replace(batch, starts_R=np.array([6, 13], np.int32))
    if other == "requests":
        batch = replace(batch, req_ids=["b", "a"])
    if other == "an event":
        book.close("c")
    rows = book.step(batch)
    assert rows is not last
    assert rows.seen_R.tolist() == ([11, 6] if other == "requests" else [6, 11])
    skipped = [int(event["span"]) for event in rows.events if event["phase"] == wire.CACHED]
    assert skipped == {"starts": [2], "requests": [5]}.get(other, [])
