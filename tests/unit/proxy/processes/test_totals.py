"""The counts of all processes add up, whatever becomes of a process."""

from __future__ import annotations

from clairai.proxy.observe.metrics import CompletionTimes
from clairai.proxy.observe.observer import ProxyCounts, RingCounts
from clairai.proxy.processes.messages import Counts
from clairai.proxy.processes.totals import NOTHING, add_counts, add_ended_process


def counts(num: int) -> ProxyCounts:
    return ProxyCounts(
        RingCounts(
            attached=True,
            records_delivered=100,
            records_lost=num,
            lag=num,
            rows=10 * num,
            orphaned=5,
            mismatched=num,
        ),
        streams=num,
        runs=num,
        completions=3 * num,
        ended={"done": num, "cancelled": 0, "error": num},
        upstream_errors=num,
        rows_lost=num,
        tokens=num,
        errors={"4xx": num, "5xx": 0},
        asked={"scores": num},
        answered={("GET /a", "2xx"): num},
        refused=((400, num), (500 + num, 1)),
        kept_answers=num,
        kept_bytes=num,
        kept_dropped=num,
        health="ready",
    )


def report(num: int) -> Counts:
    times = CompletionTimes()
    for _ in range(2 * num):
        times.whole.add(1.0)
    return Counts(0, counts(num), times.report(), [9.0] * num, has_read_on=True)


def test_counts_of_processes_are_added() -> None:
    total = add_counts(counts(1), [counts(2), counts(3)])
    assert (total.streams, total.runs, total.completions, total.tokens) == (6, 6, 18, 6)
    assert total.ended == {"done": 6, "cancelled": 0, "error": 6}
    assert total.errors == {"4xx": 6, "5xx": 0}
    assert total.answered == {("GET /a", "2xx"): 6}
    assert dict(total.refused) == {400: 6, 501: 1, 502: 1, 503: 1}
    assert (total.kept_answers, total.kept_bytes, total.kept_dropped) == (6, 6, 6)
    assert total.health == "ready"


def test_the_ring_is_one_however_many_read_it() -> None:
    ring = add_counts(counts(1), [counts(2), counts(3)]).ring
    assert (ring.records_delivered, ring.records_lost, ring.lag) == (100, 6, 3)
    assert (ring.rows, ring.mismatched, ring.attached) == (60, 6, True)


def test_the_completions_of_a_process_end_with_it_and_its_counts_stay() -> None:
    ended = add_ended_process(NOTHING, report(2), now_s=10.0)
    ended = add_ended_process(ended, report(1), now_s=10.0)
    kept = ended.counts
    assert (kept.streams, kept.runs, kept.kept_answers, kept.kept_bytes) == (0, 0, 0, 0)
    assert kept.kept_dropped == 2 * 3  # those that it had dropped, and those that it kept
    assert (kept.completions, kept.cut_off) == (9, 3)
    assert kept.ended == {"done": 3, "cancelled": 0, "error": 6}
    assert kept.errors == {"4xx": 3, "5xx": 0, "2xx": 3}
    assert sum(kept.ended.values()) == kept.completions == sum(ended.times.whole[0])
    assert kept.ring.rows == 30
