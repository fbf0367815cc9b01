"""Of any batches, exactly the rows that were ordered are picked, and each for its own request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.capture.order import Hold, Order
from clairai.tap.picks import Pick, Picks, _Step
from clairai.tap.rows import Batch, Mark
from tests.unit.toy_captures_engine import batch, order, told_rows

SITES = {"pre_attn.0": 0, "post_block.0": 1, "pre_attn.1": 1}
NOBODY = Mark(99)


@dataclass
class Model:
    """One request, row by row."""

    stream: int
    order: Order | None
    prompt_len: int
    next: int = 0
    seen: int = 0
    got: list[int] = field(default_factory=list)

    def wants(self, at: int) -> bool:
        assert self.order is not None
        return any(first <= at < end for first, end in self.order.ranges)


ORDERS = [
    None,
    order(),
    order(ranges=[(3, 7)]),
    order(ranges=[(0, 2), (5, 6), (9, 2**31 - 1)], points=["pre_attn.0", "post_block.0"]),
    order(encoder="full8", parameters={"group": 128}, ranges=[(4, 2**31 - 1)]),
]
lives = st.lists(st.sampled_from(range(len(ORDERS))), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), lives)
def test_each_step_gives_the_ordered_rows_of_its_requests(data: Any, chosen: list[int]) -> None:
    picks, models = Picks(SITES), dict[str, Model]()
    for number, which in enumerate(chosen):
        model = models[f"r{number}"] = Model(number + 1, ORDERS[which], 5 + number)
        if model.order is not None:
            assert picks.open(f"r{number}", Mark(model.stream), model.prompt_len, model.order)
    for _ in range(5):
        names = data.draw(st.lists(st.sampled_from(sorted(models)), unique=True, min_size=1))
        counts = [data.draw(st.integers(1, 6)) for _ in names]
        if data.draw(st.booleans()):  # preempted: it begins again
            models[names[0]].next = 0
        # The same requests go on, token by token.
        for each in (counts, *[[1] * len(names)] * data.draw(st.integers(0, 6))):
            laid = [(name, models[name].next, n) for name, n in zip(names, each, strict=True)]
            expected = list(_expected(models, laid))
            found = list(_rows(picks.step(batch(*laid))))
            assert sorted(found) == sorted(expected)


def test_a_step_like_the_last_is_known_from_it_until_a_range_begins_or_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, original = list[int](), _Step.of

    def of(*given: Any) -> _Step:
        made.append(len(made))
        return original(*given)

    monkeypatch.setattr(_Step, "of", of)
    picks, wanted = Picks(SITES), list[list[int]]()
    picks.open("a", Mark(1), 2, order(ranges=[(4, 8), (12, 14)]))
    picks.open("b", Mark(2), 2, order())
    lives = np.array([0, 0], np.int32)  # the runner's own, changed in place
    for at in range(16):
        lives[:] = at
        pick = picks.step(Batch(["a", "b"], np.array([1, 1], np.int32), lives))
        assert pick is not None
        assert pick.position_N.tolist() == [at] * len(pick)
        wanted.append(pick.row_N.tolist())
    assert wanted == [[0, 1] if at in (4, 5, 6, 7, 12, 13) else [1] for at in range(16)]
    assert len(made) == 5


def _expected(models: dict[str, Model], laid: list[tuple[str, int, int]]) -> Iterator[Any]:
    row = 0
    for name, start, count in laid:
        model = models[name]
        for at in range(start, start + count):
            if model.order is not None and model.wants(at):
                is_again, phase = at < model.seen, int(at >= model.prompt_len)
                yield (model.stream, at, row, phase, int(is_again), model.order.points)
            row += 1
        model.next = start + count
        model.seen = max(model.seen, model.next)


def _rows(pick: Pick | None) -> Iterator[Any]:
    if pick is None:
        return
    rows_N = told_rows(pick)
    for kind, first, end in zip(pick.cast.kinds, pick.bounds(), pick.bounds()[1:], strict=False):
        for row, at in zip(rows_N[first:end], pick.row_N[first:end], strict=True):
            told = tuple(int(row[name]) for name in ("stream", "position", "phase", "flags"))
            yield (told[0], told[1], int(at), told[2], told[3], kind.points)


def test_a_pick_in_parts_is_the_same_rows() -> None:
    picks = Picks(SITES)
    picks.open("a", Mark(1), 4, order())
    picks.open("b", Mark(2, 3), 4, order(points=["pre_attn.0"], hold=Hold("p", 1.0)))
    pick = picks.step(batch(("a", 0, 5), ("x", 0, 2), ("b", 2, 4)))
    assert pick is not None
    parts = list(pick.cut(2))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    assert [row for part in parts for row in _rows(part)] == list(_rows(pick))
    assert [len(part.held) for part in parts] == [1, 0, 0, 0, 0]
    assert pick.held[0].seat == (2, 3)
    assert (pick.held[0].first, pick.held[0].end) == (7, 11)
    assert pick.counts() == {(1, 0): 5, (2, 3): 4}


def test_scores_are_looked_at_where_no_row_is_wanted() -> None:
    picks = Picks(SITES)
    picks.open("a", Mark(1), 4, order(ranges=[(3, 4)], hold=Hold("p", 1.0)))
    pick = picks.step(batch(("a", 7, 1)))
    assert pick is not None
    assert len(pick) == 0
    assert [len(part) for part in pick.cut(10)] == [0]


def test_steps_without_captured_requests_pick_nothing() -> None:
    picks = Picks(SITES)
    assert picks.step(batch(("a", 0, 5))) is None
    picks.open("b", Mark(1), 4, order())
    assert picks.step(batch(("a", 5, 1))) is None
    assert picks.close("b") == (1, 0)
    assert picks.close("b") is None
    assert picks.step(batch(("b", 0, 5))) is None


def test_a_place_is_used_again_by_another_request_and_nothing_of_the_first_is_left() -> None:
    picks = Picks(SITES)
    for number in range(200):
        name = f"r{number}"
        assert picks.open(name, Mark(number + 1), 3, order())
        assert not picks.open(name, NOBODY, 9, order())  # it came back after a preemption
        pick = picks.step(batch((name, 0, 4)))
        assert pick is not None
        rows = told_rows(pick)
        assert rows["stream"].tolist() == [number + 1] * 4
        assert rows["flags"].tolist() == [0] * 4
        if number % 3:
            picks.close(name)
    assert len(picks) == 67


@pytest.mark.parametrize("num_requests", [1, 65, 200])
def test_any_number_of_requests_can_be_captured_at_once(num_requests: int) -> None:
    picks = Picks(SITES)
    for number in range(num_requests):
        picks.open(str(number), Mark(number + 1), 1, order())
    pick = picks.step(batch(*((str(number), 0, 1) for number in range(num_requests))))
    assert pick is not None
    rows = told_rows(pick)
    assert rows["stream"].tolist() == [*range(1, num_requests + 1)]
