"""Steps of any size come back from the ring whole, or are counted as lost."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clairai.errors import RingError
from clairai.ring.layout import HEAD_OFFSET, WORD_BYTES, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.reader import RingCursor
from clairai.ring.writer import RingWriter, WriterStatistics
from clairai.wire.ring_messages import ROW
from tests.support.ring_engine import SMALL, is_intact, publish_marked, publish_plain

EPOCH = 0xFEED_FACE_CAFE_BEEF


def step_of(num_rows: int, num_columns: int) -> tuple[NDArray[np.void], NDArray[np.float32]]:
    """Rows and scores that differ in every field."""
    rng = np.random.default_rng(num_rows * 1000 + num_columns)
    rows = np.frombuffer(rng.bytes(num_rows * ROW.itemsize), ROW)
    return rows, rng.standard_normal((num_rows, num_columns)).astype(np.float32)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 900))
def test_a_step_comes_back_whole_in_as_many_records_as_it_takes(
    num_rows: int, num_columns: int
) -> None:
    shape = RingShape(slots=400, slot_bytes=4096)
    rows, scores_RC = step_of(num_rows, num_columns)
    with HostMemory.create(shape.nbytes) as memory:
        writer, ring = RingWriter(memory, shape, EPOCH), RingCursor(memory)
        num_records = writer.publish(rows, scores_RC, bank_version=7, step=2**64 - 1)
        records = ring.poll(limit=1000)
    assert num_records == len(records) == -(-num_rows // shape.rows_per_record(num_columns))
    assert [record.continued for record in records] == [True] * (num_records - 1) + [False]
    assert {(record.bank_version, record.step) for record in records} == {(7, 2**64 - 1)}
    assert np.concatenate([record.rows for record in records]).tobytes() == rows.tobytes()
    assert np.array_equal(np.concatenate([record.scores_RC for record in records]), scores_RC)


def test_a_step_without_rows_is_no_record() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        assert writer.publish(*step_of(0, 16), bank_version=1, step=1) == 0
        assert ring.poll() == []
        assert writer.statistics() == WriterStatistics(published=0, slots=8, slot_bytes=4096)


def test_rows_and_scores_that_are_not_contiguous_are_published_as_they_read() -> None:
    rows, scores_RC = step_of(20, 32)
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        writer.publish(rows[::2], scores_RC[::2, ::4], bank_version=1, step=1)
        (record,) = ring.poll()
    assert record.rows.tobytes() == rows[::2].tobytes()
    assert np.array_equal(record.scores_RC, scores_RC[::2, ::4])


def test_records_keep_their_content_over_many_laps() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        for begin in range(0, 500, 5):
            publish_marked(writer, EPOCH, range(begin, begin + 5))
            records = ring.poll()
            assert [record.seq for record in records] == list(range(begin, begin + 5))
            assert all(is_intact(record, EPOCH) for record in records)


def test_a_record_is_a_copy_that_later_laps_do_not_change() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        publish_marked(writer, EPOCH, range(1))
        (record,) = ring.poll()
        publish_marked(writer, EPOCH, range(1, 100))
        assert is_intact(record, EPOCH)
        with pytest.raises(ValueError, match="read-only"):
            record.scores_RC[0, 0] = 0.0


@pytest.mark.parametrize("num_records", [0, 1, 7, 8, 9, 1000])
def test_a_reader_counts_every_record_lost_when_lapped(num_records: int) -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        publish_plain(writer, num_records)
        delivered = len(ring.poll())
        counts = ring.statistics()
    assert delivered == counts.delivered == min(num_records, 7)
    assert counts.lost == num_records - delivered
    assert (counts.first, counts.torn, counts.lag) == (0, 0, 0)


@pytest.mark.parametrize("ahead", [1, 2, 4, 7])
def test_a_reader_gives_up_as_many_slots_as_the_writer_may_be_writing(ahead: int) -> None:
    shape = RingShape(SMALL.slots, SMALL.slot_bytes, ahead)
    with HostMemory.create(shape.nbytes) as memory:
        writer, ring = RingWriter(memory, shape, EPOCH), RingCursor(memory)
        publish_plain(writer, 20)
        oldest = RingCursor(memory)
        seqs = [record.seq for record in ring.poll()]
        assert seqs == [record.seq for record in oldest.poll()] == list(range(12 + ahead, 20))
        assert (ring.statistics().lost, ring.statistics().torn) == (12 + ahead, 0)
        assert (oldest.statistics().first, oldest.statistics().lost) == (12 + ahead, 0)


def test_a_writer_that_laps_a_copy_by_less_than_it_may_be_ahead_is_counted_as_loss() -> None:
    """The oldest copied records are overwritten between the copy and the second load of head."""
    shape = RingShape(SMALL.slots, SMALL.slot_bytes, 2)
    with HostMemory.create(shape.nbytes) as memory:
        writer, ring = RingWriter(memory, shape, EPOCH), RingCursor(memory)
        publish_marked(writer, EPOCH, range(6))
        copy_slots = ring._copy_slots

        def copy_late(begin: int, end: int) -> list[memoryview]:
            copied = copy_slots(begin, end)
            publish_marked(writer, EPOCH, range(6, 9))
            return copied

        ring._copy_slots = copy_late  # type: ignore[method-assign]
        assert [record.seq for record in ring.poll()] == [3, 4, 5]
        assert (ring.statistics().lost, ring.statistics().lag) == (3, 3)


def test_a_record_says_when_it_was_published() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        before_ns = time.monotonic_ns()
        publish_plain(writer, 3)
        after_ns = time.monotonic_ns()
        stamps = [record.stamp_ns for record in ring.poll()]
    assert before_ns <= stamps[0] <= stamps[1] <= stamps[2] <= after_ns


@pytest.mark.parametrize(
    ("start", "first", "seqs"),
    [("oldest", 13, range(13, 20)), ("newest", 20, range(0)), (15, 15, range(15, 20))],
)
def test_a_reader_starts_where_it_is_told(start: int, first: int, seqs: range) -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        publish_plain(RingWriter(memory, SMALL, EPOCH), 20)
        ring = RingCursor(memory, start=start)
        assert [record.seq for record in ring.poll()] == list(seqs)
        assert (ring.statistics().first, ring.statistics().lost) == (first, 0)


def test_a_start_beyond_the_published_records_is_refused() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        publish_plain(RingWriter(memory, SMALL, EPOCH), 3)
        with pytest.raises(RingError, match="record 4, ring has 3"):
            RingCursor(memory, start=4)


def test_a_poll_takes_no_more_than_its_limit_and_leaves_the_rest_as_lag() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        publish_plain(writer, 6)
        assert [record.seq for record in ring.poll(limit=4)] == [0, 1, 2, 3]
        assert ring.statistics().lag == 2
        assert [record.seq for record in ring.poll(limit=4)] == [4, 5]


def test_a_head_that_goes_back_is_an_error_and_not_a_loss() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer, ring = RingWriter(memory, SMALL, EPOCH), RingCursor(memory)
        publish_plain(writer, 5)
        ring.poll()
        memory.buffer.cast("Q")[HEAD_OFFSET // WORD_BYTES] = 3
        with pytest.raises(RingError, match="went back from 5 to 3"):
            ring.poll()


def test_a_row_wider_than_a_slot_is_refused_and_nothing_is_published() -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        writer = RingWriter(memory, SMALL, EPOCH)
        with pytest.raises(RingError, match="for_budget"):
            writer.publish(*step_of(1, 2000), bank_version=1, step=1)
        assert writer.statistics().published == 0


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    rows, scores_RC = step_of(3, 4)
    with HostMemory.create(SMALL.nbytes) as memory:
        writer = RingWriter(memory, SMALL, EPOCH)
        with pytest.raises(RingError, match="float32"):
            writer.publish(rows, scores_RC.astype(np.float64), bank_version=1, step=1)
        with pytest.raises(RingError, match="need"):
            writer.publish(rows[:2], scores_RC, bank_version=1, step=1)
        with pytest.raises(RingError, match="bank version"):
            writer.publish(rows, scores_RC, bank_version=2**32, step=1)


def test_memory_of_another_size_than_the_shape_is_refused() -> None:
    with HostMemory.create(2 * SMALL.nbytes) as memory, pytest.raises(RingError, match="create it"):
        RingWriter(memory, SMALL, EPOCH)


def test_a_cpu_of_unknown_order_is_refused_by_writer_and_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HostMemory.create(SMALL.nbytes) as memory:
        fd = os.dup(memory.fd)
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        for refused in (
            lambda: HostMemory.create(SMALL.nbytes),
            lambda: HostMemory.attach(fd, SMALL.nbytes),
            lambda: RingWriter(memory, SMALL, EPOCH),
        ):
            with pytest.raises(RingError, match="CPU is riscv64, the ring needs x86-64 or"):
                refused()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)  # a descriptor that came is closed even so


def test_records_pass_on_arm_in_order_by_functions_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    rows, scores_RC = step_of(3, 2)
    with HostMemory.create(SMALL.nbytes) as memory:
        writer = RingWriter(memory, SMALL, EPOCH)
        with HostMemory.attach(os.dup(memory.fd), SMALL.nbytes) as attached:
            ring = RingCursor(attached)
            for step in range(1, 2 * SMALL.slots):
                writer.publish(rows, scores_RC, bank_version=7, step=step)
                (record,) = ring.poll()
                assert record.step == step
                assert record.rows.tobytes() == rows.tobytes()
                np.testing.assert_array_equal(record.scores_RC, scores_RC)


def test_memory_dropped_open_warns_and_closed_memory_says_so() -> None:
    memory = HostMemory.create(SMALL.nbytes)
    with pytest.warns(ResourceWarning, match="dropped open"):
        del memory
    closed = HostMemory.create(SMALL.nbytes)
    closed.close()
    closed.close()
    with pytest.raises(RingError, match="closed"):
        closed.load(0)
