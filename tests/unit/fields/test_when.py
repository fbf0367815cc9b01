"""The tokens on which an entry acts, compared with slices of Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import RequestError, quote
from clairai.fields.ranges import MAX_RANGES, OPEN_END, Range
from clairai.fields.when import Phase, When, parse_when

SEEN = 40  # tokens of a request that the reference looks at


def positions(when: When, prompt_len: int, within: Range = (0, OPEN_END)) -> set[int]:
    found = when.ranges(prompt_len, within)
    for start, end in found:
        assert 0 <= start < end
    assert all(found[i][1] < found[i + 1][0] for i in range(len(found) - 1))
    return {p for start, end in found for p in range(start, min(end, SEEN))}


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("both", ((0, OPEN_END),)),
        ("prompt", ((0, 7),)),
        ("generation", ((7, OPEN_END),)),
        ("last_prompt", ((6, 7),)),
    ],
)
def test_a_phase_is_a_part_of_the_request(phase: Phase, expected: tuple[Range, ...]) -> None:
    assert parse_when(phase, what="when").ranges(7) == expected
    assert parse_when({"phase": phase}, what="when").ranges(7) == expected


EXAMPLES: list[tuple[Phase, list[list[int | None]], tuple[Range, ...]]] = [
    ("both", [[2, 5]], ((2, 5),)),
    ("both", [[2, 50]], ((2, 50),)),
    ("prompt", [[2, 50]], ((2, 10),)),
    ("prompt", [[2, None]], ((2, 10),)),
    ("both", [[2, None]], ((2, OPEN_END),)),
    ("both", [[-3, None]], ((7, OPEN_END),)),
    ("prompt", [[-3, None]], ((7, 10),)),
    ("prompt", [[-3, -1]], ((7, 9),)),
    ("prompt", [[-30, -8]], ((0, 2),)),
    ("prompt", [[-30, -20]], ()),
    ("prompt", [[8, -1]], ((8, 9),)),
    ("prompt", [[9, -1]], ()),
    ("both", [[12, None]], ((12, OPEN_END),)),
    ("prompt", [[12, None]], ()),
    ("generation", [[0, 5]], ((10, 15),)),
    ("generation", [[3, None]], ((13, OPEN_END),)),
    ("both", [[5, 7], [0, 2], [2, 3], [6, 8]], ((0, 3), (5, 8))),
]


@pytest.mark.parametrize(("phase", "given", "expected"), EXAMPLES, ids=str)
def test_positions_of_a_prompt_of_ten_tokens(
    phase: Phase, given: list[list[int | None]], expected: tuple[Range, ...]
) -> None:
    when = parse_when({"phase": phase, "positions": given}, what="when")
    assert when.ranges(10) == expected


def reference(when: When, prompt_len: int) -> set[int]:
    """Slices as Python has them; `both` counts as the prompt does, and goes on behind it."""
    every = list(range(SEEN))
    tokens = {"prompt": every[:prompt_len], "generation": every[prompt_len:]}
    found: set[int] = set()
    for start, end in when.positions or ():
        if when.phase != "both":
            found.update(tokens[when.phase][start:end])
            continue
        first, last = (
            at if at is None or at >= 0 else max(prompt_len + at, 0) for at in (start, end)
        )
        found.update(every[first:last])
    return found


@st.composite
def whens(draw: st.DrawFn) -> When:
    phases: tuple[Phase, ...] = ("both", "prompt", "generation")
    phase = draw(st.sampled_from(phases))
    low = 0 if phase == "generation" else -12
    ends = st.tuples(st.integers(low, 15), st.none() | st.integers(low, 20))
    return When(phase, tuple(draw(st.lists(ends, min_size=1, max_size=4))))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(whens(), st.integers(1, 15), st.integers(0, 20), st.integers(0, 40))
def test_ranges_equal_slices_of_python(when: When, length: int, low: int, high: int) -> None:
    assert positions(when, length) == reference(when, length)
    inside = {p for p in reference(when, length) if low <= p < high}
    assert positions(when, length, (low, high)) == inside


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ({"positions": []}, "positions is empty; leave it out"),
        ({"positions": [[0, 1]] * (MAX_RANGES + 1)}, f"give at most {MAX_RANGES}"),
        ({"positions": 3}, "must be a list"),
        ({"positions": [3]}, r"must be \[first, end\]"),
        ({"positions": [[1, 2, 3]]}, r"must be \[first, end\]"),
        ({"positions": [["0", 2]]}, "must be a whole number"),
        ({"positions": [[None, 2]]}, "must be a whole number"),
        ({"positions": [[0.0, 2]]}, "must be a whole number"),
        ({"positions": [[True, 2]]}, "must be a whole number"),
        ({"positions": [[0, 10**9000]]}, "must be a whole number"),
        ({"positions": [[0, 2**31]]}, "must be a whole number"),
        ({"positions": [[2, 2]]}, "holds no position"),
        ({"positions": [[3, 2]]}, "holds no position"),
        ({"positions": [[-2, -2]]}, "holds no position"),
        ({"positions": [[-3, 0]]}, "holds no position"),
        ({"phase": "generation", "positions": [[-1, None]]}, "whole number of 0 to"),
        ({"phase": "generation", "positions": [[0, -1]]}, "whole number of 0 to"),
        ({"phase": "last_prompt", "positions": [[0, 1]]}, "last_prompt is one token"),
    ],
    ids=quote,
)
def test_wrong_positions_are_refused(when: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        parse_when(when, what="when")
    assert len(str(caught.value)) < 300
