"""A spool keeps rows in the order of records, within its bound, and counts what it gives up."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clairai.ring.reader import Record
from clairai.spool import segment as segment_module
from clairai.spool import spool as spool_module
from clairai.spool.segment import SegmentView, SegmentWriter, map_segment
from clairai.spool.spool import Spool, SpoolBounds
from clairai.wire.ring_messages import ROW
from clairai.wire.spool_messages import SegmentRows, SpooledBank

COLUMNS = 8
ROW_NBYTES = 32 + 4 * COLUMNS
SEGMENT_ROWS = 64


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """Eight segments of 64 rows."""
    made = Spool(SpoolBounds(tmp_path, 8 * SEGMENT_ROWS * ROW_NBYTES))
    yield made
    made.close()


def record(seq: int, num_rows: int = 4, num_columns: int = COLUMNS, bank: int = 1) -> Record:
    """Its rows have the positions `100 * seq + index`, which their scores repeat."""
    rows = np.zeros(num_rows, ROW)
    rows["stream"], rows["position"] = seq, 100 * seq + np.arange(num_rows)
    scores_RC = np.tile(rows["position"].astype(np.float32)[:, None], num_columns)
    return Record(seq, seq, bank, False, 0, rows, scores_RC)


def records(begin: int, end: int, **given: int) -> list[Record]:
    return [record(seq, **given) for seq in range(begin, end)]


def view(spool: Spool, found: SegmentRows) -> SegmentView:
    fd = spool.open_segment(found.number)
    assert fd is not None
    return SegmentView.of(map_segment(fd, found), found)


def positions_since(spool: Spool, seq: int) -> list[int]:
    """Positions of all rows that the spool finds, each checked against its scores."""
    positions: list[int] = []
    for found in spool.rows_since(seq):
        seen, part = view(spool, found), slice(found.first_row, found.num_rows)
        position_R = seen.index["row"]["position"][part]
        assert (seen.scores_RC[part] == position_R[:, None]).all()
        positions += position_R.tolist()
    return positions


def positions_of(begin: int, end: int, num_rows: int = 4) -> list[int]:
    return [100 * seq + at for seq in range(begin, end) for at in range(num_rows)]


def test_rows_come_back_in_the_order_of_records(spool: Spool) -> None:
    spool.append(records(0, 40))
    spool.append(records(40, 100))
    assert positions_since(spool, 0) == positions_of(0, 100)
    assert spool.losses(0).dropped == 0


def test_each_row_names_the_bank_that_scored_it(spool: Spool) -> None:
    spool.append([*records(0, 2, bank=1), *records(2, 3, bank=7)])
    (found,) = spool.rows_since(0)
    assert view(spool, found).index["bank"][: found.num_rows].tolist() == [1] * 8 + [7] * 4


def test_a_bank_of_another_width_begins_a_segment(spool: Spool) -> None:
    spool.append([*records(0, 2), *records(2, 4, num_columns=3), *records(4, 5)])
    assert [found.num_columns for found in spool.rows_since(0)] == [COLUMNS, 3, COLUMNS]
    assert positions_since(spool, 0) == positions_of(0, 5)


def test_an_engine_without_probes_has_rows_without_scores(spool: Spool) -> None:
    spool.append(records(0, 3, num_columns=0))
    (found,) = spool.rows_since(0)
    seen = view(spool, found)
    assert seen.index["row"]["position"][: found.num_rows].tolist() == positions_of(0, 3)
    assert seen.scores_RC.shape[1] == 0


def test_who_asks_for_late_records_is_not_shown_all_early_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "ROWS_PER_MARK", 8)
    spool = Spool(SpoolBounds(tmp_path, 8 * 1000 * ROW_NBYTES))
    for seq in range(100):
        spool.append([record(seq)])
    assert len(spool.rows_since(0)) == 1
    found = positions_since(spool, 97)
    assert set(positions_of(97, 100)) <= set(found)
    assert len(found) < 8 + len(positions_of(97, 100))
    spool.close()


def test_the_oldest_rows_make_room_and_are_counted(spool: Spool) -> None:
    spool.append(records(0, 300))
    losses = spool.losses(0)
    kept = positions_since(spool, 0)
    assert kept == positions_of(0, 300)[-len(kept) :]
    assert losses.dropped == 1200 - len(kept) > 0
    assert len(kept) * ROW_NBYTES <= 8 * SEGMENT_ROWS * ROW_NBYTES
    assert "disk_gib" in losses.reason


def test_what_a_reader_has_mapped_stays_when_it_is_dropped(spool: Spool) -> None:
    spool.append(records(0, 16))
    (found,) = spool.rows_since(0)
    seen = view(spool, found)
    spool.append(records(16, 400))
    assert spool.open_segment(found.number) is None
    assert seen.index["row"]["position"][:4].tolist() == positions_of(0, 1)
    assert (seen.scores_RC[60:64] == np.array(positions_of(15, 16))[:, None]).all()


def test_a_reader_cannot_write_to_a_segment(spool: Spool) -> None:
    spool.append(records(0, 1))
    (found,) = spool.rows_since(0)
    fd = spool.open_segment(found.number)
    assert fd is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


class FullDisk:
    """Takes `room` bytes and then refuses, as a disk does: the last write may take a part."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.pwritev

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = memoryview(b"".join(buffers))[: self.room]
        self.room -= len(taken)
        return self._write(fd, [taken], offset)


def test_rows_that_a_full_disk_refuses_are_counted_and_later_ones_are_kept(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(room=10 * 4 * ROW_NBYTES + 100)
    monkeypatch.setattr(os, "pwritev", disk)
    for seq in range(12):
        spool.append([record(seq)])
    disk.room = 1 << 30
    spool.append(records(12, 14))
    assert positions_since(spool, 0) == positions_of(0, 10) + positions_of(12, 14)
    assert spool.losses(0).rows == 8
    assert "No space left" in spool.losses(0).reason


def test_a_write_that_takes_a_part_is_continued(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def write_part(fd: int, buffers: list[memoryview], offset: int) -> int:
        return write(fd, [memoryview(b"".join(buffers))[:50]], offset)

    monkeypatch.setattr(os, "pwritev", write_part)
    spool.append(records(0, 7))
    assert positions_since(spool, 0) == positions_of(0, 7)


def test_on_a_full_disk_old_segments_go_before_new_rows(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.append(records(0, 40))  # more than one segment
    disk = FullDisk(room=0)
    monkeypatch.setattr(os, "pwritev", disk)
    close = SegmentWriter.close

    def close_and_free(dropped: SegmentWriter) -> None:
        close(dropped)
        disk.room = 1 << 30

    monkeypatch.setattr(SegmentWriter, "close", close_and_free)
    spool.append(records(40, 41))
    assert positions_since(spool, 0)[-4:] == positions_of(40, 41)
    assert spool.losses(0).rows == 0
    assert spool.losses(0).dropped == SEGMENT_ROWS


def test_a_disk_with_little_space_left_is_not_filled(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.append(records(0, 40))
    monkeypatch.setattr(SpoolBounds, "free_nbytes", 0)
    spool.append(records(40, 100))
    assert positions_since(spool, 0) == positions_of(0, 100)[-len(positions_since(spool, 0)) :]
    assert spool.losses(0).dropped >= SEGMENT_ROWS
    assert "little space" in spool.losses(0).reason


def test_a_record_larger_than_a_segment_is_kept(spool: Spool) -> None:
    spool.append(records(0, 1, num_rows=3 * SEGMENT_ROWS))
    assert positions_since(spool, 0) == positions_of(0, 1, 3 * SEGMENT_ROWS)


def test_the_oldest_banks_are_forgotten_first(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MAX_BANKS", 2)
    for version in range(3):
        spool.add_bank(SpooledBank(version, ("a", f"{version // 2}"), version))
    assert spool.bank(0) is None
    assert spool.bank(1) == SpooledBank(1, ("a", "0"), 1)
    assert spool.bank(2) == SpooledBank(2, ("a", "1"), 2)
