"""The `stop` list of a request: rules that end, report or steer an answer by a probe's score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from clairai.errors import RequestError
from clairai.fields import json_fields
from clairai.fields.steer import SteerEntry, parse_entries

RuleAction = Literal["stop", "alert", "steer"]
RULE_ACTIONS: Final[tuple[RuleAction, ...]] = get_args(RuleAction)
MAX_RULES: Final = 16  # of a request
MAX_TOKENS: Final = 1000

_KEYS: Final = ("probe", "threshold", "tokens", "action", "steer")


@dataclass(frozen=True)
class StopRule:
    """Act once a probe scores at or above the threshold for `tokens` tokens in a row."""

    probe: str
    threshold: float | None = None  # None: the probe's own
    tokens: int = 1
    action: RuleAction = "stop"
    steer: tuple[SteerEntry, ...] = ()  # steers the rest of the answer, for the action steer

    def to_json(self) -> dict[str, Any]:
        """What `parse_rules` reads as an equal rule."""
        fields: dict[str, Any] = {"probe": self.probe}
        if self.threshold is not None:
            fields["threshold"] = self.threshold
        fields |= {"tokens": self.tokens, "action": self.action}
        return fields | ({"steer": [one.to_json() for one in self.steer]} if self.steer else {})


def parse_rules(given: object, *, what: str) -> tuple[StopRule, ...]:
    """Read decoded JSON; RequestError if it is wrong."""
    rules = json_fields.read_list(what, given, limit=MAX_RULES)
    return tuple(_parse_rule(one, f"{what}[{i}]") for i, one in enumerate(rules))


def _parse_rule(given: object, what: str) -> StopRule:
    asked = json_fields.read_object(what, given, _KEYS)
    action = json_fields.read_choice(f"{what}.action", asked.get("action", "stop"), RULE_ACTIONS)
    if (action == "steer") != bool(asked.get("steer")):
        raise RequestError(
            f"{what}: the action steer and a list of entries under steer belong together; "
            "give both, or neither"
        )
    threshold = json_fields.read_optional_number(f"{what}.threshold", asked.get("threshold"))
    tokens = asked.get("tokens", 1)
    return StopRule(
        probe=json_fields.read_string(f"{what}.probe", asked.get("probe")),
        threshold=threshold,
        tokens=json_fields.read_integer(f"{what}.tokens", tokens, low=1, high=MAX_TOKENS),
        action=cast(RuleAction, action),
        steer=parse_entries(asked.get("steer", []), what=f"{what}.steer"),
    )
