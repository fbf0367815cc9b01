"""Takes a runtime folder; gives the records of one engine after the other, and says every gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clairai.errors import RingError
from clairai.local.private_socket import engine_sockets
from clairai.ring.attach import RingReader
from clairai.ring.reader import ReaderStatistics, Record, StartAt
from clairai.wire.ring_messages import Welcome

LOOK_PAUSE_S: Final = 0.1
ATTACH_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class NoEngine:
    """No engine to read; said at every look, so that the caller gets its turn."""

    reason: str


@dataclass(frozen=True)
class EngineAttached:
    """From here on the records come from this engine."""

    welcome: Welcome


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """Some records; `reader` names their columns with `reader.bank(record.bank_version)`."""

    records: list[Record]
    reader: RingReader


@dataclass(frozen=True)
class EngineDetached:
    """The last word on an engine: all it published is in `statistics`, delivered or lost."""

    statistics: ReaderStatistics
    reason: str


FollowEvent = NoEngine | EngineAttached | RecordBatch | EngineDetached


def follow(
    folder: Path, *, start: StartAt, stop: Callable[[], bool]
) -> Generator[FollowEvent, None, None]:
    """Events until `stop()`. `start` is for an engine that is there at the first look.

    Engines that come later are read from their first record on; one that hung up on us and is
    still alive is read on from where we were.
    """
    resume: dict[Path, StartAt] = dict.fromkeys(engine_sockets(folder), start)
    while not stop():
        found = _attach_newest(folder, resume)
        if isinstance(found, NoEngine):
            yield found
            time.sleep(LOOK_PAUSE_S)
            continue
        path, reader = found
        with reader:
            yield EngineAttached(reader.welcome)
            yield from _read_until_gone(reader, stop)
            statistics = reader.statistics()
            resume[path] = statistics.first + statistics.delivered + statistics.lost
            yield EngineDetached(statistics, "stopped" if reader.is_alive() else "engine gone")


def _attach_newest(folder: Path, resume: dict[Path, StartAt]) -> tuple[Path, RingReader] | NoEngine:
    reason = f"no engine in {folder}"
    for path in engine_sockets(folder):
        start = resume.get(path, "oldest")
        try:
            return path, RingReader.attach(path, start=start, timeout_s=ATTACH_TIMEOUT_S)
        except RingError as error:
            reason = error.reason
    return NoEngine(reason)


def _read_until_gone(reader: RingReader, stop: Callable[[], bool]) -> Iterator[RecordBatch]:
    while not stop():
        # Asked before the poll: whatever a dead engine had published is there for that poll.
        is_dead = not reader.is_alive()
        if records := reader.poll():
            yield RecordBatch(records, reader)
        elif is_dead and reader.statistics().lag == 0:
            return
        else:
            reader.wait(LOOK_PAUSE_S)
