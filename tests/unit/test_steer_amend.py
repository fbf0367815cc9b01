"""One course before a position and another from it on: each position is treated by exactly one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.errors import RequestError
from clairai.steer.amend import amended, check_acts
from clairai.steer.course import MAX_GATES, OPEN_END, Action, Course, Gate, Row
from clairai.steer.segments import content
from clairai.steer.spec import parse_entries

END = 20
ranges = st.lists(st.integers(0, END), min_size=2, max_size=4, unique=True).map(
    lambda cuts: tuple(
        (a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False) if a < b
    )
)


def _row(seed: int) -> Row:
    values = np.full(3, seed, "<f4").tobytes()
    return Row("post_block.1", f"digest {seed}", values)


def _gate(seed: int) -> Gate:
    return Gate("p", _row(seed), 0.0, "none", float(seed), latch=True)


@st.composite
def courses(draw: st.DrawFn) -> Course | None:
    spans = draw(st.lists(ranges, max_size=3))
    seeds = draw(st.lists(st.integers(1, 9), min_size=len(spans), max_size=len(spans)))
    gated = [index for index, seed in enumerate(seeds) if seed % 2]
    actions = tuple(
        Action(
            *("v", "d", "add", (_row(seed),), float(seed), span),
            gate=gated.index(index) if index in gated else None,
        )
        for index, (span, seed) in enumerate(zip(spans, seeds, strict=True))
        if span
    )
    gates = tuple(_gate(seeds[index]) for index in gated)
    return Course(actions, gates) if actions else None


def _treatment(course: Course | None, position: int) -> list[object]:
    """What acts on one position, told slowly."""
    if course is None:
        return []
    return [
        content(course, action)
        for action in course.actions
        if any(start <= position < end for start, end in action.ranges)
    ]


@given(courses(), courses(), st.integers(0, END))
def test_every_position_is_treated_by_the_course_it_belongs_to(
    old: Course | None, new: Course | None, position: int
) -> None:
    made = amended(old, new, position)
    for at in range(END + 1):
        assert _treatment(made, at) == _treatment(old if at < position else new, at)
    if made is not None:
        used = [action.gate for action in made.actions if action.gate is not None]
        assert used == [*range(len(made.gates))]  # each gate is one action's own


def test_a_request_that_was_changed_too_often_is_refused() -> None:
    def change(course: Course | None, position: int) -> Course | None:
        action = Action("v", "d", "add", (_row(1),), 1.0, ((0, OPEN_END),), gate=0)
        return amended(course, Course((action,), (_gate(position),)), position)

    course = None
    for position in range(MAX_GATES):
        course = change(course, position)
    with pytest.raises(RequestError, match="gates"):
        change(course, MAX_GATES)


def test_an_entry_that_would_never_act_is_refused() -> None:
    entries = parse_entries([{"vector": "v", "when": "prompt"}], what="steer")
    with pytest.raises(RequestError, match=r"steer\[0\]"):
        check_acts(entries, prompt_len=5, position=5)
    check_acts(entries, prompt_len=5, position=4)
