"""A parser reads from the Prometheus text what rows and completions put into it."""

from __future__ import annotations

import math
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from clairai.proxy.capture_watch import CaptureReport, ConsumerReport
from clairai.proxy.observe.metrics import BATCH_ROWS, NUM_EDGES, Metrics, bucket_edges
from clairai.proxy.observe.observer import ChoiceResult, CompletionEnd, ProxyCounts, RingCounts
from clairai.wire import ring_messages

NUMBERS = ProxyCounts(
    RingCounts(
        attached=True,
        records_delivered=10,
        records_lost=2,
        lag=3,
        restarts=2,
        rows=40,
        orphaned=5,
        mismatched=1,
    ),
    streams=7,
    runs=4,
    completions=20,
    ended={"done": 6, "cancelled": 4, "error": 3},
    errors={"2xx": 0, "4xx": 2, "5xx": 1},
    asked={"scores": 12, "capture": 2},
    answered={("POST /v1/completions", "2xx"): 17, ("other", "4xx"): 1},
    refused=((400, 3), (503, 2)),
    upstream_errors=8,
    rows_lost=9,
    tokens=640,
    kept_answers=12,
    kept_bytes=4096,
    kept_dropped=2,
    health="degraded",
    capture=CaptureReport(
        consumers=(ConsumerReport("fs", "stopped", "full", 1.0, refused=2, lost=1, free_nbytes=5),),
        rows=90,
        dropped=4,
        dropping_since=None,
        discarded=6,
    ),
)
LABELS = {
    "version",
    "probe",
    "outcome",
    "status",
    "feature",
    "route",
    "state",
    "consumer",
    "reason",
}
SIGMOID = ring_messages.ProbeInfo("code", "post_block.1", "sigmoid", threshold=0.5, digest="d1")
PLAIN = ring_messages.ProbeInfo("tone", "post_block.1", digest="d2")


def _rows(*phases: int, flags: int = 0) -> NDArray[np.void]:
    rows = np.zeros(len(phases), ring_messages.ROW)
    rows["phase"] = phases
    rows["flags"] = flags
    return rows


def _feed(
    metrics: Metrics,
    bank: ring_messages.Bank,
    *scores: tuple[float, ...],
    phase: int = ring_messages.DECODE,
) -> None:
    metrics.on_scores(bank, _rows(*[phase] * len(scores)), np.array(scores, np.float32), 1)


def _samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    text = metrics.snapshot(NUMBERS)().decode()
    return {
        (
            sample.name,
            tuple(dict(sorted(sample.labels.items(), reverse=True)).values()),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _end(outcome: Any, **changes: Any) -> CompletionEnd:
    choice = ChoiceResult(0, tokens=12, count=11, lost=1, finish_reason="stop", probes=())
    fields: dict[str, Any] = {"seconds": 0.3, "choices": (choice,)} | changes
    return CompletionEnd("chatcmpl-1", "m", "/v1/chat/completions", outcome, **fields)


def test_counts_of_ring_and_completions_are_shown_as_they_are() -> None:
    samples = _samples(Metrics())
    expected = {
        "clairai_ring_attached": 1,
        "clairai_ring_lag_records": 3,
        "clairai_ring_records_total": 10,
        "clairai_ring_records_lost_total": 2,
        "clairai_rows_total": 40,
        "clairai_rows_orphaned_total": 5,
        "clairai_rows_mismatched_total": 1,
        "clairai_rows_lost_total": 9,
        "clairai_streams": 7,
        "clairai_runs": 4,
        "clairai_completions_total": 20,
        "clairai_upstream_errors_total": 8,
        "clairai_tokens_total": 640,
        "clairai_kept_answers": 12,
        "clairai_kept_bytes": 4096,
        "clairai_kept_answers_dropped_total": 2,
        "clairai_engine_restarts_total": 2,
        "clairai_capture_rows_total": 90,
        "clairai_capture_rows_discarded_total": 6,
    }
    assert {name: samples[name, ()] for name in expected} == expected


def test_counts_with_a_label_are_shown_by_its_values() -> None:
    samples = _samples(Metrics())
    expected = {
        ("clairai_completions_ended_total", ("done",)): 6,
        ("clairai_completions_ended_total", ("cancelled",)): 4,
        ("clairai_completions_ended_total", ("error",)): 3,
        ("clairai_completion_errors_total", ("2xx",)): 0,
        ("clairai_completion_errors_total", ("4xx",)): 2,
        ("clairai_completions_asked_total", ("scores",)): 12,
        ("clairai_completions_asked_total", ("capture",)): 2,
        ("clairai_requests_total", ("2xx", "POST /v1/completions")): 17,
        ("clairai_requests_total", ("4xx", "other")): 1,
        ("clairai_refused_total", ("503",)): 2,
        ("clairai_capture_consumer_up", ("fs",)): 0,
        ("clairai_capture_free_bytes", ("fs",)): 5,
        ("clairai_capture_rows_lost_total", ("staging",)): 4,
        ("clairai_health", ("starting",)): 0,
        ("clairai_health", ("ready",)): 0,
        ("clairai_health", ("degraded",)): 1,
        ("clairai_health", ("failed",)): 0,
    }
    assert {key: samples[key] for key in expected} == expected


def test_the_bank_of_the_newest_record_says_which_weights_serve() -> None:
    metrics = Metrics()
    _feed(metrics, ring_messages.Bank(1, (SIGMOID, PLAIN)), (0.5, 0.5))
    samples = _samples(metrics)
    assert samples["clairai_bank_probes", ()] == 2
    assert ("clairai_weights_version", ()) not in samples  # no weights are ever sent to it
    _feed(metrics, ring_messages.Bank(2, (SIGMOID,), weights=7), (0.5,))
    assert _samples(metrics)["clairai_weights_version", ()] == 7


def test_a_completion_that_ends_while_a_scrape_is_formatted_is_in_the_next_one() -> None:
    metrics = Metrics()
    metrics.on_completion_end(_end("done"))
    format_text = metrics.snapshot(NUMBERS)
    metrics.on_completion_end(_end("done", first_token_seconds=0.1))
    for text, expected in ((format_text(), 1), (metrics.snapshot(NUMBERS)(), 2)):
        assert f"clairai_completion_seconds_count {expected:.1f}" in text.decode()


def test_every_counter_ends_in_total_and_every_name_is_one_of_prometheus() -> None:
    for family in text_string_to_metric_families(Metrics().snapshot(NUMBERS)().decode()):
        assert re.fullmatch(r"clairai_[a-z_]+", family.name)
        assert family.documentation
        for sample in family.samples:
            assert family.type != "counter" or sample.name.endswith("_total")
            assert set(sample.labels) <= LABELS | ({"le"} if family.type == "histogram" else set())


def test_scores_are_in_the_bucket_they_belong_to_by_probe() -> None:
    metrics = Metrics()
    bank = ring_messages.Bank(1, (SIGMOID, PLAIN))
    _feed(metrics, bank, (0.5, -2.0), (0.04, 5.0), (1.0, 1000.0))
    samples = _samples(metrics)
    bucket = "clairai_generated_score_bucket"
    assert samples[bucket, ("code", "0.01")] == 0
    assert samples[bucket, ("code", "0.05")] == 1
    assert samples[bucket, ("code", "0.5")] == 2  # an edge is in its own bucket
    assert samples[bucket, ("code", "0.999")] == 2
    assert samples[bucket, ("code", "+Inf")] == 3
    assert samples[bucket, ("tone", "-1.0")] == 1
    assert samples[bucket, ("tone", "100.0")] == 2
    assert samples["clairai_generated_score_count", ("tone",)] == 3
    assert samples["clairai_generated_score_sum", ("code",)] == pytest.approx(1.54)
    assert samples["clairai_generated_above_threshold_total", ("code",)] == 2
    assert ("clairai_generated_above_threshold_total", ("tone",)) not in samples


def test_prompt_and_generated_tokens_are_counted_apart_and_marks_not_at_all() -> None:
    metrics = Metrics()
    rows = _rows(
        ring_messages.PREFILL,
        ring_messages.PREFILL,
        ring_messages.DECODE,
        ring_messages.CACHED,
        ring_messages.FINISHED,
    )
    metrics.on_scores(ring_messages.Bank(1, (SIGMOID,)), rows, np.full((5, 1), 0.7, np.float32), 1)
    samples = _samples(metrics)
    assert samples["clairai_prompt_score_count", ("code",)] == 2
    assert samples["clairai_generated_score_count", ("code",)] == 1


def test_a_row_that_was_forwarded_again_is_counted_once() -> None:
    metrics = Metrics()
    bank = ring_messages.Bank(1, (SIGMOID,))
    _feed(metrics, bank, (0.7,))
    rows = _rows(ring_messages.DECODE, flags=ring_messages.RECOMPUTED)
    metrics.on_scores(bank, rows, np.array([[0.7]], np.float32), 1)
    assert _samples(metrics)["clairai_generated_score_count", ("code",)] == 1


def test_scores_that_are_not_finite_spoil_no_sum() -> None:
    metrics = Metrics()
    _feed(
        metrics, ring_messages.Bank(1, (SIGMOID,)), (math.nan,), (math.inf,), (-math.inf,), (0.25,)
    )
    samples = _samples(metrics)
    assert samples["clairai_generated_score_count", ("code",)] == 1
    assert samples["clairai_generated_score_sum", ("code",)] == 0.25
    assert samples["clairai_generated_above_threshold_total", ("code",)] == 0
    assert samples["clairai_generated_score_bucket", ("code", "0.001")] == 0


def test_a_probe_whose_scores_can_be_negative_has_no_sum_because_it_could_go_down() -> None:
    metrics = Metrics()
    _feed(metrics, ring_messages.Bank(1, (SIGMOID, PLAIN)), (0.5, -3.0))
    samples = _samples(metrics)
    assert ("clairai_generated_score_sum", ("code",)) in samples
    assert ("clairai_generated_score_sum", ("tone",)) not in samples


def test_a_probe_that_stays_in_the_bank_keeps_its_counts_and_one_that_leaves_is_gone() -> None:
    metrics = Metrics()
    _feed(metrics, ring_messages.Bank(1, (PLAIN, SIGMOID)), (1.0, 0.75), (1.0, 0.25))
    _feed(metrics, ring_messages.Bank(2, (SIGMOID,)), (0.5,))
    samples = _samples(metrics)
    assert samples["clairai_generated_score_sum", ("code",)] == 1.5
    assert samples["clairai_generated_score_count", ("code",)] == 3
    assert samples["clairai_generated_above_threshold_total", ("code",)] == 2
    assert not [key for key in samples if "tone" in key[1]]


def test_another_probe_under_the_same_name_starts_from_nothing() -> None:
    metrics = Metrics()
    _feed(metrics, ring_messages.Bank(1, (SIGMOID,)), (0.7,))
    other = ring_messages.ProbeInfo(
        "code", "post_block.1", "sigmoid", threshold=0.5, digest="other"
    )
    _feed(metrics, ring_messages.Bank(2, (other,)), (0.2,))
    assert _samples(metrics)["clairai_generated_score_sum", ("code",)] == pytest.approx(0.2)


def test_there_are_as_many_series_as_the_bank_has_probes_whatever_comes_and_goes() -> None:
    metrics = Metrics()
    for version in range(30):
        probes = tuple(ring_messages.ProbeInfo(f"p{version}.{i}", "post_block.1") for i in range(3))
        _feed(metrics, ring_messages.Bank(version, probes), (0.0, 0.0, 0.0))
    names = {labels[0] for name, labels in _samples(metrics) if name.endswith("d_score_count")}
    assert names == {"p29.0", "p29.1", "p29.2"}


def test_a_bank_without_probes_is_shown_as_such() -> None:
    metrics = Metrics()
    metrics.on_scores(
        ring_messages.Bank(1, ()), _rows(ring_messages.DECODE), np.zeros((1, 0), np.float32), 1
    )
    assert not [key for key in _samples(metrics) if key[0].endswith("_score_count")]


@settings(deadline=None)
@given(
    st.lists(st.floats(-200, 200, width=32), max_size=60),
    st.sampled_from(
        [SIGMOID, PLAIN, ring_messages.ProbeInfo("c", "post_block.1", calibration=(-3.0, 4.0))]
    ),
)
def test_every_bucket_is_what_counting_one_by_one_gives(
    scores: list[float], info: ring_messages.ProbeInfo
) -> None:
    metrics = Metrics()
    bank = ring_messages.Bank(1, (info,))
    for score in scores:
        _feed(metrics, bank, (score,))
    samples = _samples(metrics)
    for edge in bucket_edges(info) if scores else ():
        at_most = sum(np.float32(score) <= np.float32(edge) for score in scores)
        key = ("clairai_generated_score_bucket", (info.name, str(float(edge))))
        assert samples[key] == at_most


def test_edges_span_the_calibration_of_a_probe_that_has_one() -> None:
    made = bucket_edges(
        ring_messages.ProbeInfo("c", "post_block.1", "sigmoid", calibration=(-7.0, 7.0))
    )
    assert (made[0], made[7], made[-1], len(made)) == (-7.0, 0.0, 7.0, NUM_EDGES)
    for activation in ("none", "relu", "sigmoid"):
        fixed = bucket_edges(ring_messages.ProbeInfo("c", "post_block.1", activation))
        assert len(fixed) == NUM_EDGES
        assert sorted(set(fixed)) == list(fixed)


def test_what_is_held_back_to_be_counted_together_is_bounded() -> None:
    metrics = Metrics()
    bank = ring_messages.Bank(1, (SIGMOID,))
    for _ in range(BATCH_ROWS):
        _feed(metrics, bank, (0.5,))
        assert len(metrics._scores._pending) < BATCH_ROWS
    assert metrics._scores._pending == []


def test_completions_are_counted_by_their_times() -> None:
    metrics = Metrics()
    for outcome in ("done", "done", "cancelled"):
        metrics.on_completion_end(
            _end(outcome, first_token_seconds=0.02 if outcome == "done" else None)
        )
    samples = _samples(metrics)
    assert samples["clairai_first_token_seconds_count", ()] == 2
    assert samples["clairai_first_token_seconds_bucket", ("0.025",)] == 2
    assert samples["clairai_completion_seconds_bucket", ("0.25",)] == 0
    assert samples["clairai_completion_seconds_bucket", ("0.5",)] == 3
    assert samples["clairai_completion_seconds_sum", ()] == pytest.approx(0.9)


def test_the_lag_of_scores_is_from_publishing_to_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr("clairai.proxy.observe.metrics.time.monotonic_ns", lambda: now_ns)
    scores = np.array([[0.5]], np.float32)
    for stamp_ns in (now_ns - 3_000_000_000, now_ns + 3_000_000_000):  # late, and a clock ahead
        metrics.on_scores(
            ring_messages.Bank(1, (SIGMOID,)), _rows(ring_messages.DECODE), scores, stamp_ns
        )
    samples = _samples(metrics)
    assert samples["clairai_score_lag_seconds_count", ()] == 2
    assert samples["clairai_score_lag_seconds_bucket", ("1.0",)] == 1
    assert samples["clairai_score_lag_seconds_bucket", ("5.0",)] == 2


def test_nothing_is_shared_between_two_proxies_or_with_other_libraries() -> None:
    first, second = Metrics(), Metrics()
    first.on_completion_end(_end("done"))
    assert _samples(first)["clairai_completion_seconds_count", ()] == 1
    assert _samples(second)["clairai_completion_seconds_count", ()] == 0
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("clairai")]
    assert all(name.startswith("clairai_") for name, _ in _samples(first))


def test_scores_may_come_while_somebody_scrapes() -> None:
    metrics = Metrics()
    bank = ring_messages.Bank(1, (SIGMOID,))
    rows, scores = _rows(*[ring_messages.DECODE] * 64), np.full((64, 1), 0.5, np.float32)

    def feed() -> None:
        for _ in range(500):
            metrics.on_scores(bank, rows, scores, 1)

    feeding = threading.Thread(target=feed)
    feeding.start()
    seen = []
    while feeding.is_alive():
        samples = _samples(metrics)
        seen.append(samples.get(("clairai_generated_score_count", ("code",)), 0.0))
        assert samples.get(("clairai_generated_score_bucket", ("code", "0.5")), 0.0) == seen[-1]
    feeding.join()
    assert seen == sorted(seen)
    assert _samples(metrics)["clairai_generated_score_count", ("code",)] == 500 * 64


def test_nothing_is_counted_while_a_snapshot_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, bank = Metrics(), ring_messages.Bank(1, (SIGMOID,))
    _feed(metrics, bank, (0.5,))
    feeding = threading.Thread(target=_feed, args=(metrics, bank, (0.5,)))

    def count_pending() -> None:
        feeding.start()
        feeding.join(0.1)
        assert feeding.is_alive()

    monkeypatch.setattr(metrics._scores, "count_pending", count_pending)
    metrics.snapshot(NUMBERS)()
    feeding.join()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "dir/name", "ünïcode"])
def test_any_probe_name_survives_the_text_format(name: str) -> None:
    metrics = Metrics()
    _feed(metrics, ring_messages.Bank(1, (ring_messages.ProbeInfo(name, "post_block.1"),)), (1.0,))
    assert _samples(metrics)["clairai_generated_score_count", (name,)] == 1
