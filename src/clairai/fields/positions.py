"""The `positions` of a capture, and the absolute positions they mean for a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from clairai.errors import RequestError, quote
from clairai.fields import json_fields
from clairai.fields.ranges import MAX_RANGES, OPEN_END, Range, merge_ranges

PositionSelector = Literal["all", "prompt", "generated", "last_prompt"]
SELECTORS: Final[tuple[PositionSelector, ...]] = get_args(PositionSelector)
MAX_MESSAGES: Final = 100_000
_MAX_POSITION: Final = OPEN_END - 1


@dataclass(frozen=True)
class PositionSpan:
    """From `first` up to `end`, exclusive. Negative: counted from the prompt's end; None: open."""

    first: int = 0
    end: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"from": self.first} | ({} if self.end is None else {"to": self.end})


@dataclass(frozen=True)
class MessagePosition:
    """All tokens of one chat message. Becomes a PositionSpan where the chat template is known."""

    index: int

    def to_json(self) -> dict[str, Any]:
        return {"message": self.index}


PositionPart = PositionSelector | PositionSpan | MessagePosition
Positions = tuple[PositionPart, ...]  # the union of all parts
ALL_POSITIONS: Final[Positions] = ("all",)


def parse_positions(given: object, *, what: str) -> Positions:
    """One part, or a list of parts; RequestError if one is wrong."""
    if not isinstance(given, list | tuple):
        return (_parse_part(given, what),)
    parts = json_fields.read_list(what, given, limit=MAX_RANGES)
    if not parts:
        raise RequestError(f"{what} is empty; leave it out for all positions")
    return tuple(_parse_part(part, f"{what}[{i}]") for i, part in enumerate(parts))


def positions_to_json(positions: Positions) -> object:
    """The JSON from which `parse_positions` makes equal positions."""
    found = [part if isinstance(part, str) else part.to_json() for part in positions]
    return found[0] if len(found) == 1 else found


def absolute_ranges(positions: Positions, prompt_len: int) -> tuple[Range, ...]:
    """Sorted, disjoint and not empty."""
    return merge_ranges(_absolute(part, prompt_len) for part in positions)


def _parse_part(given: object, what: str) -> PositionPart:
    if isinstance(given, str):
        return cast(PositionSelector, json_fields.read_choice(what, given, SELECTORS))
    if isinstance(given, Mapping) and "message" in given:
        fields = json_fields.read_object(what, given, ("message",))
        name = f"{what}.message"
        index = json_fields.read_integer(name, fields["message"], low=0, high=MAX_MESSAGES)
        return MessagePosition(index)
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{what} must be one of {', '.join(SELECTORS)}, an object with from and to, or one "
            f"with message, got {quote(given)}"
        )
    return _parse_span(given, what)


def _parse_span(given: Mapping[str, Any], what: str) -> PositionSpan:
    fields = json_fields.read_object(what, given, ("from", "to"))
    first = _read_position(f"{what}.from", fields.get("from", 0))
    if fields.get("to") is None:
        return PositionSpan(first)
    end = _read_position(f"{what}.to", fields["to"])
    is_comparable = (first < 0) == (end < 0)
    if end == 0 or (is_comparable and end <= first):
        raise RequestError(
            f"{what} is from {first} to {end} and holds no position; `to` is one past the last, "
            "leave it out for as far as the request goes"
        )
    return PositionSpan(first, end)


def _read_position(what: str, given: object) -> int:
    return json_fields.read_integer(what, given, low=-_MAX_POSITION, high=_MAX_POSITION)


def _absolute(part: PositionPart, prompt_len: int) -> Range:
    if isinstance(part, MessagePosition):
        raise RequestError(
            f"message {part.index}: where a message lies is known from the chat's template alone; "
            "send the chat to the server's chat route, or give clairai.message_range(...)"
        )
    if isinstance(part, PositionSpan):
        end = OPEN_END if part.end is None else _from_prompt_end(part.end, prompt_len)
        return max(_from_prompt_end(part.first, prompt_len), 0), end
    if part == "prompt":
        return 0, prompt_len
    if part == "generated":
        return prompt_len, OPEN_END
    if part == "last_prompt":
        return max(prompt_len - 1, 0), prompt_len
    return 0, OPEN_END


def _from_prompt_end(position: int, prompt_len: int) -> int:
    return position if position >= 0 else prompt_len + position
