"""The records of one engine after the other, with every gap reported.

Runs in: the sidecar.
"""

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
    """There is no engine; reported at every look, so that the caller can act."""

    reason: str


@dataclass(frozen=True)
class EngineAttached:
    """Records come from this engine from now on."""

    welcome: Welcome


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """Some records; `reader.bank(record.bank_version)` names their columns."""

    records: list[Record]
    reader: RingReader


@dataclass(frozen=True)
class EngineDetached:
    """An engine is gone; `statistics` counts all it published, as delivered or lost."""

    statistics: ReaderStatistics
    reason: str


FollowEvent = NoEngine | EngineAttached | RecordBatch | EngineDetached


def follow(
    folder: Path, *, start: StartAt, stop: Callable[[], bool]
) -> Generator[FollowEvent, None, None]:
    """Yield events until `stop()`. `start` applies to engines that are there at the first look.

    Later engines are read from their first record. An engine that hung up but still lives is read
    on from the last position.
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
        # Before the poll: what a dead engine had published is then still seen by that poll.
        is_dead = not reader.is_alive()
        if records := reader.poll():
            yield RecordBatch(records, reader)
        elif is_dead and reader.statistics().lag == 0:
            return
        else:
            reader.wait(LOOK_PAUSE_S)
