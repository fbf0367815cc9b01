"""Takes one request's rules and the scores of its generated tokens; gives what ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clairai.fields.rules import StopRule


@dataclass(frozen=True)
class Alarm:
    """A rule's condition was met with the token at this position."""

    rule: StopRule
    threshold: float
    position: int
    score: float

    @property
    def reason(self) -> str:
        """What the answer says about its end."""
        tokens = "1 token" if self.rule.tokens == 1 else f"{self.rule.tokens} tokens"
        return f"clairai: probe {self.rule.probe} >= {self.threshold:g} for {tokens}"


class RuleWatcher:
    """The rules of one answer; `thresholds` has one for each."""

    def __init__(
        self, rules: tuple[StopRule, ...], thresholds: tuple[float, ...], prompt_len: int
    ) -> None:
        self.next_position = prompt_len  # the first whose scores have not been seen
        self.end: str | None = None  # why the answer ends
        self.alarms: list[Alarm] = []  # all that went off, in order
        self._rules = rules
        self._thresholds = thresholds
        self._counts = [0] * len(rules)

    def see(self, position: int, scores: Mapping[str, float]) -> None:
        """The scores of one token; positions come in order, some twice after a preemption."""
        if position < self.next_position or self.end is not None:
            return
        if position > self.next_position:
            self.give_up(f"{position - self.next_position} scores were lost")
        self.next_position = position + 1
        for index, rule in enumerate(self._rules):
            if rule.probe in scores:
                self._count(index, scores[rule.probe], position)
            else:
                self.give_up(f"probe {rule.probe} is no longer in the bank")

    def give_up(self, cause: str) -> None:
        """A rule that cannot be checked ends the answer: it was asked not to go on unwatched."""
        if self.end is None:
            names = ", ".join(dict.fromkeys(rule.probe for rule in self._rules))
            self.end = f"clairai: the rule on {names} could not be checked: {cause}"

    def _count(self, index: int, score: float, position: int) -> None:
        rule, threshold = self._rules[index], self._thresholds[index]
        self._counts[index] = self._counts[index] + 1 if score >= threshold else 0
        if self._counts[index] != rule.tokens:  # above it, it has gone off already
            return
        alarm = Alarm(rule, threshold, position, score)
        self.alarms.append(alarm)
        if rule.action == "stop" and self.end is None:
            self.end = alarm.reason
