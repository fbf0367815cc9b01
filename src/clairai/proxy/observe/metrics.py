"""Prometheus metrics of the proxy, for GET /metrics; docs/metrics.md lists them.

There is no global registry: metrics of other libraries in the process are not shown, and two
proxies in one process do not add up.

P = probes of the bank, E = edges of a histogram, N = tokens, R = rows of a record
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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

from clairai.proxy.capture_watch import CaptureReport
from clairai.proxy.observe.observer import CompletionEnd, ProxyCounts
from clairai.wire import ring_messages

OUTCOMES: Final = ("done", "cancelled", "error")
_MAX_NAMES: Final = 4096
_LAG_EDGES_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.5, 1, 5)
_RUN_EDGES_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
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


def bucket_edges(info: ring_messages.ProbeInfo) -> tuple[float, ...]:
    """The buckets of a probe: over its usual scores if known, else over those of its activation."""
    if info.calibration is None or info.calibration[0] >= info.calibration[1]:
        return _FIXED[info.activation]
    return tuple(float(f"{edge:.4g}") for edge in np.linspace(*info.calibration, NUM_EDGES))


class ScoreHistogram:
    """Counts the finite scores of one kind of token, by bucket."""

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
        known_PN.sort(axis=1)  # NaN goes to the end, after infinity
        for p, known_N in enumerate(known_PN):
            self.at_most_PE[p] += known_N.searchsorted(edges_PE[p], side="right")

    def copy_counts(self, old: ScoreHistogram, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the counts of probes that stay: (index here, index in `old`)."""
        for here, there in pairs:
            self.at_most_PE[here] = old.at_most_PE[there]
            self.sum_P[here] = old.sum_P[there]
            self.above_P[here] = old.above_P[there]


class ScoreHistograms:
    """The histograms of the current bank; those of a probe that leaves the bank are dropped.

    Rows are buffered, because counting a thousand costs little more than counting one.
    """

    def __init__(self) -> None:
        self.bank = ring_messages.Bank(0, ())
        self.generated, self.prompt = ScoreHistogram(0), ScoreHistogram(0)
        self.edges: tuple[tuple[float, ...], ...] = ()
        self._edges_PE = np.zeros((0, NUM_EDGES + 1), np.float32)
        self._threshold_P = np.zeros(0, np.float32)
        self._pending: list[tuple[NDArray[np.void], NDArray[np.float32]]] = []
        self._num_pending = 0

    def add(
        self, bank: ring_messages.Bank, rows: NDArray[np.void], scores_RP: NDArray[np.float32]
    ) -> None:
        if bank is not self.bank:  # a reader has one object for each version
            self.count_pending()
            self._change_bank(bank)
        self._pending.append((rows, scores_RP))
        self._num_pending += len(rows)
        if self._num_pending >= BATCH_ROWS:
            self.count_pending()

    def count_pending(self) -> None:
        if not self._pending:
            return
        # Field by field, because numpy copies structured rows one element at a time.
        phase_R = np.concatenate([rows["phase"] for rows, _ in self._pending])
        flags_R = np.concatenate([rows["flags"] for rows, _ in self._pending])
        scores_RP = np.concatenate([scores_RP for _, scores_RP in self._pending])
        self._pending.clear()
        self._num_pending = 0
        is_first_R = flags_R & ring_messages.RECOMPUTED == 0  # others were counted already
        for phase, histogram in (
            (ring_messages.DECODE, self.generated),
            (ring_messages.PREFILL, self.prompt),
        ):
            is_kind_R = (phase_R == phase) & is_first_R
            if is_kind_R.any():
                scores_PN = np.ascontiguousarray(scores_RP[is_kind_R].T)
                histogram.add(scores_PN, self._edges_PE, self._threshold_P)

    def _change_bank(self, bank: ring_messages.Bank) -> None:
        infos = bank.probes
        there = {_identity(info): index for index, info in enumerate(self.bank.probes)}
        pairs = [(i, there[_identity(x)]) for i, x in enumerate(infos) if _identity(x) in there]
        generated, prompt = ScoreHistogram(len(infos)), ScoreHistogram(len(infos))
        generated.copy_counts(self.generated, pairs)
        prompt.copy_counts(self.prompt, pairs)
        self.bank, self.generated, self.prompt = bank, generated, prompt
        self.edges = tuple(map(bucket_edges, infos))
        with_infinity = [(*finite, np.inf) for finite in self.edges]
        self._edges_PE = np.array(with_infinity, np.float32).reshape(len(infos), NUM_EDGES + 1)
        thresholds = [np.inf if x.threshold is None else x.threshold for x in infos]
        self._threshold_P = np.array(thresholds, np.float32)


def _identity(info: ring_messages.ProbeInfo) -> tuple[str, str, tuple[float, ...]]:
    """A probe with another content or other buckets has another histogram."""
    return info.name, info.digest, bucket_edges(info)


class TimeHistogram:
    """A histogram of durations."""

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
    """A MetricsObserver; `on_scores` is called on the feed's thread, the rest on the event loop."""

    content_type: str = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scores = ScoreHistograms()
        self._lag = TimeHistogram(_LAG_EDGES_S)
        self._whole, self._first_token = TimeHistogram(_RUN_EDGES_S), TimeHistogram(_RUN_EDGES_S)
        self._ended = dict.fromkeys(OUTCOMES, 0)
        self._num_tokens = 0
        self._stopped: dict[str, int] = {}

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        with self._lock:
            self._scores.add(bank, rows, scores_RP)
            self._lag.add(max(0, time.monotonic_ns() - stamp_ns) / 1e9)

    def on_completion_end(self, end: CompletionEnd) -> None:
        with self._lock:
            self._ended[end.outcome] += 1
            self._whole.add(end.seconds)
            if end.first_token_seconds is not None:
                self._first_token.add(end.first_token_seconds)
            self._num_tokens += sum(choice.tokens for choice in end.choices)
            self._count_stops(end)

    def _count_stops(self, end: CompletionEnd) -> None:
        """Count by probe; the bound is for names that were never in the bank."""
        for name in filter(None, (choice.stopped for choice in end.choices)):
            if name in self._stopped or len(self._stopped) < _MAX_NAMES:
                self._stopped[name] = self._stopped.get(name, 0) + 1

    def text(self, counts: ProxyCounts) -> bytes:
        """Format a snapshot without holding the lock, so that no score waits for a scrape."""
        return generate_latest(self._snapshot(counts))

    def _snapshot(self, counts: ProxyCounts) -> _MetricsSnapshot:
        with self._lock:
            self._scores.count_pending()
            return _MetricsSnapshot(
                counts,
                dict(self._ended),
                self._num_tokens,
                dict(self._stopped),
                deepcopy(self._whole),
                deepcopy(self._first_token),
                deepcopy(self._lag),
                self._scores.bank,
                self._scores.edges,
                deepcopy(self._scores.generated),
                deepcopy(self._scores.prompt),
            )


@dataclass(frozen=True, eq=False)
class _MetricsSnapshot(Collector):
    """All metrics at one moment, in the order in which they are shown."""

    counts: ProxyCounts
    ended: Mapping[str, int]
    num_tokens: int
    stopped: Mapping[str, int]
    whole: TimeHistogram
    first_token: TimeHistogram
    lag: TimeHistogram
    bank: ring_messages.Bank
    edges: tuple[tuple[float, ...], ...]
    generated: ScoreHistogram
    prompt: ScoreHistogram

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "clairai_build", "This proxy.", value={"version": version("clairai")}
        )
        yield from _ring(self.counts)
        yield from _capture(self.counts.capture)
        yield self.lag.family("clairai_score_lag_seconds", "From the engine's ring to the proxy.")
        yield from self._completions()
        yield self._histogram(
            "clairai_generated_score", "Scores of generated tokens.", self.generated
        )
        yield self._histogram("clairai_prompt_score", "Scores of prompt tokens.", self.prompt)
        yield self._above()
        yield self._stops()

    def _completions(self) -> Iterator[Metric]:
        yield _gauge("clairai_streams", "Completions in the proxy now.", self.counts.streams)
        yield _gauge("clairai_runs", "Named runs held, ended ones too.", self.counts.runs)
        yield _counter("clairai_completions", "Completions begun.", self.counts.completions)
        ended = CounterMetricFamily(
            "clairai_completions_ended", "Completions, by how they ended.", labels=["outcome"]
        )
        for outcome, count in self.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        errors = self.counts.upstream_errors
        yield _counter("clairai_upstream_errors", "Failures of the engine's server.", errors)
        yield self._refused()
        yield _counter("clairai_tokens", "Tokens of scored completions.", self.num_tokens)
        yield self.whole.family("clairai_completion_seconds", "From the request to its last byte.")
        yield self.first_token.family(
            "clairai_first_token_seconds", "From the request to the engine's first token."
        )

    def _refused(self) -> Metric:
        family = CounterMetricFamily(
            "clairai_refused", "Requests that the proxy itself refused.", labels=["status"]
        )
        for status, count in self.counts.refused:
            family.add_metric([str(status)], count)
        return family

    def _histogram(self, name: str, documentation: str, histogram: ScoreHistogram) -> Metric:
        family = HistogramMetricFamily(name, documentation, labels=["probe"])
        columns = zip(
            *(self.bank.probes, self.edges),
            *(histogram.at_most_PE.tolist(), histogram.sum_P.tolist()),
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


def _ring(counts: ProxyCounts) -> Iterator[Metric]:
    ring = counts.ring
    yield _gauge("clairai_ring_attached", "1 while a ring is read.", int(ring.attached))
    yield _gauge("clairai_ring_lag_records", "Records published and not read yet.", ring.lag)
    yield _counter("clairai_ring_records", "Records read.", ring.records_delivered)
    yield _counter("clairai_ring_records_lost", "Overwritten before read.", ring.records_lost)
    yield _counter("clairai_rows", "Rows given to a completion here.", ring.rows)
    yield _counter("clairai_rows_orphaned", "Rows of other requests.", ring.orphaned)
    yield _counter("clairai_rows_mismatched", "Rows with a wrong token.", ring.mismatched)
    yield _counter("clairai_rows_lost", "Scores said to be lost.", counts.rows_lost)


def _capture(report: CaptureReport | None) -> Iterator[Metric]:
    if report is None:
        return
    up = GaugeMetricFamily(
        "clairai_capture_consumer_up", "0 while it is stopped or failed.", labels=["consumer"]
    )
    free = GaugeMetricFamily(
        "clairai_capture_free_bytes", "On its disk, less the reserve.", labels=["consumer"]
    )
    for one in report.consumers:
        up.add_metric([one.name], int(one.is_up))
        if one.free_nbytes is not None:
            free.add_metric([one.name], one.free_nbytes)
    lost = CounterMetricFamily(
        "clairai_capture_rows_lost", "Rows that were wanted and are missing.", labels=["reason"]
    )
    lost.add_metric(["staging"], report.dropped)
    lost.add_metric(["queue"], sum(one.refused for one in report.consumers))
    lost.add_metric(["consumer"], sum(one.lost for one in report.consumers))
    yield from (up, free, lost)
    yield _counter("clairai_capture_rows", "Rows given to consumers.", report.rows)


def _gauge(name: str, documentation: str, value: int) -> Metric:
    return GaugeMetricFamily(name, documentation, value)


def _counter(name: str, documentation: str, value: int) -> Metric:
    return CounterMetricFamily(name, documentation, value)
