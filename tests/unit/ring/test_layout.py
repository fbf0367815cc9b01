"""Every field of a ring has its own place inside its slot."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.errors import RingError
from clairai.ring import layout
from clairai.ring.layout import RingHeader, RingShape, epoch_low, row_bytes

U64 = st.integers(0, 2**64 - 1)
SHAPES = st.builds(
    lambda slots, pages, ahead: RingShape(slots, pages * 4096, 1 + ahead % (slots - 1)),
    st.integers(2, 10_000),
    st.integers(1, 1000),
    st.integers(0, 10_000),
)


@given(U64, SHAPES)
def test_a_header_comes_back_as_it_was(epoch: int, shape: RingShape) -> None:
    header = RingHeader(epoch, shape)
    assert RingHeader.unpack(header.pack()) == header


def test_the_named_offsets_are_where_the_slot_header_puts_its_fields() -> None:
    raw = layout.SLOT_HEADER.pack(1, 2, 3, 4, 5, 6, 7, 8)
    fields = {
        layout.SEQ_OFFSET: ("<Q", 1),
        layout.EPOCH_OFFSET: ("<I", 2),
        layout.BANK_VERSION_OFFSET: ("<I", 3),
        layout.NUM_ROWS_OFFSET: ("<I", 4),
        layout.NUM_COLUMNS_OFFSET: ("<I", 5),
        layout.STEP_OFFSET: ("<Q", 6),
        layout.FLAGS_OFFSET: ("<I", 7),
        layout.STAMP_OFFSET: ("<Q", 8),
    }
    for offset, (form, value) in fields.items():
        assert struct.unpack_from(form, raw, offset) == (value,)
    assert len(raw) <= layout.PAYLOAD_OFFSET


def test_the_head_has_a_line_of_its_own() -> None:
    assert layout.HEADER.size <= layout.HEAD_OFFSET
    assert layout.HEAD_OFFSET + 128 <= layout.SLOTS_OFFSET


@given(SHAPES, U64)
def test_every_slot_lies_inside_the_ring_on_a_page(shape: RingShape, seq: int) -> None:
    offset = shape.slot_offset(seq)
    assert layout.SLOTS_OFFSET <= offset <= shape.nbytes - shape.slot_bytes
    assert offset % layout.PAGE_BYTES == 0
    assert shape.slot_offset(seq + shape.slots) == offset


def test_offsets_past_four_gibibytes_do_not_wrap() -> None:
    shape = RingShape(slots=1 << 22, slot_bytes=4096)
    assert shape.slot_offset((1 << 22) - 1) == 4096 + ((1 << 22) - 1) * 4096 > 1 << 32


@given(SHAPES, st.integers(0, 5000))
def test_a_full_record_ends_before_the_trailer(shape: RingShape, num_columns: int) -> None:
    payload = shape.rows_per_record(num_columns) * row_bytes(num_columns)
    room = shape.slot_bytes - layout.PAYLOAD_OFFSET - layout.TRAILER_BYTES
    assert room - row_bytes(num_columns) < payload <= room


@given(st.integers(0, 1 << 30), st.integers(0, 4096), st.sampled_from([1, 4, 64]))
def test_a_shape_for_a_budget_fits_it_or_names_the_size_it_needs(
    budget: int, columns: int, ahead: int
) -> None:
    try:
        shape = RingShape.for_budget(budget, columns, ahead)
    except RingError as error:
        needed = int(error.reason.partition("columns need ")[2].partition(";")[0])
        assert needed > budget
        shape = RingShape.for_budget(needed, columns, ahead)
        assert shape.slots == max(8, 2 * ahead)
    else:
        assert shape.nbytes <= budget < shape.nbytes + shape.slot_bytes
    assert shape.rows_per_record(columns) >= 16


def test_a_writer_ahead_by_half_of_the_slots_needs_as_many_again() -> None:
    assert RingShape.for_budget(1 << 20, 16, ahead=64).slots >= 128
    with pytest.raises(RingError, match="columns need 528384"):
        RingShape.for_budget(1 << 19, 16, ahead=64)


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(1, 4096), (8, 0), (8, 2048), (8, 4097), (1 << 40, 1 << 20), (-1, -1)]
)
def test_an_impossible_shape_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(RingError):
        RingShape(slots, slot_bytes)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (0, 0, "wrong memory"),
        (1, 1, "same clairai"),
        (2, 0, "0 ahead"),
        (2, 8, "8 slots, a writer 8 ahead"),
        (4, 0, "0 slots"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(field: int, value: int, text: str) -> None:
    fields = list(layout.HEADER.unpack(RingHeader(1, RingShape(8, 4096)).pack()))
    fields[field] = value
    with pytest.raises(RingError, match=text):
        RingHeader.unpack(layout.HEADER.pack(*fields))


def test_a_slot_repeats_the_low_half_of_the_epoch() -> None:
    assert epoch_low(0x1122334455667788) == 0x55667788
