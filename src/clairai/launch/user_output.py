"""Prints a command's lines to stdout, as text or as JSON, and the progress of an engine's start."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from rich.console import Console
from rich.text import Text

from clairai.launch.engine_log import EngineLog
from clairai.proxy.observe import log_lines
from clairai.proxy.observe.log_lines import LogFormat

LINE_S: Final = 10.0
_MARGIN: Final = 4  # the spinner, and the cursor after the last character


@dataclass(frozen=True)
class UserOutput:
    """Lines for the user. `console` is None where every line is a JSON object."""

    console: Console | None

    @classmethod
    def of(cls, form: LogFormat) -> Self:
        """Set up logging for the process: these lines are log lines like any other."""
        if form == "json":
            log_lines.configure_logging(form, _write)
            return cls(None)
        console = Console(highlight=False)
        # On a terminal the console keeps lines above the moving progress line.
        print_line = partial(console.print, markup=False, soft_wrap=True)
        log_lines.configure_logging(form, print_line if console.is_terminal else _write)
        return cls(console)

    def say(self, line: str) -> None:
        logging.getLogger(log_lines.LOGGER).info(line)

    def announce(self, lines: Sequence[str]) -> None:
        """All lines as text; only the first, which names the address, as JSON."""
        for line in lines if self.console is not None else lines[:1]:
            self.say(line)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def show_start_progress(
    console: Console | None, log: EngineLog | None, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """A function to call often: it moves one line on a terminal, or prints a line now and then.

    Without a log file vLLM's own lines are visible, and it does nothing.
    """
    began_s = time.monotonic()
    if log is None:
        yield lambda: None
        return
    if console is None or not console.is_terminal:
        yield _ProgressLines(log, say, began_s).tick
        return
    with console.status("") as status:

        def tick() -> None:
            doing = ": ".join(filter(None, (log.stage(), log.newest())))
            line = f"{time.monotonic() - began_s:3.0f} s  {doing}"
            status.update(Text(line[: console.width - _MARGIN]))

        yield tick


class _ProgressLines:
    """A line for each new stage, and one every LINE_S while nothing changes."""

    def __init__(self, log: EngineLog, say: Callable[[str], None], began_s: float) -> None:
        self._log, self._say, self._began_s = log, say, began_s
        self._last_stage = ""
        self._due_s = 0.0

    def tick(self) -> None:
        now_s, stage = time.monotonic(), self._log.stage()
        if stage == self._last_stage and now_s < self._due_s:
            return
        self._last_stage, self._due_s = stage, now_s + LINE_S
        self._say(f"vLLM is {stage}, {now_s - self._began_s:.0f} s")
