"""Applies the stop rules of one answer to the scores of its generated tokens.

Runs in: the engine core, after every sampled token of a request with rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clairai.fields.rules import StopRule
from clairai.match.choice_scores import ChoiceScores, ScoreColumns, ScoreRow


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
        self.end: str | None = None  # why the answer ends
        self.alarms: list[Alarm] = []  # conditions that were met, in order
        self._rules = rules
        self._thresholds = thresholds
        self._counts = [0] * len(rules)
        self._prompt_len = prompt_len
        self._scores = ChoiceScores(prompt_len)
        self._columns: ScoreColumns | None = None
        self._column_of_rule: list[int | None] = []

    def add_row(self, position: int, row: ScoreRow) -> None:
        """Hold a row from the ring until its token is checked."""
        self._scores.add_row(position, row)

    def check(self, token_ids: Sequence[int]) -> bool:
        """Apply the rules as far as rows have arrived. True if no row is outstanding.

        `token_ids` are all tokens of the request; the newest has no score yet.
        """
        scores = self._scores
        scores.add_tokens(token_ids[self._prompt_len + scores.num_tokens :])
        position = self._prompt_len + scores.num_delivered
        rows = scores.take(is_final=False) or ()
        num_lost = rows.count(None)
        for offset, row in enumerate(rows):
            if self.end is not None:
                break
            if row is not None:
                self._apply(position + offset, row)
            elif scores.num_mismatched:
                self.give_up("a row carries another token than the request")
            else:
                self.give_up(f"{num_lost} scores were lost")
        return self.end is not None or scores.is_up_to_date

    def give_up(self, cause: str) -> None:
        """End the answer: a rule that cannot be checked must not be passed over."""
        if self.end is None:
            names = ", ".join(dict.fromkeys(rule.probe for rule in self._rules))
            self.end = f"clairai: the rule on {names} could not be checked: {cause}"

    def _apply(self, position: int, row: ScoreRow) -> None:
        if row.columns is not self._columns:
            self._columns = row.columns
            column_of = {name: column for column, name in enumerate(row.columns.names)}
            self._column_of_rule = [column_of.get(rule.probe) for rule in self._rules]
        for index, column in enumerate(self._column_of_rule):
            score = None if column is None else row.values[column]
            if score is None:
                self.give_up(f"probe {self._rules[index].probe} is no longer in the bank")
            else:
                self._count(index, score, position)

    def _count(self, index: int, score: float, position: int) -> None:
        rule, threshold = self._rules[index], self._thresholds[index]
        self._counts[index] = self._counts[index] + 1 if score >= threshold else 0
        if self._counts[index] != rule.tokens:  # above it, the rule has acted already
            return
        alarm = Alarm(rule, threshold, position, score)
        self.alarms.append(alarm)
        if rule.action == "stop" and self.end is None:
            self.end = alarm.reason
