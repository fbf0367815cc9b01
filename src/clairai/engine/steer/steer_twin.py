"""Takes rows of the residual stream; gives them steered, in plain torch: a CPU engine's own way.

T = tokens in this step, N = rows steered alike, D = model width, G = gates of a request. What it
computes is what steer_kernel.py must compute. Arithmetic is in float32, whatever rows come in.
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


def steer_twin(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, tables: SteerTables, site: int
) -> None:
    tables.ran[site].add_(1)
    if not tables.num_mapped:
        return  # known on the host: an engine where nobody steers does nothing more
    for stretch in _group_rows(x_TD.shape[0], tables, site):
        rows = stretch.rows(x_TD.device)
        x_ND = x_TD[rows]
        stream_ND = x_ND if residual_TD is None else x_ND + residual_TD[rows]
        work = _GroupOps(tables, stretch.seat, rows, stream_ND.float())
        for op in _read_ops(tables, stretch.program, site):
            work.run(op)
        if work.is_changed_N1 is None:
            continue
        old_TD = x_TD if residual_TD is None else residual_TD
        old_TD[rows] = torch.where(work.is_changed_N1, work.stream_ND.to(x_TD.dtype), old_TD[rows])
        if residual_TD is not None:
            x_TD[rows] = x_TD[rows].masked_fill(work.is_changed_N1, 0)


Rows: TypeAlias = "slice | torch.Tensor"


@dataclass(frozen=True)
class _RowGroup:
    """Rows that run one program; those of a seat are in the order of their positions."""

    program: int
    rows_N: NDArray[np.intp]
    seat: int | None = None

    def rows(self, device: torch.device) -> Rows:
        first, last = int(self.rows_N[0]), int(self.rows_N[-1])
        if last - first + 1 == len(self.rows_N):
            return slice(first, last + 1)  # much the cheaper way to them
        return torch.from_numpy(self.rows_N).to(device)


def _group_rows(num_tokens: int, tables: SteerTables, site: int) -> Iterator[_RowGroup]:
    map_T4: NDArray[np.int32] = tables.map_T4[:num_tokens].cpu().numpy()
    num_ops_P: NDArray[np.int32] = tables.num_ops_PS[:, site].cpu().numpy()
    program_T = map_T4[:, t.PROGRAM] * (num_ops_P[map_T4[:, t.PROGRAM]] > 0)
    reads_Z: NDArray[np.uint8] = tables.reads_ZS[:, site].cpu().numpy()
    run_T, seat_T = map_T4[:, t.RUN], map_T4[:, t.SEAT]
    is_walked_T = (run_T != 0) & (reads_Z[seat_T] != 0)
    alone_T = np.where(is_walked_T, 0, program_T)
    for program in np.flatnonzero(np.bincount(alone_T)):
        if program:
            yield _RowGroup(int(program), np.flatnonzero(alone_T == program))
    for first in np.flatnonzero(is_walked_T & (run_T > 0)):
        seat = int(seat_T[first])
        if map_T4[first, t.FRESH]:
            _clear_gates(tables.state_ZG[seat], int(reads_Z[seat]))
        rows_N = np.arange(first, min(first + run_T[first], num_tokens))
        edges = np.flatnonzero(np.diff(program_T[rows_N])) + 1
        for part_N in np.split(rows_N, edges):
            if program_T[part_N[0]]:
                yield _RowGroup(int(program_T[part_N[0]]), part_N, seat)


def _clear_gates(state_G: torch.Tensor, gates: int) -> None:
    """What the gates of these bits remember is of an earlier request, or of a run before this."""
    state_G[[gate for gate in range(len(state_G)) if gates >> gate & 1]] = 0


@dataclass(frozen=True)
class _Op:
    kind: int
    row: int
    gate: int
    flags: int
    reals: list[float]  # a word has its place here too

    def real(self, word: int) -> float:
        return self.reals[word]


def _read_ops(tables: SteerTables, program: int, site: int) -> list[_Op]:
    words_OW: list[list[int]] = tables.words_PSOW[program, site].tolist()
    reals_OW: list[list[float]] = tables.reals_PSOW[program, site].tolist()
    num_ops = int(tables.num_ops_PS[program, site])
    return [
        _Op(words[t.KIND], words[t.ROW], words[t.GATE], words[t.FLAGS], reals)
        for words, reals in zip(words_OW[:num_ops], reals_OW, strict=False)
    ]


class _GroupOps:
    """One stretch at one site, op by op."""

    def __init__(
        self, tables: SteerTables, seat: int | None, rows: Rows, stream_ND: torch.Tensor
    ) -> None:
        self._tables, self._seat, self._rows = tables, seat, rows
        self.stream_ND = stream_ND
        self.is_changed_N1: torch.Tensor | None = None  # None: no row is

    def run(self, op: _Op) -> None:
        vector_D = self._tables.vectors_VD[op.row]
        if op.kind == t.READ:
            self._read(op, vector_D)
        else:
            self._act(op, vector_D)

    def _is_skipped(self, op: _Op) -> torch.Tensor | None:
        """Of each row; None if none is."""
        token_ids_T = self._tables.token_ids_T
        if not op.flags & t.SKIPS_SPECIAL or token_ids_T is None:
            return None
        token_ids_N = token_ids_T[self._rows].long()
        special_K = self._tables.special_K
        is_known_N = (token_ids_N >= 0) & (token_ids_N < len(special_K))
        return is_known_N & (special_K[token_ids_N.clamp(0, len(special_K) - 1)] != 0)

    def _read(self, op: _Op, direction_D: torch.Tensor) -> None:
        score_N = self.stream_ND @ direction_D + op.real(t.BIAS)
        score_N = _activate(score_N, op.flags >> t.ACTIVATION_SHIFT)
        is_skipped_N = self._is_skipped(op)
        if op.flags & (t.IS_HELD | t.IS_LATCHED):
            gate_N = self._remembered(op, score_N, is_skipped_N)
        else:
            gate_N = _gate_opening(op, score_N)
        if is_skipped_N is not None:
            gate_N = gate_N.masked_fill(is_skipped_N, 0)
        self._tables.gates_TG[self._rows, op.gate] = gate_N

    def _remembered(
        self, op: _Op, score_N: torch.Tensor, is_skipped_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Row by row: each depends on the one before."""
        state_G: Any = self._tables.state_ZG[self._seat]
        state = float(state_G[op.gate])
        scores, opened = score_N.tolist(), _gate_opening(op, score_N).tolist()
        skipped = [False] * len(scores) if is_skipped_N is None else is_skipped_N.tolist()
        release, gates = op.real(t.RELEASE), []
        for score, gate, is_skipped in zip(scores, opened, skipped, strict=True):
            if not is_skipped:
                is_kept = op.flags & t.IS_LATCHED or (op.flags & t.IS_HELD and score >= release)
                state = max(gate, state) if is_kept else gate
            gates.append(state)
        state_G[op.gate] = state
        return torch.tensor(gates, device=score_N.device)

    def _act(self, op: _Op, vector_D: torch.Tensor) -> None:
        amount_N1 = torch.full_like(self.stream_ND[:, :1], op.real(t.SCALE))
        if op.gate != t.NO_GATE:
            amount_N1 *= self._tables.gates_TG[self._rows, op.gate, None]
        is_skipped_N = self._is_skipped(op)
        if is_skipped_N is not None:
            amount_N1.masked_fill_(is_skipped_N[:, None], 0)
        factor_N1, keep_N1 = amount_N1, 1 - amount_N1
        if op.kind != t.REPLACE:
            factor_N1, keep_N1 = _factor(op, self.stream_ND, vector_D) * amount_N1, 1.0
        # Both: a closed gate times what is not finite is not 0.
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
    """From 0, closed, to 1. A score that is not a number opens nothing."""
    threshold = op.real(t.THRESHOLD)
    if not op.flags & t.IS_SOFT:
        return (score_N >= threshold).float()
    return (op.real(t.SHARPNESS) * (score_N - threshold)).sigmoid().nan_to_num(0)


def _factor(op: _Op, stream_ND: torch.Tensor, vector_D: torch.Tensor) -> torch.Tensor | float:
    """How much of the vector is added at full strength, in a column."""
    inverse = op.real(t.INVERSE_NORM)
    if op.kind == t.ABLATE:
        return -(stream_ND @ vector_D[:, None]) * inverse * inverse
    if op.kind == t.CLAMP:
        along_N1 = stream_ND @ vector_D[:, None] * inverse
        return (along_N1.clamp(op.real(t.LOW), op.real(t.HIGH)) - along_N1) * inverse
    if op.flags & t.IS_MATCHED:
        return torch.linalg.vector_norm(stream_ND, dim=1, keepdim=True) * inverse
    return 1.0
