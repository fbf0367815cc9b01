"""Finds the error that ended a vLLM server in its log, and no other error that the log has.

A server logs many errors that it survives, such as refused requests, and those can hold a client's
text. vLLM 0.26 to 0.32 writes `(PROCESS pid=N) LEVEL DATE TIME [FILE:LINE] ` before *each* line of
a record (logging_utils/formatter.py), so a client's text never begins a line by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

# v1/engine/core.py, run_engine_core: written once, by a core that ends.
_CORE_ENDS: Final = ("EngineCore encountered a fatal error.", "EngineCore failed to start.")
# v1/executor/multiproc_executor.py: the cause behind a core's error, if that says so.
_WORKER_FAILS: Final = ("WorkerProc hit an exception.", "WorkerProc failed to start.")
_LOOK_THERE: Final = re.compile("stack trace|root cause", re.IGNORECASE)
# The same file, of a worker that ended without a word of its own.
_KILLED: Final = re.compile(r"Worker proc \S+ died unexpectedly(?: \(exit code: -?\d+\))?")
_EXECUTOR: Final = "multiproc_executor.py"
# v1/engine/core_client.py, 0.32: what the API server says of such a core.
_GONE: Final = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
KILLED_CORE: Final = (
    "the engine core ended without a word; that is how the kernel ends a process for want of memory"
)
_RECORD: Final = re.compile(
    r"\((?P<process>\w+) ?(?P<pid>[^)]*)\) (?P<level>[A-Z]+) \S+ \S+ \[(?P<place>[^]]+)\] ?"
    r"(?P<text>.*)"
)
_TRACEBACK: Final = re.compile(r"(?:\([^)]*\) )?Traceback \(most recent call last\):")
_RAISED: Final = re.compile(r"(?:\([^)]*\) )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)")
# uvicorn goes on after this; its tracebacks have no prefix.
_SURVIVED: Final = "Exception in ASGI application"


@dataclass(frozen=True)
class _Line:
    """A line of a log record."""

    source: tuple[str, str, str]  # process, pid, place in the code
    level: str
    text: str

    @property
    def process(self) -> str:
        return self.source[0]

    @property
    def file(self) -> str:
        return self.source[2].partition(":")[0]


def find_death_cause(lines: Sequence[str]) -> str | None:
    """The error that ended the server; None if the log does not have it."""
    records = [record for record in map(_parse, lines) if record is not None]
    end = _find_core_end(records)
    if end is None:
        return _killed_worker(records) or _uncaught_error(lines) or _killed_core(records)
    cause = _first_error(records[end:])
    if cause is not None and _LOOK_THERE.search(cause):
        cause = _worker_error(records) or cause
    # A worker that was killed *before*: the core's error only says that there is none any more.
    return _killed_worker(records[:end]) or cause


def _parse(line: str) -> _Line | None:
    match = _RECORD.fullmatch(line)
    if match is None:
        return None
    return _Line((match["process"], match["pid"], match["place"]), match["level"], match["text"])


def _find_core_end(records: Sequence[_Line]) -> int | None:
    """Where the record begins with which a core ended."""
    # The place of the first record is no beginning: the lines before it may be cut off.
    seen = {record.source for record in records[:1]}
    found = None
    for index, record in enumerate(records):
        is_end = record.text in _CORE_ENDS and record.level == "ERROR" and record.file == "core.py"
        # A later line of another record has been seen at its place: a client wrote that text.
        if is_end and record.process.startswith("EngineCore") and record.source not in seen:
            found = index
        seen.add(record.source)
    return found


def _worker_error(records: Sequence[_Line]) -> str | None:
    """The error that the last failing worker had."""
    for index in reversed(range(len(records))):
        record = records[index]
        if record.process.startswith("Worker") and record.text in _WORKER_FAILS:
            return _first_error(records[index:])
    return None


def _first_error(records: Sequence[_Line]) -> str | None:
    """Of the traceback in the first of these records; lines of other records come in between."""
    own = (record.text for record in records if record.source == records[0].source)
    return next(_errors(own), None)


def _errors(texts: Iterable[str]) -> Iterator[str]:
    """The lines that end a traceback; the lines of code within it are indented."""
    return (match[1] for match in map(_RAISED.fullmatch, texts) if match is not None)


def _killed_worker(records: Sequence[_Line]) -> str | None:
    """What the core says of a worker that ended without a word."""
    said = (record.text for record in records if record.file == _EXECUTOR)
    return next((match[0] for match in map(_KILLED.match, said) if match is not None), None)


def _killed_core(records: Sequence[_Line]) -> str | None:
    is_gone = any(record.file == "core_client.py" and record.text == _GONE for record in records)
    return KILLED_CORE if is_gone else None


def _uncaught_error(lines: Sequence[str]) -> str | None:
    """The error of the traceback with which a process that could not start ended."""
    for index in reversed(range(len(lines))):
        if _TRACEBACK.fullmatch(lines[index]):
            is_survived = index > 0 and _SURVIVED in lines[index - 1]
            is_survived |= any(map(_is_life, lines[index:]))
            return None if is_survived else next(_errors(lines[index:]), None)
    return None


def _is_life(line: str) -> bool:
    """True for a line of a server that goes on."""
    record = _parse(line)
    return line.startswith("INFO:  ") or (record is not None and record.level == "INFO")
