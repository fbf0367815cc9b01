"""The records that the GPU itself writes are those that the host would have written, bit for bit.

T = tokens in this step, R = requests in this step, C = columns of the bank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.publish import header_layout, publish_kernel
from clairai.engine.publish.header_layout import NUM_HEADERS
from clairai.engine.step import ForwardInputs, JudgedDrafts, RequestMark, StepBatch
from clairai.ring.layout import (
    HEAD_OFFSET,
    PAYLOAD_OFFSET,
    SLOTS_OFFSET,
    STAMP_OFFSET,
    TRAILER_BYTES,
    RingShape,
    row_bytes,
)
from clairai.wire import ring_messages
from tests.kernels.publishers import (
    WIDE,
    Publishers,
    Way,
    assert_same,
    assert_scored,
    publishers,
    rows_in,
)
from tests.support.engine_steps import Plan, plans

TINY = RingShape(slots=4, slot_bytes=4096, ahead=2)
PER_RECORD = WIDE.rows_per_record(4)
WAYS: tuple[Way, ...] = ("sent", "live", "graph")


def follow(both: Publishers, history: list[Plan], ways: Sequence[Way] = ("sent",)) -> int:
    """Kernel and host agree with each other and with the reference; how many rows."""
    num_rows = 0
    for plan, way in zip(history, itertools.cycle(ways), strict=False):
        expected = both.step(plan, way)
        found, by_host = both.poll()
        assert_same(found, by_host)
        assert rows_in(found) == expected
        num_rows += len(expected)
    assert both.device.published == both.host.published == both.device_ring.statistics().delivered
    return num_rows


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(plans, min_size=1, max_size=8),
    st.integers(0, 6),
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=8),
)
def test_any_history_of_an_engine_comes_out_as_the_host_and_the_reference_have_it(
    history: list[Plan], num_probes: int, ways: list[Way]
) -> None:
    with publishers(num_probes=num_probes) as both:
        follow(both, history, ways)


def test_prefill_decode_cached_recomputed_and_finished_rows_stand_in_one_step() -> None:
    history = [
        Plan(new=[(9, 2, 1), (4, 0, 0), (6, 5, 3)], counts=[7, 4, 1]),
        Plan(counts=[1, 1, 1], order=2),
        Plan(preempt=[(1, 1)], finish=[0], new=[(20, 10, 2)], counts=[6, 1, 4], order=1),
    ]
    with publishers() as both:
        follow(both, history)
        both.step(Plan(preempt=[(0, 2)], finish=[1], new=[(5, 3, 0)], counts=[9, 1, 2]))
        (record,), _ = both.poll()
    assert set(record.rows["phase"].tolist()) == {*range(len(ring_messages.PHASE_NAMES))}
    assert set(record.rows["flags"].tolist()) == {0, ring_messages.RECOMPUTED}
    assert record.rows["phase"][:2].tolist() == [ring_messages.FINISHED, ring_messages.CACHED]
    assert (record.rows["stream"] > np.uint64(2**63)).all()


def test_a_step_of_many_requests_gives_each_its_own_rows() -> None:
    new = [(3 + index % 5, index % 3, index % 4) for index in range(200)]
    history = [
        Plan(new=new),
        Plan(counts=[1 + index % 3 for index in range(200)], order=31),
        Plan(counts=[1] * 200, order=77, finish=[*range(0, 90, 2)]),
    ]
    with publishers(max_requests=200) as both:
        assert follow(both, history) > 700


def test_scores_stand_in_the_order_of_the_bank_and_events_have_none() -> None:
    with publishers(num_probes=5) as both:
        both.step(Plan(new=[(9, 2, 0), (4, 0, 0)], counts=[7, 4]))
        records, _ = both.poll()
        assert_scored(records, both.tables.gather(11))


@pytest.mark.parametrize("num_rows", [PER_RECORD - 1, PER_RECORD, PER_RECORD + 1, 4 * PER_RECORD])
def test_a_step_is_cut_into_records_where_a_slot_is_full(num_rows: int) -> None:
    with publishers() as both:
        follow(both, [Plan(new=[(700, 0, 0)], counts=[num_rows])])
        assert both.device.published == -(-num_rows // PER_RECORD)
        assert len(both.launch.grids) == 1


def test_a_step_of_more_records_than_are_written_at_once_is_published_in_parts() -> None:
    num_rows = 4 * PER_RECORD + 90
    with publishers() as both:
        both.step(Plan(new=[(1000, 3, 1)], counts=[num_rows - 1]))  # and the cached span
        found, by_host = both.poll()
        assert [grid[0] for grid in both.launch.grids] == [4, 1]
    assert_same(found, by_host)
    assert [record.continued for record in found] == [True] * 4 + [False]
    assert [len(record.rows) for record in found] == [PER_RECORD] * 4 + [90]


def test_a_record_of_many_scores_is_written_by_many_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(header_layout, "TILE_E", 64)
    monkeypatch.setattr(publish_kernel, "TILE_W", 32)
    with publishers() as both:
        follow(both, [Plan(new=[(300, 0, 0)], counts=[PER_RECORD + 3])])
        assert both.launch.grids == [(2, -(-PER_RECORD * 4 // 64))]


def test_a_bank_without_probes_gives_rows_without_columns() -> None:
    with publishers(num_probes=0) as both:
        follow(both, [Plan(new=[(9, 2, 0)], counts=[7]), Plan(finish=[0])])
        assert both.device.published == 2


def test_a_step_of_events_alone_is_a_record() -> None:
    with publishers() as both:
        follow(both, [Plan(new=[(9, 0, 0)], counts=[7]), Plan(finish=[0]), Plan()])
        assert both.device.published == 2


@pytest.mark.parametrize("num_finished", [3, 4, 6, 7, 10])
def test_more_events_than_a_header_holds_go_in_several_headers(
    monkeypatch: pytest.MonkeyPatch, num_finished: int
) -> None:
    monkeypatch.setattr(header_layout, "MAX_EVENTS", 3)
    with publishers() as both:
        follow(both, [Plan(new=[(2, 0, 0)] * 12, counts=[1] * 12)])
        before = both.device.published
        expected = both.step(Plan(finish=[0] * num_finished, counts=[2, 1]))
        found, _ = both.poll()
        assert rows_in(found) == expected
        assert_scored(found, both.tables.gather(3))
        assert both.device.published - before == len(found) == -(-num_finished // 3)
    assert {record.step for record in found} == {2}
    assert [record.continued for record in found] == [True] * (len(found) - 1) + [False]


def test_a_thousand_requests_that_end_at_once_are_all_said_to_have_ended() -> None:
    with publishers() as both:
        both.step(Plan(new=[(1, 0, 0)] * 1100))
        expected = both.step(Plan(finish=[0] * 1100, new=[(5, 0, 0)], counts=[2]))
        found, by_host = both.poll()
    assert len(expected) == 1102
    assert rows_in(found) == rows_in(by_host) == expected


def test_a_change_of_the_bank_is_seen_in_the_next_step_and_not_before() -> None:
    with publishers(num_probes=2) as both:
        follow(both, [Plan(new=[(9, 0, 0)], counts=[3])])
        both.load(6)
        both.step(Plan(counts=[2]))
        (record,), by_host = both.poll()
        assert_same([record], by_host)
        assert (record.bank_version, record.scores_RC.shape) == (2, (2, 6))
        assert_scored([record], both.tables.gather(2))


def test_more_steps_than_there_are_headers_use_them_again() -> None:
    history = [Plan(new=[(4, 0, 1)] * 3, counts=[2, 1, 4])]
    history += [Plan(counts=[1, 2, 1], order=step // 5) for step in range(3 * NUM_HEADERS)]
    with publishers() as both:
        follow(both, history)


def test_the_kernel_writes_the_head_and_its_slots_and_nothing_else_of_the_ring() -> None:
    with publishers() as both:
        memory = both.device_ring._memory
        before = memory.copy(0, SLOTS_OFFSET)
        both.step(Plan(new=[(700, 0, 0)], counts=[PER_RECORD + 5]))
        after = memory.copy(0, memory.nbytes)
    assert after[:HEAD_OFFSET] == before[:HEAD_OFFSET]
    assert after[HEAD_OFFSET : HEAD_OFFSET + 8] == (2).to_bytes(8, "little")
    assert after[HEAD_OFFSET + 8 : SLOTS_OFFSET] == before[HEAD_OFFSET + 8 :]
    second = after[WIDE.slot_offset(1) : WIDE.slot_offset(2)]
    end = PAYLOAD_OFFSET + 5 * row_bytes(4)
    assert second[STAMP_OFFSET + 8 : PAYLOAD_OFFSET] == bytes(PAYLOAD_OFFSET - STAMP_OFFSET - 8)
    assert second[end:-TRAILER_BYTES] == bytes(WIDE.slot_bytes - end - TRAILER_BYTES)
    assert after[WIDE.slot_offset(2) :] == bytes(WIDE.nbytes - WIDE.slot_offset(2))


def test_laps_of_a_tiny_ring_lose_exactly_what_was_not_read() -> None:
    with publishers(shape=TINY) as both:
        both.step(Plan(new=[(4000, 0, 0)], counts=[PER_RECORD * 3 + 1]))
        for _ in range(9):
            both.step(Plan(counts=[5]))
        found, by_host = both.poll()
        statistics = both.device_ring.statistics()
    assert (len(by_host), statistics.delivered, statistics.lost) == (13, 2, 11)
    assert (statistics.torn, statistics.lag) == (0, 0)
    assert_same(found, by_host[-2:])


def test_a_reader_that_keeps_up_with_a_tiny_ring_loses_nothing() -> None:
    with publishers(shape=TINY) as both:
        follow(both, [Plan(new=[(4000, 0, 0)], counts=[9]), *[Plan(counts=[150])] * 20])
        assert both.device_ring.statistics().lost == 0
        assert both.device.published == 41


def test_a_record_says_when_its_step_was_sent() -> None:
    with publishers() as both:
        before_ns = time.monotonic_ns()
        both.step(Plan(new=[(700, 0, 0)], counts=[2 * PER_RECORD]))
        after_ns = time.monotonic_ns()
        stamps = {record.stamp_ns for record in both.poll()[0]}
    assert len(stamps) == 1
    assert before_ns <= stamps.pop() <= after_ns


def test_steps_that_are_all_alike_say_which_bank_scored_them_when_it_changes() -> None:
    """The second bank has as many probes as the first: nothing else tells the steps apart."""
    alike = [Plan(counts=[1, 1])] * (2 * NUM_HEADERS)
    with publishers() as both:
        follow(both, [Plan(new=[(1, 0, 0)] * 2, counts=[1, 1])])
        for version in (2, 3):
            both.load(4)
            for plan in alike:
                expected = both.step(plan)
                (record,), by_host = both.poll()
                assert_same([record], by_host)
                assert rows_in([record]) == expected
                assert record.bank_version == version


@settings(derandomize=True, deadline=None, max_examples=10)
@given(st.data())
def test_drafts_that_only_the_device_knows_to_be_rejected_are_not_read_as_rows(data: Any) -> None:
    """Of more steps than there are headers: what was marked in one is not in the next."""
    with publishers() as both:
        rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
        names, nexts = ["a", "b", "c"], np.array([4, 9, 0])
        for index, name in enumerate(names):
            both.builder.add_request(name, RequestMark(index + 1, index), 2)
        for step in range(2 * NUM_HEADERS + 1):
            counts_R = rng.integers(1, 5, 3).astype(np.int32)
            if step % 3:  # the same counts again and again
                counts_R[:] = 4
            rejected_R = rng.integers(0, counts_R).astype(np.int32)
            # The host counts what the step before may have rejected.
            starts_R = (nexts + rng.integers(0, 3, 3)).astype(np.int32)
            lowest_R = nexts.astype(np.int32)
            step_batch = StepBatch(names, counts_R, starts_R, counts_R - 1, lowest_R)
            rows = both.builder.build(step_batch)
            ends_R = np.cumsum(counts_R)
            within_T = np.arange(ends_R[-1]) - np.repeat(ends_R - counts_R, counts_R)
            positions_T = np.repeat(nexts, counts_R) + within_T
            drafts = JudgedDrafts(
                torch.tensor([0, *ends_R.tolist()], dtype=torch.int32), torch.tensor(rejected_R)
            )
            tokens_T = (positions_T * 7 + step).astype(np.int32)
            inputs = ForwardInputs(torch.tensor(positions_T), torch.tensor(tokens_T), drafts)
            both.tables.scores_STK.normal_()
            assert both.device.announce(rows, both.bank_version)
            both.device.forward_ran(lambda: inputs)  # noqa: B023
            both.device.finish(lambda: inputs)  # noqa: B023
            kept = rows.leave_out(rejected_R)
            assert kept.is_kept_T is not None
            (record,) = both.device_ring.poll()
            assert record.rows.tobytes() == kept.fill(positions_T, tokens_T).tobytes()
            scores_TP = both.tables.gather(len(positions_T)).numpy()[kept.is_kept_T]
            assert np.array_equal(record.scores_RC[len(rows.events) :], scores_TP)
            nexts = nexts + counts_R - rejected_R
            assert not (record.rows["flags"] & ring_messages.RECOMPUTED).any()
