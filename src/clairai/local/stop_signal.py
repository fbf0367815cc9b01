"""Turns the signals that end a command into a flag to check between two pieces of work."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A shell, `make` and `timeout` may each forward the same Ctrl-C.
_REPEAT_S: Final = 0.5


class StopSignal:
    """Within this context a signal only makes the object return True when it is called."""

    def __init__(self) -> None:
        self._is_stopped = self._is_urgent = False
        self._stopped_s = 0.0
        self._handlers: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        return self._is_stopped

    def is_urgent(self) -> bool:
        """True after a second signal."""
        return self._is_urgent

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            # under nohup, an ignored signal stays ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # from getsignal

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self._is_stopped:
            self._is_stopped, self._stopped_s = True, now_s
        self._is_urgent |= now_s - self._stopped_s > _REPEAT_S
