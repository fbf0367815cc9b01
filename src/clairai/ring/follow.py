"""Takes a runtime folder; gives the records of one engine after the other, and says every gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clairai.errors import RingError
from clairai.ring.attach import Reader
from clairai.ring.folder import engine_sockets
from clairai.ring.reader import ReaderStatistics, Record, Start
from clairai.wire import Welcome

LOOK_PAUSE_S: Final = 0.1
ATTACH_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class Waiting:
    """No engine to read; said at every look, so that the caller gets its turn."""

    reason: str


@dataclass(frozen=True)
class Attached:
    """From here on the records come from this engine."""

    welcome: Welcome


@dataclass(frozen=True, eq=False)
class Batch:
    """Some records; `reader` names their columns with `reader.bank(record.bank_version)`."""

    records: list[Record]
    reader: Reader


@dataclass(frozen=True)
class Detached:
    """The last word on an engine: all it published is in `statistics`, delivered or lost."""

    statistics: ReaderStatistics
    reason: str


Event = Waiting | Attached | Batch | Detached


def follow(folder: Path, *, start: Start, stop: Callable[[], bool]) -> Generator[Event, None, None]:
    """Events until `stop()`. `start` is for an engine that is there at the first look.

    Engines that come later are read from their first record on; one that hung up on us and is
    still alive is read on from where we were.
    """
    resume: dict[Path, Start] = dict.fromkeys(engine_sockets(folder), start)
    while not stop():
        found = _attach_newest(folder, resume)
        if isinstance(found, Waiting):
            yield found
            time.sleep(LOOK_PAUSE_S)
            continue
        path, reader = found
        with reader:
            yield Attached(reader.welcome)
            yield from _read(reader, stop)
            statistics = reader.statistics()
            resume[path] = statistics.first + statistics.delivered + statistics.lost
            yield Detached(statistics, "stopped" if reader.is_alive() else "engine gone")


def _attach_newest(folder: Path, resume: dict[Path, Start]) -> tuple[Path, Reader] | Waiting:
    reason = f"no engine in {folder}"
    for path in engine_sockets(folder):
        start = resume.get(path, "oldest")
        try:
            return path, Reader.attach(path, start=start, timeout_s=ATTACH_TIMEOUT_S)
        except RingError as error:
            reason = error.reason
    return Waiting(reason)


def _read(reader: Reader, stop: Callable[[], bool]) -> Iterator[Batch]:
    while not stop():
        # Asked before the poll: whatever a dead engine had published is there for that poll.
        is_dead = not reader.is_alive()
        if records := reader.poll():
            yield Batch(records, reader)
        elif is_dead and reader.statistics().lag == 0:
            return
        else:
            reader.wait(LOOK_PAUSE_S)
