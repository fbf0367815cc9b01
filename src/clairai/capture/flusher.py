"""Takes answers whose rows one consumer was given; says when it has made them safe. One thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from clairai.capture.consumers import Consumer
from clairai.capture.results import Results
from clairai.capture.taken import Seat
from clairai.errors import StoreError

TIMEOUT_S: Final = 30.0


class Flusher:
    """Waits for one consumer, so that nobody else has to: not the others' answers either."""

    def __init__(self, name: str, consumer: Consumer, results: Results) -> None:
        self._name, self._consumer, self._results = name, consumer, results
        self._asked: set[Seat] = set()
        self._is_open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="clairai-flush", daemon=True)
        self._thread.start()

    def ask(self, seats: Iterable[Seat]) -> None:
        """Make these safe: all that was given of them."""
        with self._changed:
            self._asked.update(seats)
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever still waits for the consumer is not waited for: closing it ends that too."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _run(self) -> None:
        while seats := self._next():
            try:
                self._consumer.flush(TIMEOUT_S)
            except StoreError as error:
                # The consumer's own state says why, for as long as it lasts: ask again.
                self._results.waits(seats, error.reason)
            except Exception as error:  # of somebody's plugin
                self._results.waits(seats, f"{type(error).__name__}: {error}")
            else:
                self._results.safe(seats, self._name)

    def _next(self) -> set[Seat]:
        with self._changed:
            while self._is_open and not self._asked:
                self._changed.wait()
            seats, self._asked = self._asked, set()
            return seats if self._is_open else set()
