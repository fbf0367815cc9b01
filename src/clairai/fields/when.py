"""Takes a request's `when`; gives the positions it means, absolute once the prompt is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from clairai.engine.steer.steering_plan import MAX_RANGES, OPEN_END, Range
from clairai.errors import RequestError
from clairai.fields import json_fields
from clairai.points import quote

Phase = Literal["both", "prompt", "generation", "last_prompt"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
Ends = tuple[int, int | None]  # as written: negative is from the prompt's end, None is open
EVERYWHERE: Final[Range] = (0, OPEN_END)

_KEYS: Final = ("phase", "positions", "skip_special")
_LAST_POSITION: Final = OPEN_END - 1


@dataclass(frozen=True)
class When:
    """On which tokens an entry acts."""

    phase: Phase = "both"
    positions: tuple[Ends, ...] | None = None  # None: all of the phase
    skip_special: bool = False

    def ranges(self, prompt_len: int, within: Range = EVERYWHERE) -> tuple[Range, ...]:
        """Absolute, sorted, apart from each other, none empty; only of the phase and `within`."""
        low, high = phase_bounds(self.phase, prompt_len)
        low, high = max(low, within[0]), min(high, within[1])
        if self.positions is None:
            return merge_ranges([(low, high)])
        count = prompt_len if self.phase == "generation" else 0
        found: list[Range] = []
        for first, last in self.positions:
            start = _absolute_position(first, count, prompt_len)
            end = OPEN_END if last is None else _absolute_position(last, count, prompt_len)
            found.append((max(start, low), min(end, high)))
        return merge_ranges(found)

    def written(self) -> str | dict[str, Any]:
        """As JSON, in the shortest form that means the same."""
        if self.positions is None and not self.skip_special:
            return self.phase
        written: dict[str, Any] = {"phase": self.phase}
        if self.positions is not None:
            written["positions"] = [list(ends) for ends in self.positions]
        if self.skip_special:
            written["skip_special"] = True
        return written


def phase_bounds(phase: Phase, prompt_len: int) -> Range:
    """Position p is the row of the (p + 1)th token; the prompt's rows come first."""
    if phase == "prompt":
        return 0, prompt_len
    if phase == "generation":
        return prompt_len, OPEN_END
    if phase == "last_prompt":
        return prompt_len - 1, prompt_len
    return EVERYWHERE


def parse_when(given: object, *, what: str) -> When:
    if isinstance(given, str):
        return When(cast(Phase, json_fields.read_choice(what, given, PHASES)))
    asked = json_fields.read_object(what, given, _KEYS)
    phase = cast(
        Phase, json_fields.read_choice(f"{what}.phase", asked.get("phase", "both"), PHASES)
    )
    positions = asked.get("positions")
    if positions is not None and phase == "last_prompt":
        raise RequestError(
            f"{what}: last_prompt is one token; leave positions out, or use phase prompt"
        )
    return When(
        phase,
        None if positions is None else _parse_positions(f"{what}.positions", positions, phase),
        json_fields.read_boolean(f"{what}.skip_special", asked.get("skip_special", False)),
    )


def _parse_positions(what: str, given: object, phase: Phase) -> tuple[Ends, ...]:
    pairs = json_fields.read_list(what, given, limit=MAX_RANGES)
    if not pairs:
        raise RequestError(f"{what} is empty; leave it out to act on all of the phase")
    return tuple(_parse_ends(f"{what}[{i}]", pair, phase) for i, pair in enumerate(pairs))


def _parse_ends(what: str, given: object, phase: Phase) -> Ends:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise RequestError(f"{what} must be [first, end], got {quote(given)}")
    lowest = 0 if phase == "generation" else -_LAST_POSITION
    start = json_fields.read_integer(f"{what}[0]", given[0], low=lowest, high=_LAST_POSITION)
    if given[1] is None:
        return start, None
    end = json_fields.read_integer(f"{what}[1]", given[1], low=lowest, high=_LAST_POSITION)
    is_comparable = (start < 0) == (end < 0)
    if end == 0 or (is_comparable and end <= start):
        raise RequestError(
            f"{what} is [{start}, {end}] and holds no position; the end is one past the last, "
            "null for as far as the phase goes"
        )
    return start, end


def _absolute_position(at: int, count: int, prompt_len: int) -> int:
    return count + at if at >= 0 else prompt_len + at


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, apart from each other, none empty."""
    found: list[Range] = []
    for start, end in sorted(one for one in ranges if one[0] < one[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)
