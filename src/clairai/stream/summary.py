"""Takes the rows of an answer as they are told; gives each probe's mean, highest and crossings."""

from __future__ import annotations

from collections.abc import Iterable

from clairai.stream.lane import Row
from clairai.stream.observe import ProbeResult


class _Sum:
    """One probe."""

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold
        self.count = self.above = 0
        self.total = 0.0
        self.max: float | None = None
        self.argmax: int | None = None

    def add(self, index: int, value: float) -> None:
        self.count += 1
        self.total += value
        if self.max is None or value > self.max:
            self.max, self.argmax = value, index
        if self.threshold is not None and value >= self.threshold:
            self.above += 1

    def result(self, name: str) -> ProbeResult:
        mean = self.total / self.count if self.count else None
        above = None if self.threshold is None else self.above
        return ProbeResult(name, mean, self.max, self.argmax, above, self.threshold)


class Summary:
    """One answer."""

    def __init__(self) -> None:
        self.count = 0  # tokens with a row
        self.lost = 0
        self._sums: dict[str, _Sum] = {}

    def add(self, start: int, rows: Iterable[Row | None]) -> None:
        """`rows` are those of the tokens from `start` on; None is a lost one."""
        for index, row in enumerate(rows, start):
            if row is None:
                self.lost += 1
                continue
            self.count += 1
            columns = row.columns
            for name, threshold, value in zip(
                columns.names, columns.thresholds, row.values, strict=True
            ):
                if value is not None:
                    self._sum(name, threshold).add(index, value)

    def results(self, names: Iterable[str]) -> tuple[ProbeResult, ...]:
        """In the order of `names`, those that were never scored too."""
        nothing = _Sum(None)
        return tuple(self._sums.get(name, nothing).result(name) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sums)

    def _sum(self, name: str, threshold: float | None) -> _Sum:
        if name not in self._sums:
            self._sums[name] = _Sum(threshold)
        return self._sums[name]
