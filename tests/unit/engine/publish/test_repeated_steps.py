"""The header of a step like the last one is the same, whether C writes it or Python.

Two publishers get the same steps; one has C for those that are alike, the other has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clairai.engine.publish.device_publisher import DevicePublisher
from clairai.engine.publish.step_extension import load_step_extension
from clairai.engine.publish.step_rows import RowBuilder, StepRows
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import RequestMark, StepBatch
from clairai.ring.layout import RingHeader, RingShape
from tests.support.gpu_launches import (
    FORKED,
    INPUTS,
    JOINED,
    MAIN,
    MAX_REQUESTS,
    MAX_TOKENS,
    SIDE,
    Gpu,
    ToyLauncher,
)


@dataclass
class Side:
    """One of the two."""

    gpu: Gpu
    publisher: DevicePublisher
    repeated: list[int] = field(default_factory=list)  # steps whose header C wrote

    def step(self, rows: StepRows, bank: int) -> None:
        self.publisher.begin_step()
        repeat = self.publisher._repeat

        def counted() -> bool:
            is_repeated = repeat()
            if is_repeated:
                self.repeated.append(self.publisher.last_step)
            return is_repeated

        self.publisher._repeat = counted
        try:
            is_announced = self.publisher.announce(rows, bank)
        finally:
            self.publisher._repeat = repeat
        if is_announced:
            self.publisher.finish(lambda: INPUTS)
        else:
            self.publisher.publish(rows, bank, INPUTS)


def side(*, has_c: bool = True) -> Side:
    gpu = Gpu()
    tables = ScoreTables(["a"], width=4, capacity=4, max_tokens=MAX_TOKENS, device="cpu")
    header = RingHeader(0xABCD_0000_1234_5678, RingShape(slots=8, slot_bytes=4096, ahead=2))
    extension = load_step_extension() if has_c else None
    return Side(gpu, DevicePublisher(ToyLauncher(gpu), header, tables, MAX_REQUESTS, extension))


# Of some steps: who is in them, how many tokens each, how many steps, who finishes after them, and
# how much is published after each.
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
def test_what_the_gpu_reads_does_not_depend_on_who_wrote_it(
    script: list[tuple[str, int, int, str, int]],
) -> None:
    short, long = side(), side(has_c=False)
    builder, number, marks = RowBuilder(load_step_extension()), 0, 0
    come = dict.fromkeys("abcd", 0)
    for who, count, times, gone, published in script:
        for _ in range(times):
            for req_id in who:
                marks += 1
                builder.add_request(req_id, RequestMark(2**64 - marks, marks % 3), 5)
            starts_R = np.array([come[req_id] for req_id in who], np.int32)
            rows = builder.build(StepBatch([*who], np.full(len(who), count, np.int32), starts_R))
            come |= {req_id: come[req_id] + count for req_id in who}
            number += 1
            for one in (short, long):
                one.step(rows, bank=1 + number // 40)
                one.gpu.publish(published if len(one.gpu.pending) < 6 else 6)
        if gone:
            builder.finish_request(gone)
            come[gone] = 0
    assert short.gpu.read == long.gpu.read
    assert short.publisher.published == long.publisher.published


def decoding(one: Side, steps: int, *, is_published: bool) -> None:
    builder = RowBuilder(load_step_extension())
    builder.add_request("a", RequestMark(7), 1)
    for at in range(steps):
        rows = builder.build(StepBatch(["a"], np.ones(1, np.int32), np.array([at], np.int32)))
        one.step(rows, bank=1)
        if is_published:
            one.gpu.publish(1)


def test_an_idle_gpu_is_given_the_launch_and_no_event() -> None:
    one = side()
    decoding(one, 6, is_published=True)
    assert one.repeated == [2, 3, 4, 5, 6]
    assert one.gpu.queued == [("wait", MAIN, JOINED, 0), *[("launch", MAIN)] * 6]


def test_a_busy_gpu_is_given_the_launches_on_the_side_stream() -> None:
    one = side()
    decoding(one, 3, is_published=False)
    assert one.repeated == [2, 3]
    assert [call[-1] for call in one.gpu.queued if call[0] == "launch"] == [MAIN, SIDE, SIDE]
    assert one.gpu.queued.count(("wait", MAIN, JOINED, 0)) == 2
    aside = [("record", FORKED, MAIN), ("wait", SIDE, FORKED, 0)]
    assert one.gpu.queued[2:6] == [*aside, ("launch", SIDE), ("record", JOINED, SIDE)]


def test_a_graph_that_publishes_is_given_its_header_and_nothing_else() -> None:
    one = side()
    one.publisher.prepare(INPUTS)
    one.publisher.capture_publish(1)
    decoding(one, 5, is_published=False)
    assert one.repeated == [2, 3, 4, 5]
    assert one.gpu.queued == [("wait", MAIN, JOINED, 0)]
    numbers = [header.head.number for header in one.publisher.headers.all[:5]]
    assert numbers == [1, 2, 3, 4, 5]
    one.gpu.queued.clear()
    one.publisher.make_wait(200)
    assert one.gpu.queued == [("record", JOINED, MAIN), ("wait", 200, JOINED, 0)]


def test_a_forward_that_was_no_graph_is_published_by_a_launch() -> None:
    one = side()
    one.publisher.prepare(INPUTS)
    one.publisher.capture_publish(1)
    rows = RowBuilder().build_idle()
    one.publisher.begin_step()
    assert one.publisher.announce(rows, 1)
    one.publisher.forward_ran(lambda: INPUTS)
    one.publisher.finish(lambda: INPUTS)
    assert [call[0] for call in one.gpu.queued].count("launch") == 1


def test_one_graph_that_does_not_publish_leaves_every_step_to_the_host() -> None:
    """Which graph is replayed is not known here: a step that waited for it would be lost."""
    one = side()
    one.publisher.prepare(INPUTS)
    one.publisher.capture_publish(1)
    one.publisher.disable_graphs()
    one.publisher.capture_publish(1)
    decoding(one, 3, is_published=False)
    assert [call[0] for call in one.gpu.queued].count("launch") == 3
    in_graph = [header.head.in_graph for header in one.publisher.headers.all[:3]]
    assert in_graph == [0, 0, 0]


def test_a_graph_that_is_captured_before_any_forward_disables_publishing_by_graphs() -> None:
    one = side()
    one.publisher.capture_publish(1)
    decoding(one, 2, is_published=False)
    assert [call[0] for call in one.gpu.queued].count("launch") == 2


def test_a_stream_that_waits_for_a_step_on_the_engines_own_stream_waits_for_that() -> None:
    one = side()
    decoding(one, 4, is_published=True)
    one.gpu.queued.clear()
    one.publisher.make_wait(200)
    assert one.gpu.queued == [("record", JOINED, MAIN), ("wait", 200, JOINED, 0)]


def test_no_header_is_written_that_the_gpu_has_not_published() -> None:
    one = side()
    decoding(one, 8, is_published=False)
    assert not one.publisher._repeat()
    assert len(one.gpu.pending) == len(set(one.gpu.pending)) == 8
