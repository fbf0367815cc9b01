"""The `when` of a steering entry: on which tokens it acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from clairai.errors import RequestError, quote
from clairai.fields import json_fields
from clairai.fields.ranges import EVERYWHERE, MAX_RANGES, OPEN_END, Range, merge_ranges

Phase = Literal["both", "prompt", "generation", "last_prompt"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
# A pair as the request gives it: negative counts from the end of the prompt, None is open.
Ends = tuple[int, int | None]

_KEYS: Final = ("phase", "positions", "skip_special")
_LAST_POSITION: Final = OPEN_END - 1


@dataclass(frozen=True)
class When:
    """Positions as the request gives them; `ranges` makes them absolute."""

    phase: Phase = "both"
    positions: tuple[Ends, ...] | None = None  # None: all of the phase
    skip_special: bool = False

    def ranges(self, prompt_len: int, within: Range = EVERYWHERE) -> tuple[Range, ...]:
        """The absolute positions that lie in the phase and in `within`, merged."""
        low, high = phase_bounds(self.phase, prompt_len)
        low, high = max(low, within[0]), min(high, within[1])
        if self.positions is None:
            return merge_ranges([(low, high)])
        # Positions of the generation count from its first token, all others from the prompt's.
        origin = prompt_len if self.phase == "generation" else 0
        clipped: list[Range] = []
        for first, last in self.positions:
            start = _absolute_position(first, origin, prompt_len)
            end = OPEN_END if last is None else _absolute_position(last, origin, prompt_len)
            clipped.append((max(start, low), min(end, high)))
        return merge_ranges(clipped)

    def to_json(self) -> str | dict[str, Any]:
        """The shortest form that `parse_when` reads as equal."""
        if self.positions is None and not self.skip_special:
            return self.phase
        fields: dict[str, Any] = {"phase": self.phase}
        if self.positions is not None:
            fields["positions"] = [list(ends) for ends in self.positions]
        if self.skip_special:
            fields["skip_special"] = True
        return fields


def phase_bounds(phase: Phase, prompt_len: int) -> Range:
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


def _absolute_position(position: int, origin: int, prompt_len: int) -> int:
    return origin + position if position >= 0 else prompt_len + position
