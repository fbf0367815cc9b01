"""Compiles the active actions of a steering plan into a program: the ops of every site, as words.

Runs in: the worker. S = sites, O = ops of a program at a site, W = words of an op (see
steer_tables.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.engine.score.score_tables import ACTIVATION_CODES
from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.steering_plan import MAX_OPS, PlanAction, PlanGate, PlanRow, SteeringPlan
from clairai.errors import RequestError
from clairai.probe.numeric_bounds import (
    FACTORS,
    MAX_NUMBER,
    ROW_LENGTHS,
    is_factor,
    is_number,
    is_row_length,
    row_length,
)

OP_STRUCT: Final = struct.Struct(f"<{t.FIRST_REAL}i{t.OP_WORDS - t.FIRST_REAL}f")
OP_KINDS: Final = {"add": t.ADD, "ablate": t.ABLATE, "clamp": t.CLAMP, "replace": t.REPLACE}


@dataclass(frozen=True, eq=False)
class ProgramWords:
    words_SOW: NDArray[np.int32]
    num_ops_S: NDArray[np.int32]


class ProgramAssembler:
    """Writes programs for the sites of one model."""

    def __init__(self, sites: Iterable[str], site_of: Mapping[str, str]) -> None:
        """`site_of` names the site of each point; two points can share one."""
        index_of = {site: index for index, site in enumerate(sites)}
        self._site = {point: index_of[site] for point, site in site_of.items() if site in index_of}
        self._num_sites = len(index_of)

    def assemble(
        self, plan: SteeringPlan, active: Iterable[int], row_index: Callable[[str], int]
    ) -> ProgramWords:
        """Gates of a site come before its actions: they read the row as it arrives."""
        words_SOW = np.zeros((self._num_sites, MAX_OPS, t.OP_WORDS), np.int32)
        num_ops_S = np.zeros(self._num_sites, np.int32)
        actions = [plan.actions[index] for index in active]
        ops = [
            (plan.gates[action.gate].row, _gate_op(plan.gates[action.gate], action))
            for action in actions
            if action.gate is not None
        ]
        ops += [(row, _action_op(action, row)) for action in actions for row in action.rows]
        for row, op in ops:
            site = self._site[row.point]
            words_SOW[site, num_ops_S[site]] = np.frombuffer(op, np.int32)
            words_SOW[site, num_ops_S[site], t.ROW] = row_index(row.digest)
            num_ops_S[site] += 1
        return ProgramWords(words_SOW, num_ops_S)

    def stateful_gates(self, plan: SteeringPlan) -> NDArray[np.uint8]:
        """The stateful gates that read at each site, one bit each."""
        reads_S = np.zeros(self._num_sites, np.uint8)
        for index, gate in enumerate(plan.gates):
            if gate.is_stateful:
                reads_S[self._site[gate.row.point]] |= 1 << index
        return reads_S


def _gate_op(gate: PlanGate, action: PlanAction) -> bytes:
    assert action.gate is not None
    flags = t.SKIPS_SPECIAL * action.skips_special
    flags |= t.IS_SOFT * (gate.sharpness is not None)
    flags |= t.IS_HELD * (gate.release is not None) | t.IS_LATCHED * gate.latch
    flags |= ACTIVATION_CODES[gate.activation] << t.ACTIVATION_SHIFT
    numbers = (gate.bias, gate.threshold, gate.release or 0.0)
    _check_numbers(gate.sharpness or 0.0, numbers, row_length(gate.row.read()))
    reals = (gate.bias, gate.threshold, gate.sharpness or 0.0, gate.release or 0.0)
    return _pack_op(t.READ, action.gate, flags, reals)


def _action_op(action: PlanAction, row: PlanRow) -> bytes:
    flags = t.SKIPS_SPECIAL * action.skips_special | t.IS_MATCHED * action.is_matched
    length = row_length(row.read())
    _check_numbers(action.scale, (action.low or 0.0, action.high or 0.0), length)
    low = -np.inf if action.low is None else action.low
    high = np.inf if action.high is None else action.high
    gate = t.NO_GATE if action.gate is None else action.gate
    # A row of length 0 keeps 0: what divides by the length then does nothing.
    inverse = length and 1 / length
    return _pack_op(OP_KINDS[action.op], gate, flags, (action.scale, low, high, inverse))


def _check_numbers(factor: float, numbers: Iterable[float], length: float) -> None:
    """Check once more what admission has checked: no number may overflow on the device."""
    if is_factor(factor) and all(map(is_number, numbers)) and (not length or is_row_length(length)):
        return
    raise RequestError(
        f"a steering plan has a factor of {factor:.3g} (it must be {FACTORS}), a row of length "
        f"{length:.3g} ({ROW_LENGTHS}), or a number beyond {MAX_NUMBER:g}; it should have been "
        "refused at admission: please report this"
    )


def _pack_op(kind: int, gate: int, flags: int, reals: tuple[float, float, float, float]) -> bytes:
    """An op without its vector row, which the caller fills in."""
    words = [0] * t.FIRST_REAL
    words[t.KIND], words[t.GATE], words[t.FLAGS] = kind, gate, flags
    return OP_STRUCT.pack(*words, *reals)
