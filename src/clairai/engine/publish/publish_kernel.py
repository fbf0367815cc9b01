"""Takes one step's scores and whose rows they are; gives records in the ring, published by the GPU.

T = tokens in this step, R = requests in this step, C = columns of the bank.

The ring is mapped host memory or device memory: the kernel does not know which. Up to `AHEAD`
records are written at once and published by one store, so a reader gives up as many slots
(ring/layout.py). What changes from step to step is read from the brief, a block of pinned memory;
the words of its head:

    0 events  1 rows in all  2 first seq  3 step  4 epoch low half, bank version  5 columns
    6 rows per record  7 requests  8 stamp, ns  9 number of the brief  10 whether the step goes on
    in the next brief  11 whether the forward's own graph may publish it  15 given back: the number
    of the brief

Briefs are numbered from one on and published in that order: `turn` is the number of the last. A
graph that was captured knows no brief: it finds the next one by its turn.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

TILE_E: Final = 1024  # scores that one program writes
TILE_W: Final = 256  # words of rows that it writes at a time
HEAD_WORDS: Final = 16
DONE_WORD: Final = 15
REQUEST_FIELDS: Final = 4  # of a request: stream, choice, prompt length, seen
ROW_WORDS: Final = 6  # wire.ROW in words of 4 bytes


@triton.jit
def _row_words(row, field, is_wanted, num_events, num_requests, plan_ptr, events_ptr, request_ptr,
               positions_ptr, token_ids_ptr, MAX_R: tl.constexpr):  # fmt: skip
    """Word `field` of each `row`, as wire.ROW has it."""
    is_event = is_wanted & (row < num_events)
    i = row - num_events
    request = tl.load(request_ptr + i, mask=is_wanted & (i >= 0), other=0)
    is_token = is_wanted & (i >= 0) & (request < num_requests)
    plan = plan_ptr + request
    stream = tl.load(plan, mask=is_token, other=0)
    choice = tl.load(plan + MAX_R, mask=is_token, other=0).to(tl.int32)
    prompt = tl.load(plan + 2 * MAX_R, mask=is_token, other=0)
    seen = tl.load(plan + 3 * MAX_R, mask=is_token, other=0)
    position = tl.load(positions_ptr + i, mask=is_token, other=0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + i, mask=is_token, other=-1).to(tl.int32)
    marks = choice | ((position >= prompt).to(tl.int32) << 16)
    marks = marks | ((position < seen).to(tl.int32) << 24)
    word = tl.where(field == 0, stream.to(tl.int32), (stream >> 32).to(tl.int32))
    word = tl.where(field == 2, position.to(tl.int32), word)
    word = tl.where(field == 3, token_id, word)
    word = tl.where(field == 4, 1, word)
    word = tl.where(field == 5, marks, word)
    event = tl.load(events_ptr + row * 6 + field, mask=is_event, other=0)
    return tl.where(is_event, event, word)


@triton.jit
def _write_rows(payload_ptr, begin, count, brief_ptr, positions_ptr, token_ids_ptr,
                MAX_R: tl.constexpr, MAX_E: tl.constexpr, TILE_W: tl.constexpr):  # fmt: skip
    num_events, num_requests = tl.load(brief_ptr), tl.load(brief_ptr + 7)
    plan_ptr = brief_ptr + 16
    events_ptr = (plan_ptr + 4 * MAX_R).to(tl.pointer_type(tl.int32))
    request_ptr = events_ptr + 6 * MAX_E
    words_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
    for first in range(tl.program_id(1) * TILE_W, count * 6, tl.num_programs(1) * TILE_W):
        w = first + tl.arange(0, TILE_W)
        is_wanted = w < count * 6
        word = _row_words(begin + w // 6, w % 6, is_wanted, num_events, num_requests, plan_ptr,
                          events_ptr, request_ptr, positions_ptr, token_ids_ptr, MAX_R)  # fmt: skip
        tl.store(words_ptr + w, word, mask=is_wanted)


@triton.jit
def _write_scores(payload_ptr, begin, count, brief_ptr, scores_ptr, column_ptr, K,
                  TILE_E: tl.constexpr):  # fmt: skip
    num_events, num_columns = tl.load(brief_ptr), tl.load(brief_ptr + 5)
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
def _publish_records(ring_ptr, brief_ptr, turn_ptr, first_row, num_records, SLOTS, SLOT_BYTES, part,
             AHEAD: tl.constexpr, CLOCK: tl.constexpr, IS_GPU: tl.constexpr):  # fmt: skip
    """Heads and tails of all records of this launch, then the ring's head."""
    num_rows, per_record = tl.load(brief_ptr + 1), tl.load(brief_ptr + 6)
    num_columns, step = tl.load(brief_ptr + 5), tl.load(brief_ptr + 3)
    record = tl.arange(0, AHEAD)
    is_wanted = record < num_records
    seq = tl.load(brief_ptr + 2) + part * AHEAD + record
    begin = first_row + record * per_record
    left = num_rows - begin
    count = tl.minimum(left, per_record)
    stamp = tl.load(brief_ptr + 8)
    if CLOCK:
        stamp += tl.extra.cuda.globaltimer()
    slot_ptr = ring_ptr + (4096 + (seq % SLOTS) * SLOT_BYTES) // 8
    tl.store(slot_ptr, seq, mask=is_wanted)
    tl.store(slot_ptr + 1, seq * 0 + tl.load(brief_ptr + 4), mask=is_wanted)
    tl.store(slot_ptr + 2, count | (num_columns << 32), mask=is_wanted)
    tl.store(slot_ptr + 3, seq * 0 + step, mask=is_wanted)
    is_continued = (left > per_record).to(tl.int64) | tl.load(brief_ptr + 10)
    tl.store(slot_ptr + 4, is_continued, mask=is_wanted)
    tl.store(slot_ptr + 5, seq * 0 + stamp, mask=is_wanted)
    tl.store(slot_ptr + SLOT_BYTES // 8 - 1, seq, mask=is_wanted)
    tl.debug_barrier()  # all threads' stores come before the one that publishes them
    head = tl.load(brief_ptr + 2) + part * AHEAD + num_records
    # Pairs with both loads of head in Ring.poll() in ring/reader.py.
    _release(ring_ptr + 16, head, IS_GPU)
    if first_row + num_records * per_record >= num_rows:
        tl.store(turn_ptr, tl.load(brief_ptr + 9))  # read by the next launch, in the GPU's order
        # Pairs with Brief.done in brief.py and is_done() in ledger.h: the host may write it again.
        _release(brief_ptr + 15, tl.load(brief_ptr + 9), IS_GPU)


@triton.jit
def _write_record(ring_ptr, brief_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                  at, SLOTS, SLOT_BYTES, K, MAX_R: tl.constexpr, MAX_E: tl.constexpr,
                  TILE_E: tl.constexpr, TILE_W: tl.constexpr):  # fmt: skip
    """Rows and scores of record `at` of a step; this program's part of them."""
    per_record = tl.load(brief_ptr + 6)
    begin = per_record * at
    count = tl.minimum(tl.load(brief_ptr + 1) - begin, per_record)
    seq = tl.load(brief_ptr + 2) + at
    payload_ptr = ring_ptr + (4096 + (seq % SLOTS) * SLOT_BYTES + 64) // 8
    _write_rows(payload_ptr, begin, count, brief_ptr, positions_ptr, token_ids_ptr,
                MAX_R, MAX_E, TILE_W)  # fmt: skip
    _write_scores(payload_ptr, begin, count, brief_ptr, scores_ptr, column_ptr, K, TILE_E)


@triton.jit
def _is_last(ticket_ptr):
    """Whether all other programs of this launch have written what they write."""
    tl.debug_barrier()  # all threads' stores come before this program's ticket
    # Release at system scope: the payload is visible, to the host too, before the ticket. Acquire:
    # who draws the last ticket has all payloads before its own stores. The partner is this line.
    drawn = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    return drawn == tl.num_programs(0) * tl.num_programs(1) - 1


@triton.jit(do_not_specialize=["SLOTS", "SLOT_BYTES", "K", "part"])
def publish_step(ring_ptr, brief_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
           ticket_ptr, turn_ptr, SLOTS, SLOT_BYTES, K, part,
           MAX_R: tl.constexpr, MAX_E: tl.constexpr, TILE_E: tl.constexpr, TILE_W: tl.constexpr,
           AHEAD: tl.constexpr, CLOCK: tl.constexpr, IS_GPU: tl.constexpr):  # fmt: skip
    """Part `part` of a step: at most AHEAD records. Grid: (records, programs for each)."""
    first = part * AHEAD
    _write_record(ring_ptr, brief_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                  first + tl.program_id(0), SLOTS, SLOT_BYTES, K,
                  MAX_R, MAX_E, TILE_E, TILE_W)  # fmt: skip
    if _is_last(ticket_ptr):
        tl.store(ticket_ptr, 0)  # for the next launch: it begins when this one has ended
        _publish_records(ring_ptr, brief_ptr, turn_ptr, tl.load(brief_ptr + 6) * first,
                 tl.num_programs(0), SLOTS, SLOT_BYTES, part, AHEAD, CLOCK, IS_GPU)  # fmt: skip


@triton.jit(do_not_specialize=["SLOTS", "SLOT_BYTES", "K"])
def publish_in_graph(ring_ptr, briefs_ptr, scores_ptr, column_ptr, positions_ptr, token_ids_ptr,
                    ticket_ptr, turn_ptr, SLOTS, SLOT_BYTES, K,
                    NUM_BRIEFS: tl.constexpr, MAX_R: tl.constexpr, MAX_E: tl.constexpr,
                    TILE_E: tl.constexpr, TILE_W: tl.constexpr, AHEAD: tl.constexpr,
                    CLOCK: tl.constexpr, IS_GPU: tl.constexpr):  # fmt: skip
    """The step whose turn it is, if its brief is there and says so; at most AHEAD records.

    Captured with the forward. A replay without such a brief publishes nothing.
    """
    turn = tl.load(turn_ptr)
    brief_ptr = tl.load(briefs_ptr + turn % NUM_BRIEFS).to(tl.pointer_type(tl.int64))
    is_here = (tl.load(brief_ptr + 9) == turn + 1) & (tl.load(brief_ptr + 11) != 0)
    if is_here:
        per_record = tl.load(brief_ptr + 6)
        num_records = (tl.load(brief_ptr + 1) + per_record - 1) // per_record
        for at in range(tl.program_id(0), num_records, tl.num_programs(0)):
            _write_record(ring_ptr, brief_ptr, scores_ptr, column_ptr, positions_ptr,
                          token_ids_ptr, at, SLOTS, SLOT_BYTES, K,
                          MAX_R, MAX_E, TILE_E, TILE_W)  # fmt: skip
        if _is_last(ticket_ptr):
            tl.store(ticket_ptr, 0)
            _publish_records(ring_ptr, brief_ptr, turn_ptr, 0, num_records, SLOTS, SLOT_BYTES, 0,
                     AHEAD, CLOCK, IS_GPU)  # fmt: skip
