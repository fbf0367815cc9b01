"""Takes the rows of many records; gives how each probe's scores are spread, and how many are high.

P = probes of the bank, E = edges of a histogram, N = tokens, R = rows of a record
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire

BATCH_ROWS: Final = 1024
# The same number of edges for every probe, so that a bank is one array.
_SIGMOID: Final = (
    *(0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999),
)
_RELU: Final = (0, 0.01, 0.03, 0.1, 0.3, 1, 2, 3, 5, 10, 20, 30, 100, 300, 1000)
_PLAIN: Final = (-100, -30, -10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30, 100)
_FIXED: Final = {"sigmoid": _SIGMOID, "relu": _RELU, "none": _PLAIN}
NUM_EDGES: Final = len(_PLAIN)


def edges(info: wire.ProbeInfo) -> tuple[float, ...]:
    """Over the probe's usual scores where it knows them; else what its activation can give."""
    if info.calibration is None or info.calibration[0] >= info.calibration[1]:
        return _FIXED[info.activation]
    return tuple(float(f"{edge:.4g}") for edge in np.linspace(*info.calibration, NUM_EDGES))


class Spread:
    """The scores of one kind of token; a score that is not finite is in none of the counts."""

    def __init__(self, num_probes: int) -> None:
        self.at_most_PE = np.zeros((num_probes, NUM_EDGES + 1), np.int64)  # the last edge: infinity
        self.sum_P = np.zeros(num_probes, np.float64)
        self.above_P = np.zeros(num_probes, np.int64)

    def add(
        self,
        scores_PN: NDArray[np.float32],
        edges_PE: NDArray[np.float32],
        threshold_P: NDArray[np.float32],
    ) -> None:
        known_PN = np.where(np.isfinite(scores_PN), scores_PN, np.float32(np.nan))
        self.sum_P += np.nansum(known_PN, axis=1, dtype=np.float64)
        self.above_P += (known_PN >= threshold_P[:, None]).sum(axis=1)
        known_PN.sort(axis=1)  # NaN goes to the end, beyond infinity
        for p, known_N in enumerate(known_PN):
            self.at_most_PE[p] += known_N.searchsorted(edges_PE[p], side="right")

    def carry(self, old: Spread, pairs: Sequence[tuple[int, int]]) -> None:
        """Take over the counts of probes that stay: (index here, index in `old`)."""
        for here, there in pairs:
            self.at_most_PE[here] = old.at_most_PE[there]
            self.sum_P[here] = old.sum_P[there]
            self.above_P[here] = old.above_P[there]


class Tally:
    """The spreads of one bank after the other; a probe that leaves the bank leaves here too.

    Rows are kept until there are many: counting a thousand costs little more than counting one.
    """

    def __init__(self) -> None:
        self.bank = wire.Bank(0, ())
        self.generated, self.prompt = Spread(0), Spread(0)
        self.edges: tuple[tuple[float, ...], ...] = ()
        self._edges_PE = np.zeros((0, NUM_EDGES + 1), np.float32)
        self._threshold_P = np.zeros(0, np.float32)
        self._pending: list[tuple[NDArray[np.void], NDArray[np.float32]]] = []
        self._num_pending = 0

    def add(self, bank: wire.Bank, rows: NDArray[np.void], scores_RP: NDArray[np.float32]) -> None:
        if bank is not self.bank:  # a reader gives one object for each version
            self.settle()
            self._follow(bank)
        self._pending.append((rows, scores_RP))
        self._num_pending += len(rows)
        if self._num_pending >= BATCH_ROWS:
            self.settle()

    def settle(self) -> None:
        """Count what was kept."""
        if not self._pending:
            return
        # Field by field: numpy copies whole rows one element at a time.
        phase_R = np.concatenate([rows["phase"] for rows, _ in self._pending])
        flags_R = np.concatenate([rows["flags"] for rows, _ in self._pending])
        scores_RP = np.concatenate([scores_RP for _, scores_RP in self._pending])
        self._pending.clear()
        self._num_pending = 0
        is_first_R = flags_R & wire.RECOMPUTED == 0  # the others were counted before
        for phase, spread in ((wire.DECODE, self.generated), (wire.PREFILL, self.prompt)):
            is_ours_R = (phase_R == phase) & is_first_R
            if is_ours_R.any():
                scores_PN = np.ascontiguousarray(scores_RP[is_ours_R].T)
                spread.add(scores_PN, self._edges_PE, self._threshold_P)

    def _follow(self, bank: wire.Bank) -> None:
        infos = bank.probes
        there = {_identity(info): index for index, info in enumerate(self.bank.probes)}
        pairs = [(i, there[_identity(x)]) for i, x in enumerate(infos) if _identity(x) in there]
        generated, prompt = Spread(len(infos)), Spread(len(infos))
        generated.carry(self.generated, pairs)
        prompt.carry(self.prompt, pairs)
        self.bank, self.generated, self.prompt = bank, generated, prompt
        self.edges = tuple(map(edges, infos))
        with_infinity = [(*finite, np.inf) for finite in self.edges]
        self._edges_PE = np.array(with_infinity, np.float32).reshape(len(infos), NUM_EDGES + 1)
        thresholds = [np.inf if x.threshold is None else x.threshold for x in infos]
        self._threshold_P = np.array(thresholds, np.float32)


def _identity(info: wire.ProbeInfo) -> tuple[str, str, tuple[float, ...]]:
    """Another probe under an old name, or other edges, is another histogram."""
    return info.name, info.digest, edges(info)
