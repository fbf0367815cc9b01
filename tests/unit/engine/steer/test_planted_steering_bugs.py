"""Bugs planted in the host's part of steering: the comparison with the reference catches each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.assemble_program import ProgramAssembler, ProgramWords
from clairai.engine.steer.program_cache import Schedule
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steer_twin import steer_twin
from clairai.engine.steer.steering_plan import SteeringPlan
from clairai.engine.steer.worker_steering import WorkerSteering, _ValidMap
from clairai.engine.step import StepBatch
from tests.support.steered_engine import fleet, random_history

Plant = Callable[[pytest.MonkeyPatch], None]
NUM_HISTORIES = 12


def is_right(seed: int) -> bool:
    try:
        return not random_history(fleet(), np.random.default_rng(seed), num_steps=20)
    except (IndexError, ValueError):  # a map that cannot be is noticed as such
        return False


def test_without_a_planted_bug_every_row_is_right() -> None:
    assert all(map(is_right, range(NUM_HISTORIES)))


def in_the_map(change: Callable[[NDArray[np.int32]], None]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        send = WorkerSteering._send

        def changed(self: WorkerSteering, map_N4: NDArray[np.int32], num_mapped: int) -> None:
            change(map_N4)
            send(self, map_N4, num_mapped)

        monkeypatch.setattr(WorkerSteering, "_send", changed)

    return plant


def one_seat_for_all(map_N4: NDArray[np.int32]) -> None:
    map_N4[:, t.GATE_SLOT] = 0


def never_fresh(map_N4: NDArray[np.int32]) -> None:
    map_N4[:, t.FRESH] = 0


def a_run_one_too_short(map_N4: NDArray[np.int32]) -> None:
    map_N4[map_N4[:, t.RUN] > 1, t.RUN] -= 1


def a_run_that_is_none(map_N4: NDArray[np.int32]) -> None:
    map_N4[map_N4[:, t.RUN] < 0, t.RUN] = 1


def rows_of_the_neighbour(map_N4: NDArray[np.int32]) -> None:
    map_N4[:] = np.roll(map_N4, 1, axis=0)


def a_map_that_is_never_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    put = SteerTables.put_map

    def keep(self: SteerTables, map_N4: NDArray[np.int32]) -> None:
        is_clear_N = ~np.any(map_N4, axis=1)
        map_N4[is_clear_N] = self.map_T4[: len(map_N4)].numpy()[is_clear_N]
        put(self, map_N4)

    monkeypatch.setattr(SteerTables, "put_map", keep)


def a_map_that_holds_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: _ValidMap, batch: StepBatch) -> bool:
        return batch.counts_R.tobytes() == self.counts

    monkeypatch.setattr(_ValidMap, "holds", holds)


def segments_one_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Schedule.segment

    def late(self: Schedule, position: int) -> tuple[int, int, int]:
        program, low, high = segment(self, max(position - 1, 0))
        return program, low + (low > 0), high + 1

    monkeypatch.setattr(Schedule, "segment", late)


def x_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_x(
        x_TD: torch.Tensor, residual_TD: torch.Tensor | None, tables: SteerTables, site: int
    ) -> None:
        before = x_TD.clone()
        steer_twin(x_TD, residual_TD, tables, site)
        if residual_TD is not None:
            x_TD.copy_(before)

    monkeypatch.setattr(
        "clairai.engine.steer.steer_tables._choose_steer_function", lambda _tables: leave_x
    )


def in_programs(change: Callable[[ProgramWords], None]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        program = ProgramAssembler.assemble

        def changed(self: ProgramAssembler, plan: SteeringPlan, *given: Any) -> ProgramWords:
            found = program(self, plan, *given)
            change(found)
            return found

        monkeypatch.setattr(ProgramAssembler, "assemble", changed)

    return plant


def gates_that_see_the_steered_row(program: ProgramWords) -> None:
    for words_OW, num_ops in zip(program.words_SOW, program.num_ops_S, strict=True):
        is_read_O = words_OW[:num_ops, t.KIND] == t.READ
        order = np.argsort(is_read_O, kind="stable")
        if is_read_O.any() and not is_read_O.all():
            words_OW[:num_ops] = words_OW[:num_ops][order]


def the_last_op_left_out(program: ProgramWords) -> None:
    program.num_ops_S[program.num_ops_S > 1] -= 1


def special_tokens_steered(program: ProgramWords) -> None:
    program.words_SOW[..., t.FLAGS] &= ~t.SKIPS_SPECIAL


def gates_that_forget(program: ProgramWords) -> None:
    program.words_SOW[program.words_SOW[..., t.KIND] == t.READ, t.FLAGS] &= ~t.IS_LATCHED


PLANTED: list[Plant] = [
    in_the_map(one_seat_for_all),
    in_the_map(never_fresh),
    in_the_map(a_run_one_too_short),
    in_the_map(a_run_that_is_none),
    in_the_map(rows_of_the_neighbour),
    a_map_that_is_never_cleared,
    a_map_that_holds_for_ever,
    segments_one_too_late,
    x_that_stays,
    in_programs(gates_that_see_the_steered_row),
    in_programs(the_last_op_left_out),
    in_programs(special_tokens_steered),
    in_programs(gates_that_forget),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not all(map(is_right, range(NUM_HISTORIES)))
