"""Takes two courses and a position; gives the first before it, and the second from it on.

A request that runs is steered otherwise from a position that has not been computed yet. What came
before keeps its ranges: a request that is preempted goes over it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from clairai.errors import RequestError
from clairai.steer.course import MAX_ACTIONS, MAX_GATES, OPEN_END, Action, Course, Gate, Range
from clairai.steer.segments import MAX_SEGMENTS, segments
from clairai.steer.spec import Entry


def amended(old: Course | None, new: Course | None, position: int) -> Course | None:
    """None if nothing acts, before or after; RequestError if there is no room for both."""
    actions: list[Action] = []
    gates: list[Gate] = []
    for course, window in ((old, (0, position)), (new, (position, OPEN_END))):
        for action in _within(course, window):
            gate = None
            if course is not None and action.gate is not None:
                gate = len(gates)
                gates.append(course.gates[action.gate])
            actions.append(msgspec.structs.replace(action, gate=gate))
    if not actions:
        return None
    made = Course(tuple(actions), tuple(gates))
    _check_room(made)
    return made


def check_acts(entries: Iterable[Entry], prompt_len: int, position: int) -> None:
    """RequestError for an entry that acts on nothing from this position on."""
    for entry in entries:
        if not entry.when.ranges(prompt_len, within=(position, OPEN_END)):
            raise RequestError(
                f"{entry.label}: its positions lie before {position}, where the change begins, so "
                "it would not act; steer generation, or leave the entry out"
            )


def _within(course: Course | None, window: Range) -> Iterator[Action]:
    for action in () if course is None else course.actions:
        clipped = ((max(a, window[0]), min(b, window[1])) for a, b in action.ranges)
        ranges = tuple((a, b) for a, b in clipped if a < b)
        if ranges:
            yield msgspec.structs.replace(action, ranges=ranges)


def _check_room(course: Course) -> None:
    counts = {
        "actions": (len(course.actions), MAX_ACTIONS),
        "gates": (len(course.gates), MAX_GATES),
        "stretches": (len(segments(course)), MAX_SEGMENTS),
    }
    for what, (count, most) in counts.items():
        if count > most:
            raise RequestError(
                f"this request has been steered otherwise before: it would have {count} {what} "
                f"in all, at most {most}; start a new request"
            )
