"""The records of one engine after the other, with every gap reported.

An engine with several cores has a ring for each, and all are read. Runs in: the sidecar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from clairai.errors import RingError
from clairai.local.private_socket import engine_sockets
from clairai.ring.attach import RingReader
from clairai.ring.reader import ReaderStatistics, Record, StartAt
from clairai.wire.ring_messages import Welcome

LOOK_PAUSE_S: Final = 0.1
ATTACH_TIMEOUT_S: Final = 1.0
CORES_PAUSE_S: Final = 0.5
SHORT_WAIT_S: Final = 0.01  # for one of several rings


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
    """Some records; `reader.bank(record.bank_version)` names their columns.

    `statistics` are those of all rings of the engine.
    """

    records: list[Record]
    reader: RingReader
    statistics: ReaderStatistics


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
        with found as rings:
            yield EngineAttached(rings.welcome)
            yield from _read_until_gone(rings, stop)
            resume |= rings.next_records()
            reason = "stopped" if rings.is_alive() else "engine gone"
            yield EngineDetached(rings.statistics(), reason)


class _EngineRings:
    """The rings of one engine: one for each of its cores, which start one after the other."""

    def __init__(self, folder: Path, resume: dict[Path, StartAt], path: Path) -> None:
        """RingError if no engine listens at `path`."""
        self._folder, self._resume = folder, resume
        self._readers = {path: self._attach(path)}
        self._others: set[Path] = set()  # of other engines
        self._looked_s = float("-inf")
        self.welcome = self._readers[path].welcome

    def _attach(self, path: Path) -> RingReader:
        start = self._resume.get(path, "oldest")
        return RingReader.attach(path, start=start, timeout_s=ATTACH_TIMEOUT_S)

    def look_for_cores(self) -> None:
        """Attach the rings of other cores of this engine."""
        if not self.welcome.engine or time.monotonic() < self._looked_s + CORES_PAUSE_S:
            return
        self._looked_s = time.monotonic()
        for path in engine_sockets(self._folder):
            if path in self._readers or path in self._others:
                continue
            try:
                reader = self._attach(path)
            except RingError:
                continue
            if reader.welcome.engine == self.welcome.engine:
                self._readers[path] = reader
            else:
                self._others.add(path)
                reader.close()

    def poll(self) -> list[tuple[list[Record], RingReader]]:
        polled = [(reader.poll(), reader) for reader in self._readers.values()]
        return [(records, reader) for records, reader in polled if records]

    def is_alive(self) -> bool:
        return any(reader.is_alive() for reader in self._readers.values())

    def wait(self) -> None:
        first, *others = self._readers.values()
        first.wait(SHORT_WAIT_S if others else LOOK_PAUSE_S)

    def statistics(self) -> ReaderStatistics:
        """All of them together."""
        found = [reader.statistics() for reader in self._readers.values()]
        return ReaderStatistics(
            first=sum(one.first for one in found),
            delivered=sum(one.delivered for one in found),
            lost=sum(one.lost for one in found),
            torn=sum(one.torn for one in found),
            lag=sum(one.lag for one in found),
        )

    def next_records(self) -> dict[Path, StartAt]:
        """Where to go on in each."""
        found = {path: reader.statistics() for path, reader in self._readers.items()}
        return {path: one.first + one.delivered + one.lost for path, one in found.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()


def _attach_newest(folder: Path, resume: dict[Path, StartAt]) -> _EngineRings | NoEngine:
    reason = f"no engine in {folder}"
    for path in engine_sockets(folder):
        try:
            return _EngineRings(folder, resume, path)
        except RingError as error:
            reason = error.reason
    return NoEngine(reason)


def _read_until_gone(rings: _EngineRings, stop: Callable[[], bool]) -> Iterator[RecordBatch]:
    while not stop():
        rings.look_for_cores()
        # Before the poll: what a dead engine had published is then still seen by that poll.
        is_dead = not rings.is_alive()
        if polled := rings.poll():
            statistics = rings.statistics()
            for records, reader in polled:
                yield RecordBatch(records, reader, statistics)
        elif is_dead and rings.statistics().lag == 0:
            return
        else:
            rings.wait()
