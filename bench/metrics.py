"""What /metrics costs, per record of the ring and per scrape.

Records of 64 rows x 16 probes, random scores, which is the worst case for sorting them. Rows are
counted a thousand at a time; the mean over all records is what one costs the ring's thread. Times
are the thread's own, so that a busy machine does not count.
Run: python -m bench.metrics
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from clairai.proxy.observe.metrics import Metrics
from clairai.proxy.observe.observer import ProxyCounts, RingCounts
from clairai.wire import ring_messages
from scripts.numbers import stamp, table, write_section

NUM_ROWS, NUM_PROBES, NUM_RECORDS, NUM_SCRAPES = 64, 16, 32_000, 50
NUMBERS = ProxyCounts(RingCounts(), 0, 0, 0, {}, 0, 0)


def main() -> None:
    began_s = time.monotonic()
    metrics = Metrics()
    record_us = _spent_ns(lambda: _feed(metrics)) / NUM_RECORDS / 1e3
    scrape_ms = _spent_ns(lambda: _scrape(metrics)) / NUM_SCRAPES / 1e6
    rows = [["one record", f"{record_us:.1f} us"], ["one scrape", f"{scrape_ms:.1f} ms"]]
    shown = table(["", "CPU time, mean"], rows)
    print(shown)
    what = (
        f"Records of {NUM_ROWS} rows x {NUM_PROBES} probes with random scores, on the ring's "
        f"thread; a scrape has a thread of its own."
    )
    took = f"{time.monotonic() - began_s:.0f} s"
    write_section("Metrics", [stamp("python -m bench.metrics", took=took), what, shown])


def _feed(metrics: Metrics) -> None:
    infos = [
        ring_messages.ProbeInfo(f"p{i}", "post_block.1", "sigmoid", 0.5) for i in range(NUM_PROBES)
    ]
    bank = ring_messages.Bank(1, tuple(infos))
    rows = np.zeros(NUM_ROWS, ring_messages.ROW)
    rows["phase"] = ring_messages.DECODE
    random = np.random.default_rng(0)
    scores = [random.random((NUM_ROWS, NUM_PROBES), np.float32) for _ in range(97)]
    for index in range(NUM_RECORDS):
        metrics.on_scores(bank, rows, scores[index % len(scores)], time.monotonic_ns())


def _scrape(metrics: Metrics) -> None:
    for _ in range(NUM_SCRAPES):
        metrics.snapshot(NUMBERS)()


def _spent_ns(work: Callable[[], None]) -> int:
    began_ns = time.thread_time_ns()
    work()
    return time.thread_time_ns() - began_ns


if __name__ == "__main__":
    main()
