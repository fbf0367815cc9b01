"""Steers rows of the residual stream in plain torch; steer_kernel.py must compute the same.

Runs in: the worker of a CPU engine. T = tokens in this step, N = rows of one group, D = model
width, G = gates of a request. Arithmetic is in float32, whatever the dtype of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.engine.steer import steer_tables as t
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.steering_plan import MAX_GATES


def steer_twin(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, tables: SteerTables, site: int
) -> None:
    tables.ran[site].add_(1)
    if not tables.num_mapped:
        return  # known on the host: without steered requests there is nothing to do
    for group in _group_rows(x_TD.shape[0], tables, site):
        rows = group.rows(x_TD.device)
        x_ND = x_TD[rows]
        stream_ND = x_ND if residual_TD is None else x_ND + residual_TD[rows]
        ops = _GroupOps(tables, group.gate_slot, rows, stream_ND.float())
        for op in _read_ops(tables, group.program, site):
            ops.run(op)
        if ops.is_changed_N1 is None:
            continue
        old_TD = x_TD if residual_TD is None else residual_TD
        old_TD[rows] = torch.where(ops.is_changed_N1, ops.stream_ND.to(x_TD.dtype), old_TD[rows])
        if residual_TD is not None:
            x_TD[rows] = x_TD[rows].masked_fill(ops.is_changed_N1, 0)


Rows: TypeAlias = "slice | torch.Tensor"


@dataclass(frozen=True)
class _RowGroup:
    """Rows that run one program; those of a stateful request are in order of position."""

    program: int
    rows_N: NDArray[np.intp]
    gate_slot: int | None = None

    def rows(self, device: torch.device) -> Rows:
        first, last = int(self.rows_N[0]), int(self.rows_N[-1])
        if last - first + 1 == len(self.rows_N):
            return slice(first, last + 1)  # a view: much cheaper than an index
        return torch.from_numpy(self.rows_N).to(device)


def _group_rows(num_tokens: int, tables: SteerTables, site: int) -> Iterator[_RowGroup]:
    map_T4: NDArray[np.int32] = tables.map_T4[:num_tokens].cpu().numpy()
    num_ops_P: NDArray[np.int32] = tables.num_ops_PS[:, site].cpu().numpy()
    program_T = map_T4[:, t.PROGRAM] * (num_ops_P[map_T4[:, t.PROGRAM]] > 0)
    reads_Z: NDArray[np.uint8] = tables.reads_ZS[:, site].cpu().numpy()
    run_T, gate_slot_T = map_T4[:, t.RUN], map_T4[:, t.GATE_SLOT]
    # Where a stateful gate reads, rows depend on the one before; elsewhere order is free.
    is_ordered_T = (run_T != 0) & (reads_Z[gate_slot_T] != 0)
    alone_T = np.where(is_ordered_T, 0, program_T)
    for program in np.flatnonzero(np.bincount(alone_T)):
        if program:
            yield _RowGroup(int(program), np.flatnonzero(alone_T == program))
    for first in np.flatnonzero(is_ordered_T & (run_T > 0)):
        gate_slot = int(gate_slot_T[first])
        if map_T4[first, t.FRESH]:
            _clear_gates(tables.state_ZG[gate_slot], int(reads_Z[gate_slot]))
        rows_N = np.arange(first, min(first + run_T[first], num_tokens))
        edges = np.flatnonzero(np.diff(program_T[rows_N])) + 1
        for part_N in np.split(rows_N, edges):
            _keep_states(tables, part_N, gate_slot, int(reads_Z[gate_slot]))
            if program_T[part_N[0]]:
                yield _RowGroup(int(program_T[part_N[0]]), part_N, gate_slot)


def _keep_states(tables: SteerTables, rows_N: NDArray[np.intp], gate_slot: int, gates: int) -> None:
    """In an engine that speculates: the states of gates, as far as ops of these rows leave them."""
    if tables.states_TG is not None:
        for gate in _list_gates(gates):
            tables.states_TG[rows_N, gate] = tables.state_ZG[gate_slot, gate]


def _clear_gates(state_G: torch.Tensor, gates: int) -> None:
    """Close the gates of these bits: their state is from before a preemption."""
    state_G[_list_gates(gates)] = 0


def _list_gates(bits: int) -> list[int]:
    return [gate for gate in range(MAX_GATES) if bits >> gate & 1]


@dataclass(frozen=True)
class _Op:
    kind: int
    row: int
    gate: int
    flags: int
    reals: list[float]  # all words as float32, by the same index


def _read_ops(tables: SteerTables, program: int, site: int) -> list[_Op]:
    words_OW: list[list[int]] = tables.words_PSOW[program, site].tolist()
    reals_OW: list[list[float]] = tables.reals_PSOW[program, site].tolist()
    num_ops = int(tables.num_ops_PS[program, site])
    return [
        _Op(words[t.KIND], words[t.ROW], words[t.GATE], words[t.FLAGS], reals)
        for words, reals in zip(words_OW[:num_ops], reals_OW, strict=False)
    ]


class _GroupOps:
    """Runs ops on the rows of one group at one site."""

    def __init__(
        self, tables: SteerTables, gate_slot: int | None, rows: Rows, stream_ND: torch.Tensor
    ) -> None:
        self._tables, self._gate_slot, self._rows = tables, gate_slot, rows
        self.stream_ND = stream_ND
        self.is_changed_N1: torch.Tensor | None = None  # None: no op has acted

    def run(self, op: _Op) -> None:
        vector_D = self._tables.vectors_VD[op.row]
        if op.kind == t.READ:
            self._read(op, vector_D)
        else:
            self._act(op, vector_D)

    def _is_skipped(self, op: _Op) -> torch.Tensor | None:
        """True for special tokens that the op skips; None if it skips none."""
        token_ids_T = self._tables.token_ids_T
        if not op.flags & t.SKIPS_SPECIAL or token_ids_T is None:
            return None
        token_ids_N = token_ids_T[self._rows].long()
        special_K = self._tables.special_K
        is_known_N = (token_ids_N >= 0) & (token_ids_N < len(special_K))
        return is_known_N & (special_K[token_ids_N.clamp(0, len(special_K) - 1)] != 0)

    def _read(self, op: _Op, direction_D: torch.Tensor) -> None:
        score_N = self.stream_ND @ direction_D + op.reals[t.BIAS]
        score_N = _activate(score_N, op.flags >> t.ACTIVATION_SHIFT)
        is_skipped_N = self._is_skipped(op)
        if op.flags & (t.IS_HELD | t.IS_LATCHED):
            gate_N = self._stateful_gate(op, score_N, is_skipped_N)
        else:
            gate_N = _gate_opening(op, score_N)
        if is_skipped_N is not None:
            gate_N = gate_N.masked_fill(is_skipped_N, 0)
        self._tables.gates_TG[self._rows, op.gate] = gate_N

    def _stateful_gate(
        self, op: _Op, score_N: torch.Tensor, is_skipped_N: torch.Tensor | None
    ) -> torch.Tensor:
        """The openings of a stateful gate, row by row: each depends on the one before."""
        state_G: Any = self._tables.state_ZG[self._gate_slot]
        state = float(state_G[op.gate])
        scores, opened = score_N.tolist(), _gate_opening(op, score_N).tolist()
        skipped = [False] * len(scores) if is_skipped_N is None else is_skipped_N.tolist()
        release, gates = op.reals[t.RELEASE], []
        for score, gate, is_skipped in zip(scores, opened, skipped, strict=True):
            if not is_skipped:
                is_kept = op.flags & t.IS_LATCHED or (op.flags & t.IS_HELD and score >= release)
                state = max(gate, state) if is_kept else gate
            gates.append(state)
        state_G[op.gate] = state
        states_N = torch.tensor(gates, device=score_N.device)
        if self._tables.states_TG is not None:
            self._tables.states_TG[self._rows, op.gate] = states_N
        return states_N

    def _act(self, op: _Op, vector_D: torch.Tensor) -> None:
        amount_N1 = torch.full_like(self.stream_ND[:, :1], op.reals[t.SCALE])
        if op.gate != t.NO_GATE:
            amount_N1 *= self._tables.gates_TG[self._rows, op.gate, None]
        is_skipped_N = self._is_skipped(op)
        if is_skipped_N is not None:
            amount_N1.masked_fill_(is_skipped_N[:, None], 0)
        factor_N1, keep_N1 = amount_N1, 1 - amount_N1
        if op.kind != t.REPLACE:
            factor_N1, keep_N1 = _factor(op, self.stream_ND, vector_D) * amount_N1, 1.0
        # Both are checked: a closed gate times infinity is NaN, not 0.
        is_acting_N1 = (amount_N1 != 0) & (factor_N1 != 0)
        steered_ND = torch.addcmul(keep_N1 * self.stream_ND, factor_N1, vector_D)
        self.stream_ND = torch.where(is_acting_N1, steered_ND, self.stream_ND)
        if self.is_changed_N1 is not None:
            is_acting_N1 |= self.is_changed_N1
        self.is_changed_N1 = is_acting_N1


def _activate(score_N: torch.Tensor, activation: int) -> torch.Tensor:
    if activation == 1:
        return score_N.clamp_min(0)
    return score_N.sigmoid() if activation == 2 else score_N


def _gate_opening(op: _Op, score_N: torch.Tensor) -> torch.Tensor:
    """How far the gate opens, 0 (closed) to 1; a NaN score leaves it closed."""
    threshold = op.reals[t.THRESHOLD]
    if not op.flags & t.IS_SOFT:
        return (score_N >= threshold).float()
    return (op.reals[t.SHARPNESS] * (score_N - threshold)).sigmoid().nan_to_num(0)


def _factor(op: _Op, stream_ND: torch.Tensor, vector_D: torch.Tensor) -> torch.Tensor | float:
    """How much of the vector is added at full strength, one number per row."""
    inverse = op.reals[t.INVERSE_NORM]
    if op.kind == t.ABLATE:
        return -(stream_ND @ vector_D[:, None]) * inverse * inverse
    if op.kind == t.CLAMP:
        along_N1 = stream_ND @ vector_D[:, None] * inverse
        return (along_N1.clamp(op.reals[t.LOW], op.reals[t.HIGH]) - along_N1) * inverse
    if op.flags & t.IS_MATCHED:
        return torch.linalg.vector_norm(stream_ND, dim=1, keepdim=True) * inverse
    return 1.0
