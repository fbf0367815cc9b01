"""The kernel with which the GPU itself writes one step's records to the ring.

T = tokens in this step, R = requests in this step, C = columns of the bank.

The ring is mapped host memory or device memory: the kernel does not know which. Up to AHEAD records
are written at once and published by one store, so a reader gives up as many slots (ring/layout.py).
What changes from step to step is read from the step's header, in pinned memory (header_layout.py).
Headers are published in the order of their numbers: `turn` is the number of the last. A graph knows
no header when it is captured: it finds the next one by its turn.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from clairai.engine.publish import header_layout
from clairai.engine.publish.header_layout import HEADER_FIELDS, REQUEST_FIELDS
from clairai.ring import layout as ring
from clairai.wire import ring_messages

TILE_W: Final = 256  # words of rows that one program writes at a time

# Words of a header's head.
NUM_EVENTS: Final = tl.constexpr(HEADER_FIELDS.index("num_events"))
NUM_ROWS: Final = tl.constexpr(HEADER_FIELDS.index("num_rows"))
FIRST_SEQ: Final = tl.constexpr(HEADER_FIELDS.index("first_seq"))
STEP: Final = tl.constexpr(HEADER_FIELDS.index("step"))
EPOCH_AND_BANK: Final = tl.constexpr(HEADER_FIELDS.index("epoch_and_bank"))
NUM_COLUMNS: Final = tl.constexpr(HEADER_FIELDS.index("num_columns"))
ROWS_PER_RECORD: Final = tl.constexpr(HEADER_FIELDS.index("rows_per_record"))
NUM_REQUESTS: Final = tl.constexpr(HEADER_FIELDS.index("num_requests"))
STAMP_NS: Final = tl.constexpr(HEADER_FIELDS.index("stamp_ns"))
NUMBER: Final = tl.constexpr(HEADER_FIELDS.index("number"))
RECORD_FLAGS: Final = tl.constexpr(HEADER_FIELDS.index("record_flags"))
IN_GRAPH: Final = tl.constexpr(HEADER_FIELDS.index("in_graph"))
DONE: Final = tl.constexpr(HEADER_FIELDS.index("done"))
HEAD_WORDS: Final = tl.constexpr(len(HEADER_FIELDS))
NUM_REQUEST_FIELDS: Final = tl.constexpr(len(REQUEST_FIELDS))  # stream, choice, prompt_len, seen
MEDIA_BITS: Final = tl.constexpr(header_layout.MEDIA_BITS)
REQUEST_MASK: Final = tl.constexpr((1 << header_layout.MEDIA_BITS) - 1)
MEDIA_AT: Final = tl.constexpr(24 + ring_messages.MEDIA_SHIFT)  # in a row's last word
# In a token's word: becomes the flag REJECTED of its row, as its media become those bits.
REJECTED_MARK: Final = tl.constexpr(
    ring_messages.REJECTED >> ring_messages.MEDIA_SHIFT << header_layout.MEDIA_BITS
)
# Of the ring; a slot's words are in the order of ring.SLOT_HEADER.
RING_HEAD: Final = tl.constexpr(ring.HEAD_OFFSET // 8)
SLOTS_AT: Final = tl.constexpr(ring.SLOTS_OFFSET)
PAYLOAD_AT: Final = tl.constexpr(ring.PAYLOAD_OFFSET)
SEQ_AT: Final = tl.constexpr(ring.SEQ_OFFSET // 8)
EPOCH_AND_BANK_AT: Final = tl.constexpr(ring.EPOCH_OFFSET // 8)
SIZES_AT: Final = tl.constexpr(ring.NUM_ROWS_OFFSET // 8)
STEP_AT: Final = tl.constexpr(ring.STEP_OFFSET // 8)
FLAGS_AT: Final = tl.constexpr(ring.FLAGS_OFFSET // 8)
STAMP_AT: Final = tl.constexpr(ring.STAMP_OFFSET // 8)


@triton.jit
def _row_words(row, field, is_wanted, num_events, num_requests, requests_ptr, events_ptr,
               request_ptr, positions_ptr, token_ids_ptr, MAX_R: tl.constexpr):  # fmt: skip
    """Word `field` of each `row`, as ring_messages.ROW has it."""
    is_event = is_wanted & (row < num_events)
    i = row - num_events
    token = tl.load(request_ptr + i, mask=is_wanted & (i >= 0), other=0)
    request = token & REQUEST_MASK
    is_token = is_wanted & (i >= 0) & (request < num_requests)
    request_at = requests_ptr + request  # fields in the order of REQUEST_FIELDS
    stream = tl.load(request_at, mask=is_token, other=0)
    choice = tl.load(request_at + MAX_R, mask=is_token, other=0).to(tl.int32)
    prompt = tl.load(request_at + 2 * MAX_R, mask=is_token, other=0)
    seen = tl.load(request_at + 3 * MAX_R, mask=is_token, other=0)
    position = tl.load(positions_ptr + i, mask=is_token, other=0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + i, mask=is_token, other=-1).to(tl.int32)
    marks = choice | ((position >= prompt).to(tl.int32) << 16)
    marks = marks | ((position < seen).to(tl.int32) << 24)
    marks = marks | ((token >> MEDIA_BITS) << MEDIA_AT)
    word = tl.where(field == 0, stream.to(tl.int32), (stream >> 32).to(tl.int32))
    word = tl.where(field == 2, position.to(tl.int32), word)
    word = tl.where(field == 3, token_id, word)
    word = tl.where(field == 4, 1, word)
    word = tl.where(field == 5, marks, word)
    event = tl.load(events_ptr + row * 6 + field, mask=is_event, other=0)
    return tl.where(is_event, event, word)


@triton.jit
def _write_rows(payload_ptr, begin, count, header_ptr, positions_ptr, token_ids_ptr,
                MAX_R: tl.constexpr, MAX_E: tl.constexpr, TILE_W: tl.constexpr):  # fmt: skip
    num_events = tl.load(header_ptr + NUM_EVENTS)
    num_requests = tl.load(header_ptr + NUM_REQUESTS)
    requests_ptr = header_ptr + HEAD_WORDS
    events_ptr = (requests_ptr + NUM_REQUEST_FIELDS * MAX_R).to(tl.pointer_type(tl.int32))
    request_ptr = events_ptr + 6 * MAX_E
    words_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
    for first in range(tl.program_id(1) * TILE_W, count * 6, tl.num_programs(1) * TILE_W):
        w = first + tl.arange(0, TILE_W)
        is_wanted = w < count * 6
        word = _row_words(begin + w // 6, w % 6, is_wanted, num_events, num_requests, requests_ptr,
                          events_ptr, request_ptr, positions_ptr, token_ids_ptr, MAX_R)  # fmt: skip
        tl.store(words_ptr + w, word, mask=is_wanted)


@triton.jit
def _write_scores(payload_ptr, begin, count, header_ptr, scores_ptr, column_ptr, K,
                  TILE_E: tl.constexpr):  # fmt: skip
    num_events = tl.load(header_ptr + NUM_EVENTS)
    num_columns = tl.load(header_ptr + NUM_COLUMNS)
    out_ptr = (payload_ptr + count * 3).to(tl.pointer_type(tl.float32))
    num_scores = count * num_columns
    for first in range(tl.program_id(1) * TILE_E, num_scores, tl.num_programs(1) * TILE_E):
        e = first + tl.arange(0, TILE_E)
        is_wanted = e < num_scores
        i = begin + e // num_columns - num_events
        column = tl.load(column_ptr + e % num_columns, mask=is_wanted, other=0)
        is_token = is_wanted & (i >= 0)
        score = tl.load(scores_ptr + column + i * K, mask=is_token, other=float("nan"))
        tl.store(out_ptr + e, score, mask=is_wanted)


# By the first thread alone; the others' stores come before it, by the barrier above each use.
STORE_RELEASE: Final = tl.constexpr("""{
    .reg .pred is_first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 is_first, thread, 0;
    @is_first st.release.sys.global.u64 [$1], $2;
    mov.u32 $0, thread;
}""")


@triton.jit
def _release(word_ptr, value, IS_GPU: tl.constexpr):
    """Store with release at system scope: who sees the value sees all that was stored before.

    Triton has no such store, only exchanges, which a GPU does not do on host memory by itself (CUDA
    driver, hostNativeAtomicSupported). Its interpreter knows exchanges alone.
    """
    if IS_GPU:
        given = [word_ptr.to(tl.int64), value.to(tl.int64)]
        tl.inline_asm_elementwise(STORE_RELEASE, "=r,l,l", given, tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(word_ptr, value, sem="release", scope="sys")


@triton.jit
def _publish_records(ring_ptr, header_ptr, turn_ptr, first_row, num_records, SLOTS, SLOT_BYTES,
                     part, AHEAD: tl.constexpr, CLOCK: tl.constexpr,
                     IS_GPU: tl.constexpr):  # fmt: skip
    """Write the slot headers and trailers of this launch's records, then move the ring's head."""
    num_rows, per_record = tl.load(header_ptr + NUM_ROWS), tl.load(header_ptr + ROWS_PER_RECORD)
    num_columns, step = tl.load(header_ptr + NUM_COLUMNS), tl.load(header_ptr + STEP)
    record = tl.arange(0, AHEAD)
    is_wanted = record < num_records
    seq = tl.load(header_ptr + FIRST_SEQ) + part * AHEAD + record
    begin = first_row + record * per_record
    left = num_rows - begin
    count = tl.minimum(left, per_record)
    stamp = tl.load(header_ptr + STAMP_NS)
    if CLOCK:
        stamp += tl.extra.cuda.globaltimer()
    slot_ptr = ring_ptr + (SLOTS_AT + (seq % SLOTS) * SLOT_BYTES) // 8
    tl.store(slot_ptr + SEQ_AT, seq, mask=is_wanted)
    epoch_and_bank = tl.load(header_ptr + EPOCH_AND_BANK)
    tl.store(slot_ptr + EPOCH_AND_BANK_AT, seq * 0 + epoch_and_bank, mask=is_wanted)
    tl.store(slot_ptr + SIZES_AT, count | (num_columns << 32), mask=is_wanted)
    tl.store(slot_ptr + STEP_AT, seq * 0 + step, mask=is_wanted)
    flags = (left > per_record).to(tl.int64) | tl.load(header_ptr + RECORD_FLAGS)
    tl.store(slot_ptr + FLAGS_AT, flags, mask=is_wanted)
    tl.store(slot_ptr + STAMP_AT, seq * 0 + stamp, mask=is_wanted)
    tl.store(slot_ptr + SLOT_BYTES // 8 - 1, seq, mask=is_wanted)
    tl.debug_barrier()  # all threads' stores come before the one that publishes them
    head = tl.load(header_ptr + FIRST_SEQ) + part * AHEAD + num_records
    # Pairs with both loads of head in RingCursor.poll() in ring/reader.py.
    _release(ring_ptr + RING_HEAD, head, IS_GPU)
    if first_row + num_records * per_record >= num_rows:
        number = tl.load(header_ptr + NUMBER)
        tl.store(turn_ptr, number)  # read by the next launch, which the GPU starts after this one
        # The host may write the header again. Pairs with StepHeader.is_published in step_header.py
        # and is_published() in step.c.
        _release(header_ptr + DONE, number, IS_GPU)


@triton.jit
def _write_record(ring_ptr, header_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                  at, SLOTS, SLOT_BYTES, K, MAX_R: tl.constexpr, MAX_E: tl.constexpr,
                  TILE_E: tl.constexpr, TILE_W: tl.constexpr):  # fmt: skip
    """Rows and scores of record `at` of a step; this program's part of them."""
    per_record = tl.load(header_ptr + ROWS_PER_RECORD)
    begin = per_record * at
    count = tl.minimum(tl.load(header_ptr + NUM_ROWS) - begin, per_record)
    seq = tl.load(header_ptr + FIRST_SEQ) + at
    payload_ptr = ring_ptr + (SLOTS_AT + (seq % SLOTS) * SLOT_BYTES + PAYLOAD_AT) // 8
    _write_rows(payload_ptr, begin, count, header_ptr, positions_ptr, token_ids_ptr,
                MAX_R, MAX_E, TILE_W)  # fmt: skip
    _write_scores(payload_ptr, begin, count, header_ptr, scores_ptr, column_ptr, K, TILE_E)


@triton.jit
def mark_rejected(header_ptr, starts_ptr, rejected_ptr, MAX_R: tl.constexpr, MAX_E: tl.constexpr,
                  TILE_W: tl.constexpr):  # fmt: skip
    """Mark the rejected drafts of one request in the step's header. Grid: (requests,).

    Runs before the launch that publishes the header, which reads the marks.
    """
    events_ptr = header_ptr + HEAD_WORDS + NUM_REQUEST_FIELDS * MAX_R
    request_ptr = events_ptr.to(tl.pointer_type(tl.int32)) + 6 * MAX_E
    end = tl.load(starts_ptr + tl.program_id(0) + 1)
    num_rejected = tl.load(rejected_ptr + tl.program_id(0))
    for first in range(0, num_rejected, TILE_W):
        i = first + tl.arange(0, TILE_W)
        is_wanted = i < num_rejected
        token = tl.load(request_ptr + end - 1 - i, mask=is_wanted, other=0)
        tl.store(request_ptr + end - 1 - i, token | REJECTED_MARK, mask=is_wanted)


@triton.jit
def _is_last(ticket_ptr):
    """Whether all other programs of this launch have written what they write."""
    tl.debug_barrier()  # all threads' stores come before this program's ticket
    # Release at system scope: the payload is visible, to the host too, before the ticket. Acquire:
    # who draws the last ticket has all payloads before its own stores. The partner is this line.
    drawn = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    return drawn == tl.num_programs(0) * tl.num_programs(1) - 1


@triton.jit(do_not_specialize=["SLOTS", "SLOT_BYTES", "K", "part"])
def publish_step(ring_ptr, header_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                 ticket_ptr, turn_ptr, SLOTS, SLOT_BYTES, K, part,
                 MAX_R: tl.constexpr, MAX_E: tl.constexpr, TILE_E: tl.constexpr,
                 TILE_W: tl.constexpr, AHEAD: tl.constexpr, CLOCK: tl.constexpr,
                 IS_GPU: tl.constexpr):  # fmt: skip
    """Part `part` of a step: at most AHEAD records. Grid: (records, programs for each)."""
    first = part * AHEAD
    _write_record(ring_ptr, header_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                  first + tl.program_id(0), SLOTS, SLOT_BYTES, K,
                  MAX_R, MAX_E, TILE_E, TILE_W)  # fmt: skip
    if _is_last(ticket_ptr):
        tl.store(ticket_ptr, 0)  # for the next launch: it begins when this one has ended
        first_row = tl.load(header_ptr + ROWS_PER_RECORD) * first
        _publish_records(ring_ptr, header_ptr, turn_ptr, first_row, tl.num_programs(0), SLOTS,
                         SLOT_BYTES, part, AHEAD, CLOCK, IS_GPU)  # fmt: skip


@triton.jit(do_not_specialize=["SLOTS", "SLOT_BYTES", "K"])
def publish_in_graph(ring_ptr, headers_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                     ticket_ptr, turn_ptr, SLOTS, SLOT_BYTES, K,
                     NUM_HEADERS: tl.constexpr, HEADER_WORDS: tl.constexpr, MAX_R: tl.constexpr,
                     MAX_E: tl.constexpr, TILE_E: tl.constexpr, TILE_W: tl.constexpr,
                     AHEAD: tl.constexpr, CLOCK: tl.constexpr,
                     IS_GPU: tl.constexpr):  # fmt: skip
    """The step whose turn it is, if its header is there and allows it; at most AHEAD records.

    Captured with the forward. A replay without such a header publishes nothing.
    """
    turn = tl.load(turn_ptr)
    header_ptr = headers_ptr + turn % NUM_HEADERS * HEADER_WORDS
    # Pairs with the last store of write_repeated() in step.c and of StepHeader.write().
    is_here = (tl.load(header_ptr + NUMBER) == turn + 1) & (tl.load(header_ptr + IN_GRAPH) != 0)
    if is_here:
        per_record = tl.load(header_ptr + ROWS_PER_RECORD)
        num_records = (tl.load(header_ptr + NUM_ROWS) + per_record - 1) // per_record
        for at in range(tl.program_id(0), num_records, tl.num_programs(0)):
            _write_record(ring_ptr, header_ptr, scores_ptr, column_ptr, positions_ptr,
                          token_ids_ptr, at, SLOTS, SLOT_BYTES, K,
                          MAX_R, MAX_E, TILE_E, TILE_W)  # fmt: skip
        if _is_last(ticket_ptr):
            tl.store(ticket_ptr, 0)
            _publish_records(ring_ptr, header_ptr, turn_ptr, 0, num_records, SLOTS, SLOT_BYTES, 0,
                             AHEAD, CLOCK, IS_GPU)  # fmt: skip
