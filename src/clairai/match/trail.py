"""Takes one request's rows as they come; gives them in order of position, the newest of each.

N = positions with a row, P = probes, R = rows of one run, C = columns of its bank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire

_FEWEST_ROWS: Final = 4
_UNSAID: Final = -1  # in an array of versions


@dataclass(frozen=True, eq=False)
class StreamRows:
    """What is known of one choice of one request; positions ascend and none is there twice."""

    names: tuple[str, ...]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    phases: NDArray[np.uint8]
    scores_NP: NDArray[np.float32]  # NaN where the bank did not hold the probe at that step
    weights_N: NDArray[np.int64]  # version of the weights; -1: the engine does not say
    cached: tuple[tuple[int, int], ...]  # (first position, span) of each run a cache served
    finished: bool


class _Segment:
    """Rows scored by the same probes and weights; its arrays double as they fill."""

    def __init__(self, names: tuple[str, ...], weights: int | None, num_rows: int) -> None:
        self.names, self.weights = names, weights
        self.num_rows = 0
        size = max(num_rows, _FEWEST_ROWS)
        self._rows = np.empty(size, wire.ROW)
        self._scores = np.empty((size, len(names)), np.float32)

    def append(self, rows: NDArray[np.void], scores_RC: NDArray[np.float32]) -> None:
        end = self.num_rows + len(rows)
        if end > len(self._rows):
            self._grow(max(end, 2 * len(self._rows)))
        self._rows[self.num_rows : end] = rows
        self._scores[self.num_rows : end] = scores_RC
        self.num_rows = end

    @property
    def rows(self) -> NDArray[np.void]:
        return self._rows[: self.num_rows]

    @property
    def scores(self) -> NDArray[np.float32]:
        return self._scores[: self.num_rows]

    def _grow(self, size: int) -> None:
        rows, scores = self.rows, self.scores
        self._rows = np.empty(size, wire.ROW)
        self._scores = np.empty((size, len(self.names)), np.float32)
        self._rows[: self.num_rows], self._scores[: self.num_rows] = rows, scores


class Trail:
    """Everything one choice of one request left behind, in order of arrival."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._cached: list[tuple[int, int]] = []
        self.finished = False

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self._segments) + len(self._cached)

    def add_tokens(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        names: tuple[str, ...],
        weights: int | None = None,
    ) -> int:
        """Keep rows of forwarded tokens, scored by the probes `names`; how many it keeps."""
        last = self._segments[-1] if self._segments else None
        if last is None or (last.names, last.weights) != (names, weights):
            last = _Segment(names, weights, len(rows))
            self._segments.append(last)
        last.append(rows, scores_RC)
        return len(rows)

    def add_marks(self, rows: NDArray[np.void], names: tuple[str, ...]) -> int:
        """Keep rows that stand for no forwarded token; how many: the end is only noted."""
        if not self._segments:  # a request served whole from a cache still has its probes, unscored
            self._segments.append(_Segment(names, None, 0))
        is_cached = rows["phase"] == wire.CACHED
        self.finished |= not is_cached.all()
        starts, spans = rows["position"][is_cached], rows["span"][is_cached]
        self._cached.extend(zip(starts.tolist(), spans.tolist(), strict=True))
        return len(starts)

    def rows(self) -> StreamRows:
        """All of it so far."""
        rows = np.concatenate([segment.rows for segment in self._segments] or [_no_rows()])
        names = tuple(dict.fromkeys(name for part in self._segments for name in part.names))
        newest = _newest(rows["position"])
        kept = rows[newest]
        return StreamRows(
            names=names,
            positions=kept["position"].astype(np.int64),
            token_ids=kept["token_id"].astype(np.int32),
            phases=kept["phase"].astype(np.uint8),
            scores_NP=self._scores(names, len(rows))[newest],
            weights_N=self._weights()[newest],
            cached=tuple(self._cached),
            finished=self.finished,
        )

    def _weights(self) -> NDArray[np.int64]:
        said = [_UNSAID if part.weights is None else part.weights for part in self._segments]
        return np.repeat(np.array(said, np.int64), [part.num_rows for part in self._segments])

    def _scores(self, names: tuple[str, ...], num_rows: int) -> NDArray[np.float32]:
        scores = np.full((num_rows, len(names)), np.nan, np.float32)
        begin = 0
        column_of = {name: column for column, name in enumerate(names)}
        for segment in self._segments:
            columns = [column_of[name] for name in segment.names]
            scores[begin : begin + segment.num_rows, columns] = segment.scores
            begin += segment.num_rows
        return scores


def _newest(positions: NDArray[np.unsignedinteger]) -> NDArray[np.intp]:
    """Index of the last row to arrive of each position: what was recomputed replaces the old."""
    _, from_end = np.unique(positions[::-1], return_index=True)
    newest: NDArray[np.intp] = len(positions) - 1 - from_end
    return newest


def _no_rows() -> NDArray[np.void]:
    return np.empty(0, wire.ROW)
