"""A writer and a reader in two processes: no record is torn, none goes uncounted."""

from __future__ import annotations

import random
from multiprocessing import get_context
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
    attach_first,
    forked,
    is_intact,
    publish_marked,
    running_engine,
    until,
)

NUM_RECORDS = 200_000


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
    statistics, num_spoiled = _race(tmp_path, RingWriter)
    assert num_spoiled == 0
    assert statistics.torn == 0
    assert statistics.delivered + statistics.lost == NUM_RECORDS
    assert statistics.delivered >= 1000
    assert statistics.lost >= 1000


def test_no_record_is_torn_where_functions_in_c_order_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ARM; what this CPU does with them is the order it keeps anyway."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    statistics, num_spoiled = _race(tmp_path, RingWriter)
    assert num_spoiled == 0
    assert statistics.torn == 0
    assert statistics.delivered + statistics.lost == NUM_RECORDS


def test_the_race_catches_a_writer_that_moves_the_head_first(tmp_path: Path) -> None:
    statistics, _ = _race(tmp_path, HeadFirstWriter)
    assert statistics.torn > 0


def test_the_race_catches_a_writer_that_writes_the_payload_last(tmp_path: Path) -> None:
    _, num_spoiled = _race(tmp_path, PayloadLastWriter)
    assert num_spoiled > 0


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


def _race(folder: Path, writer_class: type[RingWriter]) -> tuple[ReaderStatistics, int]:
    go = get_context("fork").Event()
    with forked(_write_fast, folder, writer_class, go), attach_first(folder) as reader:
        go.set()
        num_spoiled = _read_all(reader)
        return reader.statistics(), num_spoiled


def _write_fast(folder: Path, writer_class: type[RingWriter], go: Event) -> None:
    with running_engine(folder, writer_class=writer_class) as engine:
        go.wait()
        publish_marked(engine.writer, engine.epoch, range(NUM_RECORDS))
        get_context("fork").Event().wait()  # the reader still asks; it kills us when it is done


def _read_all(reader: RingReader) -> int:
    """Read at a random pace until all is accounted for; the number of records with a wrong word."""
    pace = random.Random(0)  # noqa: S311 - a test, not a secret
    num_spoiled = accounted = 0
    while accounted < NUM_RECORDS:
        assert reader.wait(timeout_s=10), "the writer has stopped"
        assert reader.is_alive(), "the writer has died"
        records = reader.poll(limit=pace.randint(1, 8))
        num_spoiled += sum(not is_intact(record, reader.welcome.epoch) for record in records)
        statistics = reader.statistics()
        accounted = statistics.delivered + statistics.lost
    return num_spoiled


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
