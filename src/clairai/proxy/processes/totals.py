"""Adds up the counts of all processes of a proxy, of those that have ended too.

The rings that processes read are the same ring. So records are counted by the first process alone;
rows, and whatever was lost, by each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from clairai.proxy.observe.metrics import CompletionTimes
from clairai.proxy.observe.observer import ProxyCounts, RingCounts, TimesReport
from clairai.proxy.processes.messages import Counts

_Label = TypeVar("_Label")


@dataclass(frozen=True)
class TotalCounts:
    """The counts of all processes, and the times of completions of all but the first."""

    counts: ProxyCounts
    times: Sequence[TimesReport] = ()


NOTHING: Final = Counts(
    0,
    ProxyCounts(
        RingCounts(), streams=0, runs=0, completions=0, ended={}, upstream_errors=0, rows_lost=0
    ),
    CompletionTimes().report(),
    [],
    has_read_on=True,
)


def add_counts(first: ProxyCounts, others: Sequence[ProxyCounts]) -> ProxyCounts:
    """The sum; what is known of the engine, and of records, is what the first process knows."""
    total = first
    for other in others:
        total = replace(
            total,
            ring=_add_ring(total.ring, other.ring),
            streams=total.streams + other.streams,
            runs=total.runs + other.runs,
            completions=total.completions + other.completions,
            ended=_add(total.ended, other.ended),
            tokens=total.tokens + other.tokens,
            errors=_add(total.errors, other.errors),
            asked=_add(total.asked, other.asked),
            answered=_add(total.answered, other.answered),
            upstream_errors=total.upstream_errors + other.upstream_errors,
            rows_lost=total.rows_lost + other.rows_lost,
            refused=tuple(sorted(_add(dict(total.refused), dict(other.refused)).items())),
            kept_answers=total.kept_answers + other.kept_answers,
            kept_bytes=total.kept_bytes + other.kept_bytes,
            kept_dropped=total.kept_dropped + other.kept_dropped,
            cut_off=total.cut_off + other.cut_off,
        )
    return total


def add_ended_process(before: Counts, last: Counts, now_s: float) -> Counts:
    """What stays of processes that have ended, with one more; `last` is what it last reported.

    Its completions have ended with it. What it held is gone.
    """
    ended = replace(
        last.counts,
        streams=0,
        runs=0,
        kept_answers=0,
        kept_bytes=0,
        kept_dropped=last.counts.kept_dropped + last.counts.kept_answers,
        ended=_add(last.counts.ended, {"error": last.counts.streams}),
        errors=_add(last.counts.errors, {"2xx": last.counts.streams}),
        cut_off=last.counts.cut_off + last.counts.streams,
    )
    times = CompletionTimes()
    times.add_report(before.times)
    times.add_report(last.times)
    for since_s in last.running_since_s:
        times.whole.add(now_s - since_s)
    return Counts(0, add_counts(before.counts, [ended]), times.report(), [], has_read_on=True)


def _add_ring(ring: RingCounts, other: RingCounts) -> RingCounts:
    return replace(
        ring,
        records_lost=ring.records_lost + other.records_lost,
        lag=max(ring.lag, other.lag),
        rows=ring.rows + other.rows,
        mismatched=ring.mismatched + other.mismatched,
    )


def _add(counts: Mapping[_Label, int], more: Mapping[_Label, int]) -> dict[_Label, int]:
    return dict(Counter(counts) + Counter(more)) | {
        label: 0 for label in (*counts, *more) if not counts.get(label) and not more.get(label)
    }
