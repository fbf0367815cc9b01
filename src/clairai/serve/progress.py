"""Takes the log of a vLLM that starts; shows what it is doing, for as long as that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.text import Text

from clairai.serve.log import EngineLog

LINE_S: Final = 10.0
_MARGIN: Final = 4  # the spinner, and the cursor after the last character


@contextmanager
def progress(
    console: Console | None, log: EngineLog | None, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """A tick to call often: one moving line on a terminal, else a plain line now and then.

    Without a log to look into, vLLM's own lines are seen and there is nothing to add.
    """
    began_s = time.monotonic()
    if log is None:
        yield lambda: None
        return
    if console is None or not console.is_terminal:
        yield _Lines(log, say, began_s).tick
        return
    with console.status("") as status:

        def tick() -> None:
            doing = ": ".join(filter(None, (log.stage(), log.newest())))
            line = f"{time.monotonic() - began_s:3.0f} s  {doing}"
            status.update(Text(line[: console.width - _MARGIN]))

        yield tick


class _Lines:
    """A line for each new stage, and one every LINE_S while nothing changes."""

    def __init__(self, log: EngineLog, say: Callable[[str], None], began_s: float) -> None:
        self._log, self._say, self._began_s = log, say, began_s
        self._said = ""
        self._due_s = 0.0

    def tick(self) -> None:
        now_s, stage = time.monotonic(), self._log.stage()
        if stage == self._said and now_s < self._due_s:
            return
        self._said, self._due_s = stage, now_s + LINE_S
        self._say(f"vLLM is {stage}, {now_s - self._began_s:.0f} s")
