"""Takes what the clerk knows of captured answers; tells the engine what has changed. One thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

from clairai.capture.collector import Collector
from clairai.capture.consumers import Consumer
from clairai.capture.line import Line
from clairai.capture.tickets import Report, Standing

COUNTS_S: Final = 0.25  # numbers alone are told so often
TOGETHER_S: Final = 0.003  # what else changes, with what changes in this time after it
THOROUGH_S: Final = 1.0  # consumers are asked for their losses so often


class Teller:
    """Reports go one way, and are not answered."""

    def __init__(self, line: Line, collector: Collector, consumers: Mapping[str, Consumer]) -> None:
        self._line, self._collector, self._consumers = line, collector, consumers
        self._last: Report | None = None
        self._asked_s = 0.0
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="clairai-tell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The last report says how all has ended."""
        self._is_open = False
        self._collector.results.is_news.set()
        self._thread.join()

    def _run(self) -> None:
        is_news = self._collector.results.is_news
        try:
            while self._is_open:
                if is_news.wait(COUNTS_S):
                    time.sleep(TOGETHER_S)
                is_news.clear()
                self._tell()
            self._tell()
        except OSError:
            pass  # the engine is gone: nobody is left to be told

    def _tell(self) -> None:
        # Before the answers: rows that come in between are then told of, and not counted twice.
        delivered = self._collector.delivered
        results = self._collector.results
        is_thorough = not self._is_open or time.monotonic() > self._asked_s + THOROUGH_S
        if is_thorough:
            self._asked_s = time.monotonic()
        told = tuple(results.changes(is_thorough=is_thorough))
        totals = results.totals()
        report = Report(
            delivered,
            told,
            tuple(
                Standing(name, one.state.name, one.state.reason)
                for name, one in self._consumers.items()
            ),
            totals.rows,
            totals.dropped,
            totals.discarded,
            self._collector.pending_nbytes,
        )
        if told or report != self._last:
            self._last = report
            self._line.say(report)
            self._line.post_all()
