"""Takes the signals that end a command; gives a question to ask between two pieces of work."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Inside the block a signal stops nothing by itself: it turns the answer to True."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        return self._is_asked

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            # nohup: what was ignored when we came stays ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked = True
