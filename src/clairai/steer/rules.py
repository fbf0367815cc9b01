"""Takes the `stop` list of a request; gives checked rules: which score ends it, or is told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from clairai.errors import RequestError
from clairai.steer import fields
from clairai.steer.spec import Entry, parse_entries, to_json

RuleAction = Literal["stop", "alert", "steer"]
RULE_ACTIONS: Final[tuple[RuleAction, ...]] = get_args(RuleAction)
MAX_RULES: Final = 16  # of a request
MAX_TOKENS: Final = 1000

_KNOWN: Final = ("probe", "threshold", "tokens", "action", "steer")


@dataclass(frozen=True)
class Rule:
    """Act when a probe's score is at or above the threshold for so many tokens in a row."""

    probe: str
    threshold: float | None = None  # None: the probe's own
    tokens: int = 1
    action: RuleAction = "stop"
    steer: tuple[Entry, ...] = ()  # what steers the rest of the request, for the action steer

    def written(self) -> dict[str, Any]:
        """As JSON; what parse_rules reads as an equal rule."""
        written: dict[str, Any] = {"probe": self.probe}
        if self.threshold is not None:
            written["threshold"] = self.threshold
        written |= {"tokens": self.tokens, "action": self.action}
        return written | ({"steer": list(map(to_json, self.steer))} if self.steer else {})


def parse_rules(given: object, *, what: str) -> tuple[Rule, ...]:
    """Decoded JSON as rules; RequestError if wrong."""
    every = fields.listed(what, given, limit=MAX_RULES)
    return tuple(_rule(one, f"{what}[{i}]") for i, one in enumerate(every))


def _rule(given: object, what: str) -> Rule:
    asked = fields.fields(what, given, _KNOWN)
    action = fields.choice(f"{what}.action", asked.get("action", "stop"), RULE_ACTIONS)
    if (action == "steer") != bool(asked.get("steer")):
        raise RequestError(
            f"{what}: the action steer and a list of entries under steer belong together; "
            "give both, or neither"
        )
    return Rule(
        probe=fields.text(f"{what}.probe", asked.get("probe")),
        threshold=fields.optional_number(f"{what}.threshold", asked.get("threshold")),
        tokens=fields.whole(f"{what}.tokens", asked.get("tokens", 1), low=1, high=MAX_TOKENS),
        action=cast(RuleAction, action),
        steer=parse_entries(asked.get("steer", []), what=f"{what}.steer"),
    )
