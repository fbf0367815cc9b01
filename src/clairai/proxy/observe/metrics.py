"""Prometheus metrics of the proxy, for GET /metrics; docs/metrics.md lists them.

There is no global registry: metrics of other libraries in the process are not shown, and two
proxies in one process do not add up.

P = probes of the bank, E = edges of a histogram, N = tokens, R = rows of a record
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, get_args

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
from clairai.proxy.observe.observer import (
    CompletionEnd,
    CoreRingCounts,
    HealthState,
    Observer,
    ProxyCounts,
    RingCounts,
    TimesReport,
)
from clairai.wire import ring_messages

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

    def report(self) -> tuple[list[int], float]:
        return list(self._counts), self._sum

    def add_report(self, report: tuple[list[int], float]) -> None:
        """Add what another histogram with these edges has counted."""
        counts, total = report
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        self._sum += total

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        at_most = np.cumsum(self._counts).tolist()
        names = [*(str(float(edge)) for edge in self._edges), "+Inf"]
        buckets = list(zip(names, at_most, strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class CompletionTimes:
    """How long completions took, and which rules have ended them; for the event loop alone."""

    def __init__(self) -> None:
        self.whole, self.first_token = TimeHistogram(_RUN_EDGES_S), TimeHistogram(_RUN_EDGES_S)
        self.stopped: dict[str, int] = {}  # by probe

    def add(self, end: CompletionEnd) -> None:
        self.whole.add(end.seconds)
        if end.first_token_seconds is not None:
            self.first_token.add(end.first_token_seconds)
        for name in filter(None, (choice.stopped for choice in end.choices)):
            self._add_stopped(name, 1)

    def report(self) -> TimesReport:
        return TimesReport(self.whole.report(), self.first_token.report(), dict(self.stopped))

    def add_report(self, report: TimesReport) -> None:
        self.whole.add_report(report.whole)
        self.first_token.add_report(report.first_token)
        for name, count in report.stopped.items():
            self._add_stopped(name, count)

    def _add_stopped(self, name: str, count: int) -> None:
        if name in self.stopped or len(self.stopped) < _MAX_NAMES:  # some were in no bank
            self.stopped[name] = self.stopped.get(name, 0) + count


class TimesObserver(Observer):
    """An observer of completions alone, for a process that reports to another."""

    reads_probes: bool = False

    def __init__(self) -> None:
        self._times = CompletionTimes()

    def on_scores(
        self,
        bank: ring_messages.Bank,
        rows: NDArray[np.void],
        scores_RP: NDArray[np.float32],
        stamp_ns: int,
    ) -> None:
        pass

    def on_completion_end(self, end: CompletionEnd) -> None:
        self._times.add(end)

    def report(self) -> TimesReport:
        return self._times.report()


class Metrics:
    """A MetricsObserver; `on_scores` is called on the feed's thread, the rest on the event loop."""

    content_type: str = CONTENT_TYPE_LATEST
    reads_probes = False

    def __init__(self, *, replica: str | None = None) -> None:
        self._replica = replica
        self._lock = threading.Lock()  # of what the feed's thread counts
        self._scores = ScoreHistograms()
        self._lag = TimeHistogram(_LAG_EDGES_S)
        self._times = CompletionTimes()

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
        self._times.add(end)

    def snapshot(
        self, counts: ProxyCounts, others: Sequence[TimesReport] = ()
    ) -> Callable[[], bytes]:
        """Completions are copied now, at the moment of `counts`; scores when it is formatted.

        The event loop does not take the lock: the feed's thread may count for milliseconds.
        """
        times = deepcopy(self._times)
        for report in others:
            times.add_report(report)
        return partial(self._format, counts, times)

    def _format(self, counts: ProxyCounts, times: CompletionTimes) -> bytes:
        """Format without holding the lock, so that no score waits for a scrape."""
        return generate_latest(self._copy(counts, times))

    def _copy(self, counts: ProxyCounts, times: CompletionTimes) -> _MetricsSnapshot:
        with self._lock:
            self._scores.count_pending()
            return _MetricsSnapshot(
                self._replica,
                counts,
                times,
                deepcopy(self._lag),
                self._scores.bank,
                self._scores.edges,
                deepcopy(self._scores.generated),
                deepcopy(self._scores.prompt),
            )


@dataclass(frozen=True, eq=False)
class _MetricsSnapshot(Collector):
    """All metrics, in the order in which they are shown."""

    replica: str | None
    counts: ProxyCounts
    times: CompletionTimes
    lag: TimeHistogram
    bank: ring_messages.Bank
    edges: tuple[tuple[float, ...], ...]
    generated: ScoreHistogram
    prompt: ScoreHistogram

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "clairai_build", "This proxy.", value={"version": version("clairai")}
        )
        if self.replica is not None:
            about = "The name of this server among several."
            yield InfoMetricFamily("clairai_replica", about, value={"replica": self.replica})
        yield from _engine(self.counts)
        yield from self._bank()
        yield from _ring(self.counts.ring)
        yield _counter("clairai_rows_lost", "Scores said to be lost.", self.counts.rows_lost)
        yield from _kept_scores(self.counts)
        yield from _capture(self.counts.capture)
        yield self.lag.family("clairai_score_lag_seconds", "From the engine's ring to the proxy.")
        yield from self._completions()
        yield self._histogram(
            "clairai_generated_score", "Scores of generated tokens.", self.generated
        )
        yield self._histogram("clairai_prompt_score", "Scores of prompt tokens.", self.prompt)
        yield self._above()
        yield self._stops()

    def _bank(self) -> Iterator[Metric]:
        """As of the newest record; without new weights ever, they have no version."""
        yield _gauge("clairai_bank_probes", "Probes in the bank.", len(self.bank.probes))
        if self.bank.weights is not None:
            about = "Version of the weights that serve; 0: those of the start."
            yield _gauge("clairai_weights_version", about, self.bank.weights)

    def _completions(self) -> Iterator[Metric]:
        counts, times = self.counts, self.times
        about = "Processes that answer completions."
        yield _gauge("clairai_completion_processes", about, counts.processes)
        about = "Completion processes started in the place of others that had ended."
        yield _counter("clairai_completion_process_restarts", about, counts.process_restarts)
        about = "Completions that ended because their process did."
        yield _counter("clairai_completions_cut_off", about, counts.cut_off)
        yield _gauge("clairai_streams", "Completions in the proxy now.", counts.streams)
        yield _gauge("clairai_runs", "Named runs held, ended ones too.", counts.runs)
        yield _counter("clairai_completions", "Completions begun.", counts.completions)
        about = "Completions, by how they ended."
        yield _counters("clairai_completions_ended", about, "outcome", counts.ended)
        about = "Completions that ended with an error, by class of HTTP status."
        yield _counters("clairai_completion_errors", about, "status", counts.errors)
        about = "Completions that the engine was asked for, by what of clairai they ask."
        yield _counters("clairai_completions_asked", about, "feature", counts.asked)
        about = "Failures of the engine's server."
        yield _counter("clairai_upstream_errors", about, counts.upstream_errors)
        refused = {str(status): count for status, count in counts.refused}
        about = "Requests that the proxy itself refused."
        yield _counters("clairai_refused", about, "status", refused)
        yield _requests(counts)
        yield _counter("clairai_tokens", "Tokens of scored completions.", counts.tokens)
        yield times.whole.family("clairai_completion_seconds", "From the request to its last byte.")
        yield times.first_token.family(
            "clairai_first_token_seconds", "From the request to the engine's first token."
        )

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
            family.add_metric([info.name], self.times.stopped.get(info.name, 0))
        return family


def _engine(counts: ProxyCounts) -> Iterator[Metric]:
    about = "Engines that were attached after the first."
    yield _counter("clairai_engine_restarts", about, counts.ring.restarts)
    if counts.health is None:
        return
    family = GaugeMetricFamily("clairai_health", "1 for the state of now.", labels=["state"])
    for state in get_args(HealthState):
        family.add_metric([state], int(state == counts.health))
    yield family


def _requests(counts: ProxyCounts) -> Metric:
    family = CounterMetricFamily(
        "clairai_requests",
        "Requests answered, by route and class of HTTP status.",
        labels=["route", "status"],
    )
    for (route, status), count in sorted(counts.answered.items()):
        family.add_metric([route, status], count)
    return family


def _ring(ring: RingCounts) -> Iterator[Metric]:
    yield _gauge("clairai_ring_attached", "1 while a ring is read.", int(ring.attached))
    yield _gauge("clairai_ring_lag_records", "Records published and not read yet.", ring.lag)
    yield _counter("clairai_ring_records", "Records read.", ring.records_delivered)
    yield _counter("clairai_ring_records_lost", "Overwritten before read.", ring.records_lost)
    yield _counter("clairai_rows", "Rows given to a completion here.", ring.rows)
    yield _counter("clairai_rows_orphaned", "Rows of other requests.", ring.orphaned)
    yield _counter("clairai_rows_mismatched", "Rows with a wrong token.", ring.mismatched)
    if ring.cores:
        yield from _core_rings(ring.cores)


def _core_rings(cores: Sequence[CoreRingCounts]) -> Iterator[Metric]:
    """The same by engine core, as vLLM numbers them in its label `engine`."""
    about = "1 while the ring of this engine core is read."
    attached = GaugeMetricFamily("clairai_core_ring_attached", about, labels=["engine"])
    about = "Records of this engine core published and not read yet."
    lag = GaugeMetricFamily("clairai_core_ring_lag_records", about, labels=["engine"])
    for number, core in enumerate(cores):
        attached.add_metric([str(number)], int(core.attached))
        lag.add_metric([str(number)], core.lag)
    yield from (attached, lag)
    counters = {
        "clairai_core_ring_records": ("Records of this core read.", "records_delivered"),
        "clairai_core_ring_records_lost": (
            "Of this core, overwritten before read.",
            "records_lost",
        ),
        "clairai_core_rows": ("Rows of this core given to a completion here.", "rows"),
    }
    for name, (about, field) in counters.items():
        values = {str(number): getattr(core, field) for number, core in enumerate(cores)}
        yield _counters(name, about, "engine", values)


def _kept_scores(counts: ProxyCounts) -> Iterator[Metric]:
    about = "Answers whose scores can be fetched by their id."
    yield _gauge("clairai_kept_answers", about, counts.kept_answers)
    yield _gauge("clairai_kept_bytes", "Memory of these scores.", counts.kept_bytes)
    about = "Of these answers, those that went before their time."
    yield _counter("clairai_kept_answers_dropped", about, counts.kept_dropped)


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
    yield from (up, free)
    lost = {
        "staging": report.dropped,
        "queue": sum(one.refused for one in report.consumers),
        "consumer": sum(one.lost for one in report.consumers),
    }
    about = "Rows that were wanted and are missing."
    yield _counters("clairai_capture_rows_lost", about, "reason", lost)
    yield _counter("clairai_capture_rows", "Rows given to consumers.", report.rows)
    about = "Rows held for a rule that was not met."
    yield _counter("clairai_capture_rows_discarded", about, report.discarded)


def _gauge(name: str, documentation: str, value: int) -> Metric:
    return GaugeMetricFamily(name, documentation, value)


def _counter(name: str, documentation: str, value: int) -> Metric:
    return CounterMetricFamily(name, documentation, value)


def _counters(name: str, documentation: str, label: str, values: Mapping[Any, int]) -> Metric:
    """One counter for each value of a label."""
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
