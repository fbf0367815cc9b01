"""The spool process: reads an engine's ring while the engine works, and keeps the rows on disk.

`python -m clairai.spool.process SOCKET FOLDER MEMORY DISK FD`: the engine's socket, the folder of
the files, two bounds in bytes, and the memory in which the engine sees how far it has read. It ends
when the engine closes its socket or dies. Imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from clairai.errors import RingError
from clairai.ring.attach import RingReader
from clairai.ring.reader import Record
from clairai.spool.read_position import ReadPosition
from clairai.spool.server import SpoolServer
from clairai.spool.spool import Spool, SpoolBounds
from clairai.wire.spool_messages import SpooledBank, SpoolLosses

NICENESS: Final = 5
POLL_NBYTES: Final = 16 << 20  # read from the ring at once
MIN_PAUSE_S: Final = 0.001
# Less than a hundredth of the time in which the fastest engine fills a small ring.
MAX_PAUSE_S: Final = 0.01
# Whoever ends a process group ends the engine too, and this process follows the engine.
IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log: Final = logging.getLogger("clairai.spool")


class Batch(NamedTuple):
    """Records of one poll, and the record that the reader has come to."""

    records: list[Record]
    reached: int

    @property
    def nbytes(self) -> int:
        return sum(one.rows.nbytes + one.scores_RC.nbytes for one in self.records)


class BatchQueue:
    """Batches that wait for the disk, within a bound of memory."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._batches: deque[Batch] = deque()
        self._nbytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def wait_for_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout_s)

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._nbytes += batch.nbytes
            self._changed.notify_all()

    def take(self) -> Batch | None:
        """The next batch, which counts until `done`; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._is_closed)
            return self._batches.popleft() if self._batches else None

    def done(self, batch: Batch) -> None:
        with self._changed:
            self._nbytes -= batch.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._nbytes < self._max_nbytes


class SpoolProcess:
    """One engine's ring on its way to disk."""

    def __init__(
        self,
        reader: RingReader,
        bounds: SpoolBounds,
        memory_nbytes: int,
        position: ReadPosition,
    ) -> None:
        self._reader, self._position = reader, position
        self._spool = Spool(bounds)
        self._queue = BatchQueue(memory_nbytes)
        self._poll_limit = max(1, POLL_NBYTES // reader.welcome.slot_bytes)
        self._known: set[int] = set()  # versions of banks
        self._lost_records = 0
        self._reached = 0  # the record before which all is on disk or lost
        self._is_over = False
        self._progress = threading.Condition()
        self._hurry = threading.Event()  # somebody waits for rows

    def run(self, folder: Path) -> None:
        """Until the engine is gone, and what it had published is read."""
        writer = threading.Thread(target=self._write, name="clairai-spool-write", daemon=True)
        writer.start()
        with SpoolServer(folder, self._reader.welcome.epoch, self._spool, self):
            self._read()
            self._queue.close()
            writer.join()

    def wait_until(self, seq: int, timeout_s: float) -> int:
        """Wait until all before record `seq` is on disk or lost; the record come to so far."""
        self._hurry.set()
        with self._progress:
            self._progress.wait_for(lambda: self._reached >= seq or self._is_over, timeout_s)
            return self._reached

    def losses(self) -> SpoolLosses:
        return self._spool.losses(self._lost_records)

    def _read(self) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            # Before the poll: what a dead engine had published is then still seen by that poll.
            is_dead = not self._reader.is_alive()
            if self._poll():
                pause_s = MIN_PAUSE_S
            elif is_dead:
                return
            else:
                self._hurry.wait(pause_s)
                self._hurry.clear()
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _poll(self) -> bool:
        """Queue the next records for the disk; False if there are none."""
        if not self._queue.wait_for_room(MAX_PAUSE_S):
            return True
        records = self._reader.poll(self._poll_limit)
        counted = self._reader.statistics()
        reached = self._position.num_read = counted.first + counted.delivered + counted.lost
        num_lost = counted.first + counted.lost  # one that is started late has lost the first ones
        has_lost = num_lost > self._lost_records
        self._lost_records = num_lost
        if records or has_lost:
            self._queue.put(Batch([one for one in records if self._has_bank(one)], reached))
        return bool(records) or has_lost

    def _has_bank(self, record: Record) -> bool:
        """Ask the engine while it still knows which columns a record has."""
        if record.bank_version in self._known:
            return True
        try:
            bank = self._reader.bank(record.bank_version)
        except RingError as error:
            self._spool.lose(len(record.rows), f"their probes are not known: {error.reason}")
            return False
        names = tuple(probe.name for probe in bank.probes)
        self._spool.add_bank(SpooledBank(bank.version, names, bank.weights))
        self._known.add(bank.version)
        return True

    def _write(self) -> None:
        """The thread that writes: a disk that stalls does not keep the ring from being read."""
        try:
            while (batch := self._queue.take()) is not None:
                self._append(batch)
        except Exception:  # whoever waits for rows must see that none will come
            _log.exception("the spool of scores ends")
            os._exit(1)
        with self._progress:
            self._is_over = True
            self._progress.notify_all()

    def _append(self, batch: Batch) -> None:
        self._spool.append(batch.records)
        self._queue.done(batch)
        with self._progress:
            self._reached = batch.reached
            self._progress.notify_all()


def main(arguments: Sequence[str]) -> int:
    socket, folder, memory_nbytes, disk_nbytes, position_fd = arguments
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        # The engine may have pinned the thread that started this to one processor.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    bounds = SpoolBounds(Path(folder), int(disk_nbytes))
    try:
        with RingReader.attach(socket) as reader:
            position = ReadPosition(int(position_fd))
            SpoolProcess(reader, bounds, int(memory_nbytes), position).run(Path(socket).parent)
    except (OSError, RingError):
        _log.exception("the spool of scores ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
