"""A step that is like the last one says the same, whether C says it or Python.

Two outlets get the same steps; one has C for those that are alike, the other has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.publish import step_library
from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.publisher import FinishedStep
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import RequestMark, StepBatch
from clairai.ring.layout import RingHeader, RingShape
from tests.support.gpu_launches import (
    BEGUN,
    ENDED,
    IN_GRAPH_WORD,
    INPUTS,
    MAIN,
    MAX_REQUESTS,
    MAX_TOKENS,
    NUMBER_WORD,
    SIDE,
    Gpu,
    Launching,
    LongWay,
)


@dataclass
class Side:
    """One of the two."""

    gpu: Gpu
    publisher: DevicePublisher
    sent: tuple[StepRows | None, int] = (None, 0)  # the last step's rows and bank
    again: list[int] = field(default_factory=list)  # steps that needed no Python

    def step(self, number: int, rows: StepRows, bank: int) -> None:
        self.publisher.begin()
        if (rows, bank) == self.sent and self.publisher.again(number):
            self.again.append(number)
        elif not self.publisher.note(number, rows, bank):
            self.publisher.send(FinishedStep(number, rows, bank, INPUTS))
            return
        self.publisher.settle(lambda: INPUTS)
        self.sent = (rows, bank)


def side(launching: type[Launching]) -> Side:
    gpu = Gpu()
    tables = ScoreTables(["a"], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    header = RingHeader(0xABCD_0000_1234_5678, RingShape(slots=8, slot_bytes=4096, ahead=2))
    return Side(gpu, DevicePublisher(launching(gpu), header, tables, MAX_REQUESTS))


# Of a step: who is in it, how many tokens each, is one of them over after it, how much is published
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(["a", "ab", "ba", "abc", "abcd"]),
        st.sampled_from([1, 2, 100]),  # of 100 for two, a step is two records
        st.integers(1, 24),
        st.sampled_from(["", "", "a", "c"]),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(SCRIPT)
def test_what_the_gpu_is_told_does_not_depend_on_who_tells_it(
    script: list[tuple[str, int, int, str, int]],
) -> None:
    short, long = side(Launching), side(LongWay)
    book, number, marks = RowBuilder(step_library.load_library("step.c")), 0, 0
    come = dict.fromkeys("abcd", 0)
    for who, count, times, gone, published in script:
        for _ in range(times):
            for req_id in who:
                marks += 1
                book.open(req_id, RequestMark(2**64 - marks, marks % 3), 5)
            starts_R = np.array([come[req_id] for req_id in who], np.int32)
            rows = book.step(StepBatch([*who], np.full(len(who), count, np.int32), starts_R))
            come |= {req_id: come[req_id] + count for req_id in who}
            number += 1
            for one in (short, long):
                one.step(number, rows, bank=1 + number // 40)
                one.gpu.publish(published if len(one.gpu.step_headers) < 6 else 6)
        if gone:
            book.close(gone)
            come[gone] = 0
    assert short.gpu.told == long.gpu.told
    assert short.publisher.published == long.publisher.published


def decoding(one: Side, steps: int, *, is_published: bool) -> None:
    book = RowBuilder(step_library.load_library("step.c"))
    book.open("a", RequestMark(7), 1)
    for at in range(steps):
        rows = book.step(StepBatch(["a"], np.ones(1, np.int32), np.array([at], np.int32)))
        one.step(at + 1, rows, bank=1)
        if is_published:
            one.gpu.publish(1)


def test_a_gpu_that_waits_is_given_the_launch_and_no_event() -> None:
    one = side(Launching)
    decoding(one, 6, is_published=True)
    assert one.again == [2, 3, 4, 5, 6]
    assert one.gpu.queued == [("wait", MAIN, ENDED, 0), *[("launch", MAIN)] * 6]


def test_a_gpu_that_is_busy_is_given_them_on_a_stream_of_their_own() -> None:
    one = side(Launching)
    decoding(one, 3, is_published=False)
    assert one.again == [2, 3]
    assert [call[-1] for call in one.gpu.queued if call[0] == "launch"] == [MAIN, SIDE, SIDE]
    assert one.gpu.queued.count(("wait", MAIN, ENDED, 0)) == 2
    aside = [("record", BEGUN, MAIN), ("wait", SIDE, BEGUN, 0)]
    assert one.gpu.queued[2:6] == [*aside, ("launch", SIDE), ("record", ENDED, SIDE)]


def test_a_graph_that_publishes_is_given_its_brief_and_nothing_else() -> None:
    one = side(Launching)
    one.publisher.prepare(INPUTS)
    one.publisher.captured(1)
    decoding(one, 5, is_published=False)
    assert one.again == [2, 3, 4, 5]
    assert one.gpu.queued == [("wait", MAIN, ENDED, 0)]
    numbers = [one.publisher._step_headers[at].memory[NUMBER_WORD].item() for at in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    one.gpu.queued.clear()
    one.publisher.follow(200)
    assert one.gpu.queued == [("record", ENDED, MAIN), ("wait", 200, ENDED, 0)]


def test_a_forward_that_was_no_graph_is_launched_for() -> None:
    one = side(Launching)
    one.publisher.prepare(INPUTS)
    one.publisher.captured(1)
    rows = RowBuilder().idle()
    one.publisher.begin()
    assert one.publisher.note(1, rows, 1)
    one.publisher.forwarded(lambda: INPUTS)
    one.publisher.settle(lambda: INPUTS)
    assert [call[0] for call in one.gpu.queued].count("launch") == 1


def test_one_graph_that_does_not_publish_leaves_every_step_to_the_host() -> None:
    """Which graph is replayed is not known here: a step that waited for it would be lost."""
    one = side(Launching)
    one.publisher.prepare(INPUTS)
    one.publisher.captured(1)
    one.publisher.disable_graphs()
    one.publisher.captured(1)
    decoding(one, 3, is_published=False)
    assert [call[0] for call in one.gpu.queued].count("launch") == 3
    in_graph = [one.publisher._step_headers[at].memory[IN_GRAPH_WORD].item() for at in range(3)]
    assert in_graph == [0, 0, 0]


def test_a_graph_that_is_captured_before_any_forward_keeps_publishing_out() -> None:
    one = side(Launching)
    one.publisher.captured(1)
    decoding(one, 2, is_published=False)
    assert [call[0] for call in one.gpu.queued].count("launch") == 2


def test_who_follows_a_step_on_the_engines_own_stream_waits_for_that() -> None:
    one = side(Launching)
    decoding(one, 4, is_published=True)
    one.gpu.queued.clear()
    one.publisher.follow(200)
    assert one.gpu.queued == [("record", ENDED, MAIN), ("wait", 200, ENDED, 0)]


def test_no_brief_is_written_that_the_gpu_has_not_given_back() -> None:
    one = side(Launching)
    decoding(one, 8, is_published=False)
    assert not one.publisher.again(9)
    assert len(one.gpu.step_headers) == len(set(one.gpu.step_headers)) == 8
