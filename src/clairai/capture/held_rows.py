"""Rows that are held until a probe's score decides whether they are kept. Bounded and counted.

Runs in: the capture writer process, or the worker where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clairai.capture.pipe_messages import HeldTokens
from clairai.capture.results import CaptureResults
from clairai.capture.staging_reader import group_by_answer
from clairai.engine.capture.capture_plan import AnswerId, KeepThreshold
from clairai.store.row_block import RowBlock

Deliver = Callable[[RowBlock, tuple[str, ...]], None]  # a block, to these consumers


@dataclass
class _HeldAnswer:
    blocks: list[tuple[RowBlock, tuple[str, ...]]] = field(default_factory=list)
    rows: int = 0
    nbytes: int = 0


class HeldRows:
    """Rows of answers whose capture rule has not been decided. One thread uses it."""

    def __init__(self, limit_nbytes: int, results: CaptureResults, deliver: Deliver) -> None:
        self._limit, self._results, self._deliver = limit_nbytes, results, deliver
        self._held: dict[AnswerId, _HeldAnswer] = {}
        self._refused: dict[AnswerId, str] = {}  # whose rule cannot be decided, and why
        self.nbytes = 0

    def begin(self, answer: AnswerId) -> None:
        self._held[answer] = _HeldAnswer()

    def mask(self, rows_N: NDArray[np.void]) -> NDArray[np.bool_] | None:
        """Which rows are to be held; None if none is."""
        if not self._held and not self._refused:
            return None
        answers = zip(rows_N["stream"].tolist(), rows_N["choice"].tolist(), strict=True)
        is_held = (answer in self._held or answer in self._refused for answer in answers)
        held_N = np.fromiter(is_held, bool, len(rows_N))
        return held_N if held_N.any() else None

    def add(self, block: RowBlock, to: tuple[str, ...], held_N: NDArray[np.bool_]) -> None:
        """Hold these rows of a block. Without room the newest are dropped."""
        for answer, indices in group_by_answer(block.rows_N, np.flatnonzero(held_N)):
            if answer in self._refused:
                self._refuse(answer, len(indices))
            elif dropped := self._hold(answer, block.select(indices), to):
                reason = "no room to hold its rows until its rule is met; raise pending_mib"
                self._results.add_dropped(answer, dropped, reason)

    def _hold(self, answer: AnswerId, block: RowBlock, to: tuple[str, ...]) -> int:
        """How many rows had no room."""
        room = (self._limit - self.nbytes) * block.num_rows // block.nbytes
        dropped = max(block.num_rows - room, 0)
        if dropped:
            block = block.select(np.arange(block.num_rows - dropped))
        held = self._held[answer]
        held.blocks.append((block, to))
        held.rows += block.num_rows
        held.nbytes += block.nbytes
        self.nbytes += block.nbytes
        return dropped

    def judge(self, tokens: HeldTokens, score: float | None) -> None:
        """Keep an answer's rows if the score is high enough; give them up if it is not known."""
        answer = (tokens.stream, tokens.choice)
        if answer not in self._held:
            return
        if score is None:
            reason = f"probe {tokens.probe} has no score for it: its rows are not kept"
            self._refused[answer] = reason
            self._refuse(answer, self._take(answer).rows)
        elif score >= tokens.threshold:
            for block, to in self._take(answer).blocks:
                self._deliver(block, to)

    def finish(self, answer: AnswerId, rule: KeepThreshold | None) -> None:
        """Discard what is still held: no score was high enough."""
        self._refused.pop(answer, None)
        if answer in self._held:
            assert rule is not None
            reason = f"probe {rule.probe} stayed below {rule.threshold:g}"
            self._results.add_discarded(answer, self._take(answer).rows, reason)

    def _take(self, answer: AnswerId) -> _HeldAnswer:
        held = self._held.pop(answer)
        self.nbytes -= held.nbytes
        return held

    def _refuse(self, answer: AnswerId, rows: int) -> None:
        """Also of rows that come later, until the answer is finished."""
        self._results.add_discarded(answer, rows, self._refused[answer])
        self._results.fail(answer, self._refused[answer])
