"""Reads a vLLM server's log file: how far its start is, and why it ended."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_TAIL_BYTES: Final = 1 << 20
_TAIL_LINES: Final = 15
_MAX_BYTES: Final = 32 << 20
_PREFIX: Final = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ \S+ \S+ \[[^]]*\] )?")
# Lines that vLLM 0.26 to 0.32 writes while it starts; the newest match counts.
_STAGES: Final = (
    (re.compile("Initializing a V1 LLM engine"), "setting up"),
    (re.compile("Starting to load model|Loading .*checkpoint shards"), "loading the weights"),
    (re.compile("Model loading took|Loading weights took"), "warming up"),
    (re.compile("Dynamo bytecode|Compiling a graph|torch.compile t[ao]"), "compiling"),
    (re.compile("KV cache size"), "warming up"),
    (re.compile("Capturing CUDA graphs"), "capturing graphs"),
    (re.compile("Graph capturing finished|Starting vLLM server"), "opening its server"),
)
_FIRST_STAGE: Final = "importing vLLM"
_ERROR_LINE: Final = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")


@dataclass(frozen=True)
class EngineLog:
    """One server's log, on a disk that it must not fill."""

    path: Path

    def create(self) -> IO[bytes]:
        """A new file for one server; the log before it is kept as `.old`."""
        if self.path.exists():
            self.path.replace(f"{self.path}.old")
        # Appending, so that the writer continues at the start after trim() truncates the file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.fdopen(os.open(self.path, flags, 0o600), "wb")

    def trim(self) -> None:
        """Move a long log to `.old` and go on with an empty one."""
        if self.path.exists() and self.path.stat().st_size > _MAX_BYTES:
            shutil.move(shutil.copy(self.path, f"{self.path}.new"), f"{self.path}.old")
            os.truncate(self.path, 0)

    def lines(self) -> list[str]:
        """The last lines, without empty ones."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def newest(self) -> str:
        """The last line, without vLLM's prefix of process, time and file."""
        lines = self.lines()
        return _PREFIX.sub("", lines[-1]).strip() if lines else ""

    def stage(self) -> str:
        """How far the start is, in fixed words: nothing of the log itself is repeated."""
        for line in reversed(self.lines()):
            for pattern, stage in _STAGES:
                if pattern.search(line):
                    return stage
        return _FIRST_STAGE

    def first_error(self) -> str | None:
        """The first error names the cause; vLLM's last one only says that there was one."""
        found = (_ERROR_LINE.search(line) for line in self.lines())
        return next((match[1] for match in found if match is not None), None)

    def describe_death(self) -> str:
        """The last lines and the first error."""
        shown = [f"last lines of {self.path}:", *self.lines()[-_TAIL_LINES:]]
        cause = self.first_error()
        return "\n".join(shown if cause is None else [*shown, f"first error: {cause}"])
