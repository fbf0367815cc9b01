"""Every forwarded token is one row of its own request, whatever the engine does to its batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.engine.publish.step_rows import RepeatedBatch, RowBuilder, StepRows
from clairai.engine.step import RequestMark, StepBatch
from clairai.wire import ring_messages
from tests.support.engine_steps import Plan, Row, ToyEngine, plans, plans_with_drafts

histories = st.lists(plans, min_size=1, max_size=25)


def run(history: list[Plan], builder: RowBuilder | None = None) -> list[Row]:
    """All rows of a history, each step's compared with the reference."""
    engine = ToyEngine(RowBuilder() if builder is None else builder)
    rows = []
    for plan in [*history, Plan()]:
        found, expected = engine.step(plan)
        assert found == expected
        assert len(engine.builder) == len(engine.live)
        rows += found
    return rows


@settings(derandomize=True, deadline=None, max_examples=300)
@given(histories)
def test_pitfall_01_every_row_belongs_to_the_request_that_a_slow_reference_says(
    history: list[Plan],
) -> None:
    run(history)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(plans_with_drafts, min_size=1, max_size=25))
def test_a_rejected_draft_is_no_row_and_counts_as_never_forwarded(history: list[Plan]) -> None:
    run(history)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(histories)
def test_a_request_finishes_once_and_has_no_rows_afterwards(history: list[Plan]) -> None:
    rows = run(history)
    finished = Counter(row.stream for row in rows if row.phase == ring_messages.FINISHED)
    assert set(finished.values()) <= {1}
    for stream in finished:
        assert [row.phase for row in rows if row.stream == stream][-1] == ring_messages.FINISHED


@settings(derandomize=True, deadline=None, max_examples=100)
@given(histories)
def test_the_newest_rows_and_cached_spans_of_a_request_cover_it_without_a_gap(
    history: list[Plan],
) -> None:
    covered: dict[int, int] = {}
    for row in run(history):
        if row.phase == ring_messages.FINISHED:
            assert row.position == covered.get(row.stream, 0)
        elif not row.flags & ring_messages.RECOMPUTED:
            assert row.position == covered.get(row.stream, 0)
            covered[row.stream] = row.position + row.span
        else:
            assert row.position < covered[row.stream]


def test_a_chunked_prompt_an_answer_and_its_end_come_as_they_happen() -> None:
    engine = ToyEngine(RowBuilder())
    phases = []
    history = [Plan(new=[(5, 2, 0)], counts=[2]), *[Plan(counts=[1])] * 2, Plan(finish=[0])]
    for plan in history:
        found, expected = engine.step(plan)
        assert found == expected
        phases += [(ring_messages.PHASE_NAMES[row.phase], row.position, row.span) for row in found]
    assert phases == [
        ("cached", 0, 2),
        *(("prefill", 2, 1), ("prefill", 3, 1), ("prefill", 4, 1)),
        *(("decode", 5, 1), ("finished", 6, 0)),
    ]


def test_rows_that_a_preempted_request_computes_again_are_flagged() -> None:
    engine = ToyEngine(RowBuilder())
    engine.step(Plan(new=[(3, 0, 0)], counts=[5]))
    found, expected = engine.step(Plan(preempt=[(0, 1)], counts=[6]))
    assert found == expected
    assert [(row.position, row.phase, row.flags) for row in found] == [
        (1, ring_messages.PREFILL, ring_messages.RECOMPUTED),
        (2, ring_messages.PREFILL, ring_messages.RECOMPUTED),
        (3, ring_messages.DECODE, ring_messages.RECOMPUTED),
        (4, ring_messages.DECODE, ring_messages.RECOMPUTED),
        (5, ring_messages.DECODE, 0),
        (6, ring_messages.DECODE, 0),
    ]


def ahead(start: int, count: int, num_drafts: int = 0) -> StepBatch:
    """A step of one request whose drafts only the device knows."""
    counts_R, starts_R = np.array([count], np.int32), np.array([start], np.int32)
    return StepBatch(["r"], counts_R, starts_R, np.array([num_drafts], np.int32), starts_R)


def flags_of(builder: RowBuilder, start: int, count: int) -> list[int]:
    rows = builder.build(ahead(start, count))
    filled = rows.fill(np.arange(start, start + count), np.zeros(count, np.int32))
    return [int(flags) for flags in filled["flags"]]


def test_a_request_that_was_stopped_within_its_prompt_has_new_rows_behind_that_place() -> None:
    """Where the host does not know which drafts stand, as it does not on a GPU."""
    builder = RowBuilder()
    builder.add_request("r", RequestMark(7), 10, num_known=10)
    assert flags_of(builder, 0, 4) == [0] * 4
    builder.add_request("r", RequestMark(7), 10, num_known=10)
    assert flags_of(builder, 0, 10) == [ring_messages.RECOMPUTED] * 4 + [0] * 6


def test_a_request_that_comes_back_has_a_new_row_for_each_draft_that_was_rejected() -> None:
    builder = RowBuilder()
    builder.add_request("r", RequestMark(7), 4, num_known=4)
    builder.build(ahead(0, 4))
    builder.build(ahead(4, 4, num_drafts=3))  # of which one is accepted: token 6 is sampled last
    builder.add_request("r", RequestMark(7), 4, num_known=7)
    assert flags_of(builder, 0, 7) == [ring_messages.RECOMPUTED] * 6 + [0]


def test_positions_of_an_image_are_marked_in_rows_and_in_cached_spans() -> None:
    text, image = ring_messages.TEXT, ring_messages.IMAGE
    media = [text, *[image] * 4, text, image, image]
    engine = ToyEngine(RowBuilder())
    # An image is cut by the cache and by the steps; the steps are all of one size.
    history = [
        Plan(new=[(10, 3, 0), (10, 0, 0)], media=[media], counts=[2, 2]),
        *[Plan(counts=[2, 2])] * 3,
        Plan(preempt=[(0, 4)], counts=[3, 1]),
    ]
    found = [row for plan in history for row in _compared(engine, plan)]
    first, second = 2**64 - 1, 2**64 - 2
    cached = [row for row in found if row.phase == ring_messages.CACHED]
    assert [(row.position, row.span, row.flags >> 1) for row in cached] == [(0, 1, 0), (1, 2, 1)]
    tokens = [row for row in found if row.phase <= ring_messages.DECODE]
    marked = [(row.position, row.flags >> 1) for row in tokens if row.stream == first]
    wanted = dict(enumerate([*media, text, text, text]))
    assert marked == [(position, wanted[position]) for position in (*range(3, 11), 4, 5, 6)]
    assert {row.flags for row in tokens if row.stream == second} == {0}


def test_a_slot_that_had_an_image_marks_nothing_of_its_next_request() -> None:
    engine = ToyEngine(RowBuilder())
    history = [
        Plan(new=[(6, 0, 0)], media=[[ring_messages.AUDIO] * 5], counts=[6]),
        Plan(finish=[0], new=[(6, 2, 0)], counts=[4]),
    ]
    found = [_compared(engine, plan) for plan in history]
    assert {row.flags for row in found[1]} == {0}


def _compared(engine: ToyEngine, plan: Plan) -> list[Row]:
    found, expected = engine.step(plan)
    assert found == expected
    return found


@pytest.mark.parametrize("num_requests", [63, 64, 65, 128, 129, 300])
def test_more_requests_than_the_builder_began_with_keep_their_own_rows(num_requests: int) -> None:
    history = [
        Plan(new=[(index % 7 + 1, 0, index % 4) for index in range(num_requests)]),
        Plan(counts=[3] * num_requests, order=17),
        Plan(finish=list(range(0, num_requests, 3))),
        Plan(new=[(4, 1, 2)] * num_requests),  # in the places of the finished ones, and new ones
        Plan(counts=[2] * 2 * num_requests, order=5),
    ]
    assert len(run(history)) > 3 * num_requests


def test_a_reused_slot_keeps_nothing_of_its_last_request() -> None:
    builder = RowBuilder()
    builder.add_request("a", RequestMark(7, 3), 100)
    builder.build(StepBatch(["a"], np.array([50], np.int32), np.array([0], np.int32)))
    builder.finish_request("a")
    builder.add_request("b", RequestMark(8, 0), 1)
    rows = builder.build(StepBatch(["b"], np.array([1], np.int32), np.array([1], np.int32)))
    (finished, cached, token) = rows.fill(np.array([1]), np.array([42]))
    assert (finished["stream"], finished["position"], finished["choice"]) == (7, 50, 3)
    assert (cached["stream"], cached["position"], cached["span"]) == (8, 0, 1)
    assert (token["stream"], token["choice"], token["phase"], token["flags"]) == (8, 0, 1, 0)


def test_a_request_that_never_reached_the_worker_has_no_event() -> None:
    builder = RowBuilder()
    builder.finish_request("nobody")
    rows = builder.build_idle()
    assert (rows.num_tokens, len(rows.events)) == (0, 0)


def test_a_step_that_forwards_nothing_still_has_the_finished_requests() -> None:
    builder = RowBuilder()
    builder.add_request("a", RequestMark(7), 3)
    builder.finish_request("a")
    rows = builder.build_idle().fill(np.zeros(0, np.int64), np.zeros(0, np.int32))
    assert [(row["stream"], row["phase"], row["span"]) for row in rows] == [
        (7, ring_messages.FINISHED, 0)
    ]
    assert len(builder.build_idle().events) == 0


def test_a_step_keeps_its_rows_while_the_builder_goes_on() -> None:
    """On a GPU the rows are filled in later, when the next step may have begun."""
    builder = RowBuilder()
    counts, starts = np.array([2], np.int32), np.array([0], np.int32)
    builder.add_request("a", RequestMark(7), 1)
    step = builder.build(StepBatch(["a"], counts, starts))
    builder.finish_request("a")
    builder.add_request("b", RequestMark(8, 5), 99)
    counts[:] = 9  # the runner's own buffers, reused
    builder.build(StepBatch(["b"], np.array([4], np.int32), starts))
    rows = step.fill(np.array([0, 1]), np.array([10, 11]))
    assert rows["stream"].tolist() == [7, 7]
    assert rows["phase"].tolist() == [ring_messages.PREFILL, ring_messages.DECODE]


def test_a_batch_with_an_unknown_request_is_an_error_and_not_a_guess() -> None:
    with pytest.raises(KeyError, match="stranger"):
        RowBuilder().build(
            StepBatch(["stranger"], np.array([1], np.int32), np.array([0], np.int32))
        )


def test_only_steps_of_the_same_requests_share_what_is_known_of_them() -> None:
    builder = RowBuilder()
    for number in range(3):
        builder.add_request(f"r{number}", RequestMark(number + 1), 5)
    req_ids = ["r0", "r1"]
    first, second = step_of(builder, req_ids), step_of(builder, req_ids)
    assert second.requests is first.requests
    req_ids.reverse()  # the runner's own list, changed in place
    assert step_of(builder, req_ids).requests.streams_R.tolist() == [2, 1]
    assert step_of(builder, ["r1", "r2"]).requests.streams_R.tolist() == [2, 3]
    assert first.requests.streams_R.tolist() == [1, 2]


def step_of(builder: RowBuilder, req_ids: list[str]) -> StepRows:
    counts_R = np.ones(len(req_ids), np.int32)
    return builder.build(StepBatch(req_ids, counts_R, np.zeros(len(req_ids), np.int32)))


def reused_name(builder: RowBuilder) -> list[int]:
    """Streams of two steps between which a request ends and another takes its name."""
    builder.add_request("a", RequestMark(7), 1)
    first = step_of(builder, ["a"])
    builder.finish_request("a")
    builder.add_request("b", RequestMark(8), 1)
    builder.add_request("a", RequestMark(9), 1)
    return [
        *first.requests.streams_R.tolist(),
        *step_of(builder, ["a"]).requests.streams_R.tolist(),
    ]


def test_a_name_that_is_used_again_is_another_request() -> None:
    assert reused_name(RowBuilder()) == [7, 9]


def test_a_batch_with_a_finished_request_is_an_error() -> None:
    builder = RowBuilder()
    builder.add_request("a", RequestMark(7), 1)
    step_of(builder, ["a"])
    builder.finish_request("a")
    with pytest.raises(KeyError, match="a"):
        step_of(builder, ["a"])


class RememberingBuilder(RowBuilder):
    """Still knows a batch although one of its requests has finished."""

    def finish_request(self, req_id: str) -> None:
        requests = self._requests
        super().finish_request(req_id)
        self._requests = requests


def test_a_builder_that_remembers_too_long_would_be_caught() -> None:
    assert reused_name(RememberingBuilder()) == [7, 7]


@pytest.mark.parametrize("num_events", [0, 1, 4, 5, 8, 9, 17])
def test_events_are_cut_into_parts_in_order_and_the_tokens_come_last(num_events: int) -> None:
    builder = RowBuilder()
    for number in range(num_events):
        builder.add_request(f"gone-{number}", RequestMark(100 + number), 1)
        builder.finish_request(f"gone-{number}")
    builder.add_request("a", RequestMark(7), 1)
    whole = builder.build(StepBatch(["a"], np.array([3], np.int32), np.array([0], np.int32)))
    *before, last = whole.cut_events(4)
    parts = [*before, last]
    assert np.concatenate([part.events for part in parts]).tobytes() == whole.events.tobytes()
    assert all(len(part.events) == 4 and part.num_tokens == 0 for part in before)
    assert len(last.events) <= 4
    assert [part.is_continued for part in parts] == [True] * len(before) + [False]
    assert (last.num_tokens, last.requests) == (3, whole.requests)


class NeighbourBuilder(RowBuilder):
    """Swaps the rows of neighbouring requests."""

    def build(self, batch: StepBatch) -> StepRows:
        return super().build(StepBatch([*batch.req_ids[1:], *batch.req_ids[:1]], *_arrays(batch)))


class ForgetfulBuilder(RowBuilder):
    """Does not know a request that comes back."""

    def add_request(self, req_id: str, *given: Any) -> None:
        self._slots.pop(req_id, None)
        super().add_request(req_id, *given)


class StaleBuilder(RowBuilder):
    """Leaves in a slot what its last request had."""

    def add_request(self, *given: Any) -> None:
        seen = self._seen_S.copy()
        super().add_request(*given)
        self._seen_S[: len(seen)] = seen


class SteadyBuilder(RowBuilder):
    """Takes the second half of an image for the first."""

    def build(self, batch: StepBatch) -> StepRows:
        rows = super().build(batch)
        ends_R = (batch.starts_R + batch.counts_R).astype(np.int32)
        self._repeated = RepeatedBatch(rows, ends_R, None)
        return rows


def _arrays(batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    return batch.counts_R, batch.starts_R


@pytest.mark.parametrize(
    "broken", [NeighbourBuilder, ForgetfulBuilder, StaleBuilder, SteadyBuilder]
)
def test_a_builder_that_mixes_requests_up_is_caught_by_the_reference(
    broken: type[RowBuilder],
) -> None:
    history = [
        Plan(new=[(9, 1, 0), (3, 0, 1)], media=[[0] * 7 + [1]], counts=[3, 3]),
        *[Plan(counts=[2, 1])] * 3,
        Plan(counts=[2, 1], preempt=[(1, 0)]),
        Plan(finish=[0], new=[(9, 0, 2)], counts=[1, 2]),
    ]
    run(history)
    with pytest.raises(AssertionError):
        run(history, broken())
