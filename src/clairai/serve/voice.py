"""Takes lines for whoever started us; gives them to stdout, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from rich.console import Console

from clairai.stream import jsonlog
from clairai.stream.jsonlog import Format


@dataclass(frozen=True)
class Voice:
    """`console` is where more than lines may be drawn; None where every line is a JSON object."""

    console: Console | None

    @classmethod
    def of(cls, form: Format) -> Self:
        """Sets up logging for the process: our own lines are log lines like any other."""
        if form == "json":
            jsonlog.configure(form, _write)
            return cls(None)
        console = Console(highlight=False)
        # Above what else is drawn there; a file takes lines as they are.
        draw = partial(console.print, markup=False, soft_wrap=True)
        jsonlog.configure(form, draw if console.is_terminal else _write)
        return cls(console)

    def say(self, line: str) -> None:
        logging.getLogger(jsonlog.LOGGER).info(line)

    def announce(self, lines: Sequence[str]) -> None:
        """All of it for a person; the first line, which says it all, for a machine."""
        for line in lines if self.console is not None else lines[:1]:
            self.say(line)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
