"""A writer and a reader in two processes: no record is torn, none goes uncounted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from clairai.ring.attach import RingReader
from clairai.ring.layout import HEAD_OFFSET, WORD_BYTES
from clairai.ring.memory import HostMemory
from clairai.ring.reader import ReaderStatistics
from clairai.ring.writer import RingWriter
from tests.support.ring_engine import (
    DEADLINE_S,
    attach_first,
    forked,
    is_intact,
    publish_marked,
    running_engine,
    until,
)

NUM_RECORDS = 200_000
MOST_RECORDS = 20 * NUM_RECORDS  # of a race in which nothing happens
AT_ONCE = 1000
ENOUGH = 1000  # records, delivered and lost, of a race that was one


class HeadFirstWriter(RingWriter):
    """Planted bug: the head moves before the slot is written."""

    def _write_slot(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        bank_version: int,
        step: int,
        flags: int,
    ) -> None:
        self._words[HEAD_OFFSET // WORD_BYTES] = self._head + 1
        super()._write_slot(rows, scores_RC, bank_version, step, flags)


class PayloadLastWriter(RingWriter):
    """Planted bug: header, trailer and head are right, but the payload comes after them."""

    def _write_slot(
        self,
        rows: NDArray[np.void],
        scores_RC: NDArray[np.float32],
        bank_version: int,
        step: int,
        flags: int,
    ) -> None:
        super()._write_slot(
            np.zeros_like(rows), np.zeros_like(scores_RC), bank_version, step, flags
        )
        self._words[HEAD_OFFSET // WORD_BYTES] = self._head + 1
        super()._write_slot(rows, scores_RC, bank_version, step, flags)


def test_pitfall_16_no_record_is_torn_and_every_one_is_delivered_or_counted(tmp_path: Path) -> None:
    seen = _race(tmp_path, RingWriter, _was_one)
    assert seen.num_spoiled == 0
    assert seen.statistics.torn == 0
    assert seen.statistics.delivered + seen.statistics.lost == seen.num_published
    assert seen.statistics.delivered >= ENOUGH
    assert seen.statistics.lost >= ENOUGH


def test_no_record_is_torn_where_functions_in_c_order_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ARM; what this CPU does with them is the order it keeps anyway."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    seen = _race(tmp_path, RingWriter, _was_one)
    assert seen.num_spoiled == 0
    assert seen.statistics.torn == 0
    assert seen.statistics.delivered + seen.statistics.lost == seen.num_published


def test_the_race_catches_a_writer_that_moves_the_head_first(tmp_path: Path) -> None:
    seen = _race(tmp_path, HeadFirstWriter, lambda seen: seen.statistics.torn > 0)
    assert seen.statistics.torn > 0


def test_the_race_catches_a_writer_that_writes_the_payload_last(tmp_path: Path) -> None:
    seen = _race(tmp_path, PayloadLastWriter, lambda seen: seen.num_spoiled > 0)
    assert seen.num_spoiled > 0


@pytest.mark.parametrize("is_whole", [True, False], ids=["one-store", "two-halves"])
def test_the_head_is_stored_and_loaded_whole(is_whole: bool) -> None:
    extremes = {0, (1 << 64) - 1}
    with HostMemory.create(4096) as memory:
        store = _flip_whole if is_whole else _flip_halves
        with forked(store, memory):
            until(lambda: memory.load(HEAD_OFFSET))
            seen = {memory.load(HEAD_OFFSET) for _ in range(1_000_000)}
    assert (seen <= extremes) == is_whole
    assert len(seen) > 1


@dataclass(frozen=True)
class Seen:
    """What the reader of a race has seen, and how much there was once the writer has ended."""

    statistics: ReaderStatistics
    num_spoiled: int = 0  # records with a wrong word
    num_published: int | None = None

    @property
    def num_accounted(self) -> int:
        return self.statistics.delivered + self.statistics.lost


def _was_one(seen: Seen) -> bool:
    """How often the two met is up to the machine: they race until it was often enough."""
    least = min(seen.statistics.delivered, seen.statistics.lost)
    return seen.num_accounted >= NUM_RECORDS and least >= ENOUGH


def _race(folder: Path, writer_class: type[RingWriter], is_enough: Callable[[Seen], bool]) -> Seen:
    context = get_context("fork")
    go, stop = context.Event(), context.Event()
    ours, theirs = context.Pipe(duplex=False)
    writing = forked(_write_fast, folder, writer_class, go, stop, theirs)
    with ours, theirs, writing, attach_first(folder) as reader:
        go.set()
        return _read_all(reader, is_enough, stop, ours)


def _write_fast(
    folder: Path, writer_class: type[RingWriter], go: Event, stop: Event, totals: Connection
) -> None:
    with running_engine(folder, writer_class=writer_class) as engine:
        go.wait()
        total = 0
        while not stop.is_set():
            publish_marked(engine.writer, engine.epoch, range(total, total + AT_ONCE))
            total += AT_ONCE
        totals.send(total)
        get_context("fork").Event().wait()  # the reader still asks; it kills us when it is done


def _read_all(
    reader: RingReader, is_enough: Callable[[Seen], bool], stop: Event, totals: Connection
) -> Seen:
    """Read at a random pace until it is enough, and then until all is accounted for."""
    pace = random.Random(0)  # noqa: S311 - a test, not a secret
    seen = Seen(reader.statistics())
    while seen.num_accounted != seen.num_published:
        assert reader.wait(timeout_s=DEADLINE_S), "the writer has stopped"
        assert reader.is_alive(), "the writer has died"
        records = reader.poll(limit=pace.randint(1, 8))
        num_spoiled = sum(not is_intact(record, reader.welcome.epoch) for record in records)
        seen = Seen(reader.statistics(), seen.num_spoiled + num_spoiled, seen.num_published)
        is_over = is_enough(seen) or seen.num_accounted >= MOST_RECORDS
        if is_over and seen.num_published is None:
            stop.set()
            seen = replace(seen, num_published=totals.recv())
    return seen


def _flip_whole(memory: HostMemory) -> None:
    words = memory.buffer.cast("Q")
    while True:
        words[HEAD_OFFSET // WORD_BYTES] = (1 << 64) - 1
        words[HEAD_OFFSET // WORD_BYTES] = 0


def _flip_halves(memory: HostMemory) -> None:
    halves, low = memory.buffer.cast("I"), HEAD_OFFSET // 4
    while True:
        for value in ((1 << 32) - 1, 0):
            halves[low] = value
            halves[low + 1] = value
