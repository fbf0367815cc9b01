"""Takes the file a vLLM server writes to; gives the words that say where it is and why it ended."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_TAIL_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 15
_PREFIX: Final = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ \S+ \S+ \[[^]]*\] )?")
_ERROR: Final = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")


@dataclass(frozen=True)
class EngineLog:
    path: Path

    def create(self) -> IO[bytes]:
        """A new file, whatever was there: a log tells of one server."""
        self.path.unlink(missing_ok=True)
        return self.path.open("xb")

    def lines(self) -> list[str]:
        """The end of it, without empty lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def newest(self) -> str:
        """What it is doing, without vLLM's prefix of process, time and file."""
        lines = self.lines()
        return _PREFIX.sub("", lines[-1]).strip() if lines else ""

    def first_error(self) -> str | None:
        """vLLM's last error only says that there was one: the first says which."""
        found = (_ERROR.search(line) for line in self.lines())
        return next((match[1] for match in found if match is not None), None)

    def epitaph(self) -> str:
        told = [f"last lines of {self.path}:", *self.lines()[-_TAIL_LINES:]]
        cause = self.first_error()
        return "\n".join(told if cause is None else [*told, f"first error: {cause}"])
