"""A step's rows and scores reach the ring unchanged, and stay unchanged there.

T = tokens in this step, P = probes, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from clairai.engine.publish.publisher import HostPublisher
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import ForwardInputs, JudgedDrafts, RequestMark, StepBatch
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.probe.model import Probe
from clairai.ring.layout import PAYLOAD_OFFSET, RingShape
from clairai.ring.memory import HostMemory
from clairai.ring.reader import Record, RingCursor
from clairai.ring.writer import RingWriter
from clairai.wire import ring_messages

HERE = Point("post_block", 0)
SHAPE = RingShape(slots=8, slot_bytes=4096)
MAX_TOKENS = 256
VERSION = 3


def tables(num_probes: int) -> ScoreTables:
    """Probe p scores coordinate p of a row."""
    held = ScoreTables(
        [str(HERE)], width=num_probes, capacity=num_probes, max_tokens=MAX_TOKENS, device="cpu"
    )
    probes = [Probe(f"p{i}", HERE, row_D) for i, row_D in enumerate(np.eye(num_probes, dtype="f4"))]
    held.load(EngineBank.empty((HERE,), num_probes, num_probes, "toy").add(probes))
    return held


@contextmanager
def ring(held: ScoreTables) -> Iterator[tuple[HostPublisher, RingCursor]]:
    with HostMemory.create(SHAPE.nbytes) as memory:
        publisher = HostPublisher(RingWriter(memory, SHAPE, 0xABCD), held)
        yield publisher, RingCursor(memory)
        publisher.close()


def rows_of(num_tokens: int, *, start: int = 0, stream: int = 7) -> StepRows:
    builder = RowBuilder()
    builder.add_request("a", RequestMark(stream, 2), 2)
    counts_R, starts_R = np.array([num_tokens], np.int32), np.array([start], np.int32)
    return builder.build(StepBatch(["a"], counts_R, starts_R))


def inputs() -> ForwardInputs:
    """The runner's buffers: longer than the step."""
    return ForwardInputs(
        torch.arange(MAX_TOKENS), torch.arange(MAX_TOKENS, dtype=torch.int32) + 100
    )


def test_a_step_comes_out_of_the_ring_as_it_was_published() -> None:
    held = tables(3)
    scores_TP = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    held.site(str(HERE)).read(scores_TP)
    with ring(held) as (publisher, reader):
        publisher.last_step = 8
        publisher.publish(rows_of(4), VERSION, inputs())
        (record,) = reader.poll()
        assert publisher.published == 1
    assert (record.step, record.bank_version, record.continued) == (9, VERSION, False)
    assert record.rows["stream"].tolist() == [7] * 4
    assert record.rows["choice"].tolist() == [2] * 4
    assert record.rows["position"].tolist() == [0, 1, 2, 3]
    assert record.rows["token_id"].tolist() == [100, 101, 102, 103]
    assert record.rows["phase"].tolist() == [ring_messages.PREFILL] * 2 + [ring_messages.DECODE] * 2
    assert np.array_equal(record.scores_RC, scores_TP.numpy())


def test_rows_that_stand_for_no_forward_carry_no_scores() -> None:
    held = tables(2)
    held.site(str(HERE)).read(torch.ones(2, 2))
    with ring(held) as (publisher, reader):
        publisher.publish(rows_of(2, start=1), VERSION, inputs())
        (record,) = reader.poll()
    assert record.rows["phase"].tolist() == [
        ring_messages.CACHED,
        ring_messages.PREFILL,
        ring_messages.PREFILL,
    ]
    assert np.isnan(record.scores_RC[0]).all()
    assert (record.scores_RC[1:] == 1).all()


def test_drafts_that_the_forwards_own_device_rejects_are_left_out() -> None:
    held = tables(2)
    held.site(str(HERE)).read(torch.arange(8).view(4, 2).float())
    drafts = JudgedDrafts(torch.tensor([0, 4]), torch.tensor([3]))
    with ring(held) as (publisher, reader):
        publisher.publish(rows_of(4), VERSION, replace(inputs(), drafts=drafts))
        (record,) = reader.poll()
    assert record.rows["position"].tolist() == [0]
    assert record.scores_RC.tolist() == [[0, 1]]


def test_a_step_of_events_alone_is_published_too() -> None:
    builder = RowBuilder()
    builder.add_request("a", RequestMark(7), 2)
    builder.finish_request("a")
    with ring(tables(2)) as (publisher, reader):
        publisher.publish(builder.build_idle(), VERSION, inputs())
        (record,) = reader.poll()
    assert record.rows["phase"].tolist() == [ring_messages.FINISHED]
    assert np.isnan(record.scores_RC).all()
    assert record.scores_RC.shape == (1, 2)


def test_room_is_asked_for_when_the_next_step_would_pass_the_limit() -> None:
    held, asked = tables(16), list[tuple[int, int]]()
    held.site(str(HERE)).read(torch.ones(MAX_TOKENS, 16))

    def find_limit(published: int, num_records: int) -> int:
        asked.append((published, num_records))
        return published + num_records + 1

    with ring(held) as (publisher, _):
        publisher.set_limit(find_limit)
        for num_tokens in (4, 4, 4, 100, 4):  # 100 are three records
            publisher.publish(rows_of(num_tokens), VERSION, inputs())
    assert asked == [(0, 1), (2, 1), (3, 3)]


def test_a_step_larger_than_a_slot_comes_back_whole() -> None:
    held = tables(6)
    scores_TP = torch.randn(200, 6, generator=torch.Generator().manual_seed(2))
    held.site(str(HERE)).read(scores_TP)
    with ring(held) as (publisher, reader):
        publisher.publish(rows_of(200), VERSION, inputs())
        records = reader.poll()
    assert [record.continued for record in records] == [True, True, False]
    assert np.array_equal(np.concatenate([r.scores_RC for r in records]), scores_TP.numpy())
    assert np.concatenate([r.rows["position"] for r in records]).tolist() == list(range(200))


def content(record: Record) -> bytes:
    return record.rows.tobytes() + record.scores_RC.tobytes()


def test_pitfall_07_a_record_that_is_held_does_not_change_when_the_writer_goes_on() -> None:
    held = tables(2)
    with ring(held) as (publisher, reader):
        kept = []
        for number in range(4 * SHAPE.slots):
            held.site(str(HERE)).read(torch.full((3, 2), float(number)))  # in the same tables
            publisher.publish(rows_of(3, stream=number + 1), VERSION, inputs())
            kept += [(record, content(record)) for record in reader.poll()]
    assert len(kept) == 4 * SHAPE.slots
    for number, (record, before) in enumerate(kept):
        assert content(record) == before
        assert (record.step, set(record.rows["stream"])) == (number + 1, {number + 1})
        assert (record.scores_RC == number).all()


def test_pitfall_07_a_record_that_is_a_view_of_the_ring_would_be_caught() -> None:
    held = tables(1)
    with HostMemory.create(SHAPE.nbytes) as memory:
        publisher = HostPublisher(RingWriter(memory, SHAPE, 0xABCD), held)
        publisher.publish(rows_of(3), VERSION, inputs())
        begin = SHAPE.slot_offset(0) + PAYLOAD_OFFSET
        rows = np.ndarray((3,), ring_messages.ROW, memory.buffer, begin)
        scores_RC = np.ndarray((3, 1), np.float32, memory.buffer, begin + rows.nbytes)
        planted = Record(0, 1, VERSION, False, 0, rows, scores_RC)
        before = content(planted)
        held.site(str(HERE)).read(torch.ones(3, 1))
        for _ in range(SHAPE.slots):
            publisher.publish(rows_of(3), VERSION, inputs())
        assert content(planted) != before
