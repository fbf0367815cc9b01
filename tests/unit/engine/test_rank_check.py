"""Ranks whose residual streams differ are found out, in the same step on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clairai.engine.rank_check import EARLY_STEPS, STEPS_BETWEEN, RankCheck
from clairai.errors import RanksDisagreeError

WIDTH = 32
Change = Callable[[int, torch.Tensor], torch.Tensor]


class Wire:
    """What every rank has sent, exchange by exchange."""

    def __init__(self, num_ranks: int) -> None:
        self._sent: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]

    def send_from(self, rank: int) -> Callable[[torch.Tensor], Gathered]:
        def send(numbers: torch.Tensor) -> Gathered:
            self._sent[rank].append(numbers.clone())
            return Gathered(self._sent, len(self._sent[rank]) - 1)

        return send


class Gathered:
    def __init__(self, sent: list[list[torch.Tensor]], index: int) -> None:
        self._sent, self._index = sent, index

    def wait(self) -> list[torch.Tensor]:
        return [of_rank[self._index] for of_rank in self._sent]


def _run(num_steps: int, change: Change, *, num_ranks: int = 3) -> list[tuple[int, str]]:
    """For each rank that raised: in which step, and what it said. `change` acts on rank 1."""
    wire = Wire(num_ranks)
    checks = [RankCheck(wire.send_from(rank)) for rank in range(num_ranks)]
    said: list[tuple[int, str]] = []
    for step in range(1, num_steps + 1):
        hidden_TD = torch.randn(
            100, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float32
        )
        for rank, check in enumerate(checks):
            own_TD = change(step, hidden_TD.clone()) if rank == 1 else hidden_TD
            try:
                check.after_step(own_TD, 70)
            except RanksDisagreeError as error:
                said.append((step, error.reason))
        if said:
            break
    return said


def test_ranks_that_agree_are_left_alone() -> None:
    assert _run(5 * STEPS_BETWEEN, lambda _, hidden_TD: hidden_TD) == []


def test_rounding_is_no_disagreement() -> None:
    assert _run(3 * STEPS_BETWEEN, lambda _, hidden_TD: hidden_TD * (1 + 1e-6)) == []


def test_rows_behind_the_steps_tokens_are_nobodys() -> None:
    def pad(_: int, hidden_TD: torch.Tensor) -> torch.Tensor:
        hidden_TD[70:] = float("nan")
        return hidden_TD

    assert _run(3 * STEPS_BETWEEN, pad) == []


def test_a_rank_that_was_wrong_from_the_start_is_found_at_once() -> None:
    said = _run(STEPS_BETWEEN, lambda _, hidden_TD: hidden_TD * 1.1)
    assert [step for step, _ in said] == [3, 3, 3]
    assert all("after step 1 the residual stream of rank 1 is not that" in text for _, text in said)


@pytest.mark.parametrize("value", [5.0, float("nan"), float("inf")])
def test_one_row_that_changes_later_is_found_on_every_rank_in_the_same_step(value: float) -> None:
    def spoil(step: int, hidden_TD: torch.Tensor) -> torch.Tensor:
        if step > EARLY_STEPS + 10:
            hidden_TD[3, 7] = value
        return hidden_TD

    said = _run(5 * STEPS_BETWEEN, spoil)
    assert [step for step, _ in said] == [3 * STEPS_BETWEEN] * 3
    assert f"after step {STEPS_BETWEEN} " in said[0][1]


def test_a_step_without_a_stream_is_not_compared() -> None:
    check = RankCheck(Wire(1).send_from(0))
    for _ in range(3 * STEPS_BETWEEN):
        check.after_step(None, 5)
