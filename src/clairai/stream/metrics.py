"""Takes what the proxy tells of scores and runs; gives Prometheus text for GET /metrics.

No global registry: nothing of another library in the process is shown, and two proxies in one
process do not add up. Every name begins with clairai_; docs/metrics.md lists them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from clairai import wire
from clairai.stream.observe import Numbers, RunEnd
from clairai.stream.tally import Spread, Tally

OUTCOMES: Final = ("done", "cancelled", "error")
_MAX_NAMES: Final = 4096
_LAG_EDGES_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.5, 1, 5)
_RUN_EDGES_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Seconds:
    """A histogram of times."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._edges, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        at_most = np.cumsum(self._counts).tolist()
        names = [*(str(float(edge)) for edge in self._edges), "+Inf"]
        buckets = list(zip(names, at_most, strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class Metrics:
    """An Exposition; scores come on the ring's thread, the rest on the event loop."""

    content_type: str = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tally = Tally()
        self._lag = Seconds(_LAG_EDGES_S)
        self._whole, self._first_token = Seconds(_RUN_EDGES_S), Seconds(_RUN_EDGES_S)
        self._ended = dict.fromkeys(OUTCOMES, 0)
        self._num_tokens = 0
        self._stopped: dict[str, int] = {}

    def on_scores(
        self,
        bank: wire.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        with self._lock:
            self._tally.add(bank, rows, scores_RP)
            self._lag.add(max(0, time.monotonic_ns() - stamp_ns) / 1e9)

    def on_run_end(self, end: RunEnd) -> None:
        with self._lock:
            self._ended[end.outcome] += 1
            self._whole.add(end.seconds)
            if end.first_token_seconds is not None:
                self._first_token.add(end.first_token_seconds)
            self._num_tokens += sum(choice.tokens for choice in end.choices)
            self._note_stops(end)

    def _note_stops(self, end: RunEnd) -> None:
        """Those of probes in the bank are shown; the bound is for names that never were in it."""
        for name in filter(None, (choice.stopped for choice in end.choices)):
            if name in self._stopped or len(self._stopped) < _MAX_NAMES:
                self._stopped[name] = self._stopped.get(name, 0) + 1

    def text(self, numbers: Numbers) -> bytes:
        """Formatted after the lock is let go: nobody's scores wait for a scrape."""
        return generate_latest(self._snapshot(numbers))

    def _snapshot(self, numbers: Numbers) -> _Snapshot:
        with self._lock:
            self._tally.settle()
            return _Snapshot(
                numbers,
                dict(self._ended),
                self._num_tokens,
                dict(self._stopped),
                deepcopy(self._whole),
                deepcopy(self._first_token),
                deepcopy(self._lag),
                self._tally.bank,
                self._tally.edges,
                deepcopy(self._tally.generated),
                deepcopy(self._tally.prompt),
            )


@dataclass(frozen=True, eq=False)
class _Snapshot(Collector):
    """Everything at one moment, in the order it is shown."""

    numbers: Numbers
    ended: Mapping[str, int]
    num_tokens: int
    stopped: Mapping[str, int]
    whole: Seconds
    first_token: Seconds
    lag: Seconds
    bank: wire.Bank
    edges: tuple[tuple[float, ...], ...]
    generated: Spread
    prompt: Spread

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "clairai_build", "This proxy.", value={"version": version("clairai")}
        )
        yield from _ring(self.numbers)
        yield self.lag.family("clairai_score_lag_seconds", "From the engine's ring to the proxy.")
        yield from self._completions()
        yield self._spread("clairai_generated_score", "Scores of generated tokens.", self.generated)
        yield self._spread("clairai_prompt_score", "Scores of prompt tokens.", self.prompt)
        yield self._above()
        yield self._stops()

    def _completions(self) -> Iterator[Metric]:
        yield _gauge("clairai_streams", "Completions in the proxy now.", self.numbers.streams)
        yield _gauge("clairai_runs", "Named runs held, ended ones too.", self.numbers.runs)
        yield _counter("clairai_completions", "Completions begun.", self.numbers.completions)
        ended = CounterMetricFamily(
            "clairai_completions_ended", "Completions, by how they ended.", labels=["outcome"]
        )
        for outcome, count in self.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        errors = self.numbers.upstream_errors
        yield _counter("clairai_upstream_errors", "Failures of the engine's server.", errors)
        yield _counter("clairai_tokens", "Tokens of scored completions.", self.num_tokens)
        yield self.whole.family("clairai_completion_seconds", "From the request to its last byte.")
        yield self.first_token.family(
            "clairai_first_token_seconds", "From the request to the engine's first token."
        )

    def _spread(self, name: str, documentation: str, spread: Spread) -> Metric:
        family = HistogramMetricFamily(name, documentation, labels=["probe"])
        columns = zip(
            *(self.bank.probes, self.edges),
            *(spread.at_most_PE.tolist(), spread.sum_P.tolist()),
            strict=True,
        )
        for info, edges, at_most, total in columns:
            names = [*map(str, map(float, edges)), "+Inf"]
            buckets = list(zip(names, at_most, strict=True))
            family.add_metric([info.name], buckets=buckets, sum_value=None)
            labels = {"probe": info.name}
            family.add_sample(f"{name}_count", labels, at_most[-1])
            if info.activation != "none":  # a sum that can go down is not one to Prometheus
                family.add_sample(f"{name}_sum", labels, total)
        return family

    def _above(self) -> Metric:
        family = CounterMetricFamily(
            "clairai_generated_above_threshold",
            "Generated tokens at or over the probe's threshold.",
            labels=["probe"],
        )
        for info, count in zip(self.bank.probes, self.generated.above_P.tolist(), strict=True):
            if info.threshold is not None:
                family.add_metric([info.name], count)
        return family

    def _stops(self) -> Metric:
        family = CounterMetricFamily(
            "clairai_stopped", "Answers that a probe's rule has ended.", labels=["probe"]
        )
        for info in self.bank.probes:
            family.add_metric([info.name], self.stopped.get(info.name, 0))
        return family


def _ring(numbers: Numbers) -> Iterator[Metric]:
    ring = numbers.ring
    yield _gauge("clairai_ring_attached", "1 while a ring is read.", int(ring.attached))
    yield _gauge("clairai_ring_lag_records", "Records published and not read yet.", ring.lag)
    yield _counter("clairai_ring_records", "Records read.", ring.records_delivered)
    yield _counter("clairai_ring_records_lost", "Overwritten before read.", ring.records_lost)
    yield _counter("clairai_rows", "Rows given to a completion here.", ring.rows)
    yield _counter("clairai_rows_orphaned", "Rows of other requests.", ring.orphaned)
    yield _counter("clairai_rows_mismatched", "Rows with a wrong token.", ring.mismatched)
    yield _counter("clairai_rows_lost", "Scores said to be lost.", numbers.rows_lost)


def _gauge(name: str, documentation: str, value: int) -> Metric:
    return GaugeMetricFamily(name, documentation, value)


def _counter(name: str, documentation: str, value: int) -> Metric:
    return CounterMetricFamily(name, documentation, value)
