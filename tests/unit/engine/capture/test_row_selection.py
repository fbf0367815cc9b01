"""Of any batch, exactly the planned rows are selected, each for its own request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.capture.capture_plan import CapturePlan, KeepThreshold
from clairai.engine.capture.row_selection import RowSelection, RowSelector, _SelectedStep
from clairai.engine.step import RequestMark, StepBatch
from clairai.wire.ring_messages import AUDIO, IMAGE, MEDIA_SHIFT
from tests.support.capture_parts import batch, capture_plan, rows_as_read

SITES = {"pre_attn.0": 0, "post_block.0": 1, "pre_attn.1": 1}
NOBODY = RequestMark(99)


@dataclass
class Model:
    """One request, row by row."""

    stream: int
    plan: CapturePlan | None
    prompt_len: int
    next: int = 0
    seen: int = 0
    got: list[int] = field(default_factory=list)
    media: tuple[int, ...] = ()  # by position; all others are text

    def wants(self, at: int) -> bool:
        assert self.plan is not None
        return any(first <= at < end for first, end in self.plan.ranges)


PLANS = [
    None,
    capture_plan(),
    capture_plan(ranges=[(3, 7)]),
    capture_plan(ranges=[(0, 2), (5, 6), (9, 2**31 - 1)], points=["pre_attn.0", "post_block.0"]),
    capture_plan(encoder="full8", parameters={"group": 128}, ranges=[(4, 2**31 - 1)]),
]
# Of every other request; images end inside and behind the ranges of plans.
MEDIA = (0, IMAGE, IMAGE, 0, AUDIO, AUDIO, 0, 0, 0, IMAGE, IMAGE)
lives = st.lists(st.sampled_from(range(len(PLANS))), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), lives)
def test_each_step_selects_the_planned_rows_of_its_requests(data: Any, chosen: list[int]) -> None:
    selector, models = RowSelector(SITES), dict[str, Model]()
    for number, which in enumerate(chosen):
        media = MEDIA if number % 2 else ()
        model = models[f"r{number}"] = Model(number + 1, PLANS[which], 5 + number, media=media)
        if model.plan is not None:
            given = (f"r{number}", RequestMark(model.stream), model.prompt_len, model.plan)
            assert selector.open(*given, np.array(media, np.uint8) if media else None)
    for _ in range(5):
        names = data.draw(st.lists(st.sampled_from(sorted(models)), unique=True, min_size=1))
        counts = [data.draw(st.integers(1, 6)) for _ in names]
        if data.draw(st.booleans()):  # preempted: it starts again
            models[names[0]].next = 0
        # The same requests continue, token by token.
        for each in (counts, *[[1] * len(names)] * data.draw(st.integers(0, 6))):
            laid = [(name, models[name].next, n) for name, n in zip(names, each, strict=True)]
            expected = list(_expected(models, laid))
            found = list(_rows(selector.step(batch(*laid))))
            assert sorted(found) == sorted(expected)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), lives)
def test_rejected_drafts_are_not_selected_and_count_as_not_forwarded(
    data: Any, chosen: list[int]
) -> None:
    selector, models = RowSelector(SITES), dict[str, Model]()
    for number, which in enumerate(chosen):
        model = models[f"r{number}"] = Model(number + 1, PLANS[which], 2 + number)
        if model.plan is not None:
            selector.open(f"r{number}", RequestMark(model.stream), model.prompt_len, model.plan)
    for _ in range(8):
        names = data.draw(st.lists(st.sampled_from(sorted(models)), unique=True, min_size=1))
        laid = [(name, models[name].next, data.draw(st.integers(1, 4))) for name in names]
        rejected = [data.draw(st.integers(0, count - 1)) for _, _, count in laid]
        step = batch(*laid)
        selection = selector.step(step)
        selector.reject(np.array(rejected, np.int32))
        if selection is not None:
            selection = selection.leave_out(step, np.array(rejected, np.int32))
        places = _places(laid)
        expected = [
            (*row[:2], places[row[0], row[1]], *row[3:])
            for row in _expected(models, _without(laid, rejected))
        ]
        assert sorted(_rows(selection)) == sorted(expected)


def _without(laid: list[tuple[str, int, int]], rejected: list[int]) -> list[tuple[str, int, int]]:
    pairs = zip(laid, rejected, strict=True)
    return [(name, start, count - drafts) for (name, start, count), drafts in pairs]


def _places(laid: list[tuple[str, int, int]]) -> dict[tuple[int, int], int]:
    """The row of each stream and position in a step."""
    rows = [(name, start + at) for name, start, count in laid for at in range(count)]
    return {(int(name[1:]) + 1, at): row for row, (name, at) in enumerate(rows)}


def test_only_the_scores_of_accepted_drafts_decide_about_held_rows() -> None:
    selector = RowSelector(SITES)
    hold = KeepThreshold("p", 0.5)
    selector.open("a", RequestMark(1), 1, capture_plan(hold=hold))
    step = batch(("b", 0, 2), ("a", 0, 4))
    selection = selector.step(step)
    assert selection is not None
    assert (selection.held[0].first, selection.held[0].end) == (2, 6)
    (held,) = selection.leave_out(step, np.array([0, 3], np.int32)).held
    assert (held.first, held.end) == (2, 3)


def test_a_decode_step_reuses_the_last_selection_until_a_range_begins_or_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, original = list[int](), _SelectedStep.of

    def of(*given: Any) -> _SelectedStep:
        made.append(len(made))
        return original(*given)

    monkeypatch.setattr(_SelectedStep, "of", of)
    selector, wanted = RowSelector(SITES), list[list[int]]()
    selector.open("a", RequestMark(1), 2, capture_plan(ranges=[(4, 8), (12, 14)]))
    selector.open("b", RequestMark(2), 2, capture_plan())
    lives = np.array([0, 0], np.int32)  # the runner changes it in place
    for at in range(16):
        lives[:] = at
        selection = selector.step(StepBatch(["a", "b"], np.array([1, 1], np.int32), lives))
        assert selection is not None
        assert selection.position_N.tolist() == [at] * len(selection)
        wanted.append(selection.row_N.tolist())
    assert wanted == [[0, 1] if at in (4, 5, 6, 7, 12, 13) else [1] for at in range(16)]
    assert len(made) == 5


def _expected(models: dict[str, Model], laid: list[tuple[str, int, int]]) -> Iterator[Any]:
    row = 0
    for name, start, count in laid:
        model = models[name]
        for at in range(start, start + count):
            if model.plan is not None and model.wants(at):
                is_again, phase = at < model.seen, int(at >= model.prompt_len)
                media = model.media[at] if at < len(model.media) else 0
                flags = int(is_again) | media << MEDIA_SHIFT
                yield (model.stream, at, row, phase, flags, model.plan.points)
            row += 1
        model.next = start + count
        model.seen = max(model.seen, model.next)


def _rows(selection: RowSelection | None) -> Iterator[Any]:
    if selection is None:
        return
    rows_N = rows_as_read(selection)
    for format, first, end in zip(
        selection.batch.formats, selection.bounds(), selection.bounds()[1:], strict=False
    ):
        for row, at in zip(rows_N[first:end], selection.row_N[first:end], strict=True):
            told = tuple(int(row[name]) for name in ("stream", "position", "phase", "flags"))
            yield (told[0], told[1], int(at), told[2], told[3], format.points)


def test_a_split_selection_has_the_same_rows() -> None:
    selector = RowSelector(SITES)
    selector.open("a", RequestMark(1), 4, capture_plan())
    selector.open(
        "b", RequestMark(2, 3), 4, capture_plan(points=["pre_attn.0"], hold=KeepThreshold("p", 1.0))
    )
    selection = selector.step(batch(("a", 0, 5), ("x", 0, 2), ("b", 2, 4)))
    assert selection is not None
    parts = list(selection.split(2))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    assert [row for part in parts for row in _rows(part)] == list(_rows(selection))
    assert [len(part.held) for part in parts] == [1, 0, 0, 0, 0]
    assert (selection.held[0].stream, selection.held[0].choice) == (2, 3)
    assert (selection.held[0].first, selection.held[0].end) == (7, 11)
    assert selection.counts() == {(1, 0): 5, (2, 3): 4}


def test_parts_of_a_split_selection_keep_what_their_rows_stand_for() -> None:
    selector = RowSelector(SITES)
    media = np.array([0, IMAGE, IMAGE, 0, AUDIO], np.uint8)
    selector.open("a", RequestMark(1), 6, capture_plan(), media)
    selection = selector.step(batch(("a", 0, 6)))
    assert selection is not None
    parts = [rows_as_read(part)["flags"].tolist() for part in selection.split(2)]
    assert parts == [[0, IMAGE << 1], [IMAGE << 1, 0], [AUDIO << 1, 0]]


def test_tokens_of_a_rule_are_selected_where_no_row_is() -> None:
    selector = RowSelector(SITES)
    selector.open(
        "a", RequestMark(1), 4, capture_plan(ranges=[(3, 4)], hold=KeepThreshold("p", 1.0))
    )
    selection = selector.step(batch(("a", 7, 1)))
    assert selection is not None
    assert len(selection) == 0
    assert [len(part) for part in selection.split(10)] == [0]


def test_steps_without_captured_requests_select_nothing() -> None:
    selector = RowSelector(SITES)
    assert selector.step(batch(("a", 0, 5))) is None
    selector.open("b", RequestMark(1), 4, capture_plan())
    assert selector.step(batch(("a", 5, 1))) is None
    assert selector.close("b") == (1, 0)
    assert selector.close("b") is None
    assert selector.step(batch(("b", 0, 5))) is None


def test_a_slot_is_reused_without_anything_of_the_request_before() -> None:
    selector = RowSelector(SITES)
    for number in range(200):
        name = f"r{number}"
        assert selector.open(name, RequestMark(number + 1), 3, capture_plan())
        assert not selector.open(name, NOBODY, 9, capture_plan())  # it came back after a preemption
        selection = selector.step(batch((name, 0, 4)))
        assert selection is not None
        rows = rows_as_read(selection)
        assert rows["stream"].tolist() == [number + 1] * 4
        assert rows["flags"].tolist() == [0] * 4
        if number % 3:
            selector.close(name)
    assert len(selector) == 67


@pytest.mark.parametrize("num_requests", [1, 65, 200])
def test_any_number_of_requests_can_be_captured_at_once(num_requests: int) -> None:
    selector = RowSelector(SITES)
    for number in range(num_requests):
        selector.open(str(number), RequestMark(number + 1), 1, capture_plan())
    selection = selector.step(batch(*((str(number), 0, 1) for number in range(num_requests))))
    assert selection is not None
    rows = rows_as_read(selection)
    assert rows["stream"].tolist() == [*range(1, num_requests + 1)]
