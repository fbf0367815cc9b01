"""What the clerk knows of captured answers, and the engine after it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clairai.capture import pipe_messages, remote, writer_process
from clairai.capture.collector import Collector
from clairai.capture.pipe import Pipe
from clairai.capture.remote import WRITER_ENDED, RemoteBackend
from clairai.capture.results import CaptureResults, RowTotals
from clairai.capture.staging_arena import StagingArena
from tests.process.parts import until
from tests.support.capture_parts import ToyConsumer, order
from tests.support.capture_rig import ABOUT

SEAT = (5, 0)


def told(there: CaptureResults, here: CaptureResults) -> None:
    here.apply(there.changes(asks_consumers=True), there.totals())


def test_what_changes_there_is_known_here() -> None:
    consumers = {"toy": ToyConsumer(), "other": ToyConsumer()}
    there, here = (
        CaptureResults(consumers),
        CaptureResults({"toy": ToyConsumer(), "other": ToyConsumer()}),
    )
    wanted = order(to=("toy", "other"))
    there.open(SEAT, wanted, here.open(SEAT, wanted))
    there.add_rows({SEAT: 8})
    there.add_dropped(SEAT, 2, "no room to hold it")
    consumers["other"].lost[5] = 3
    here.add_dropped(SEAT, 1, "no room")
    told(there, here)
    (found,) = here.of_stream(5)
    assert (found.state, found.rows, found.dropped, found.lost) == ("open", 8, 3, 6)
    assert found.reason == "no room to hold it"
    assert [place.lost for place in found.places] == [0, 3]
    there.finish(SEAT)
    there.set_waiting([SEAT], "the disk is full")
    told(there, here)
    assert here.of_stream(5)[0].state == "writing"
    for name in ("toy", "other"):
        there.set_safe([SEAT], name)
    told(there, here)
    assert (here.of_stream(5)[0].state, here.of_stream(5)[0].lost) == ("kept", 6)
    assert there.changes(asks_consumers=True) == []  # nothing is told twice
    assert here.totals() == RowTotals(8, 3, 0)


def test_what_was_told_of_another_that_had_the_seat_is_not_heard() -> None:
    there, here = CaptureResults({"toy": ToyConsumer()}), CaptureResults({"toy": ToyConsumer()})
    there.open(SEAT, order(), here.open(SEAT, order()))
    there.add_rows({SEAT: 8})
    there.finish(SEAT)
    there.set_safe([SEAT], "toy")
    late = there.changes()
    here.open(SEAT, order())
    here.apply(late, there.totals())
    assert (here.of_stream(5)[0].state, here.of_stream(5)[0].rows) == ("open", 0)


@pytest.fixture
def clerk() -> Iterator[tuple[RemoteBackend, Pipe]]:
    """An engine's, and the line at whose other end a test stands for the process."""
    ours, theirs = map(Pipe, socket.socketpair())
    ready = pipe_messages.WriterReady(1, (pipe_messages.OpenedConsumer("toy", "here", "drop"),))
    made = RemoteBackend(ours, StagingArena.create(4096), ready)
    yield made, theirs
    theirs.close()
    made.close()


def report(**changes: object) -> pipe_messages.WriterReport:
    given = {"delivered": 0, "told": (), "standings": (), "rows": 0, "dropped": 0}
    return pipe_messages.WriterReport(**{**given, "discarded": 0, "pending_nbytes": 0, **changes})  # type: ignore[arg-type]


def test_how_a_consumer_is_doing_there_is_known_here(clerk: tuple[RemoteBackend, Pipe]) -> None:
    made, line = clerk
    line.add(
        report(
            standings=(pipe_messages.ConsumerReport("toy", "stopped", "full"),), pending_nbytes=7
        )
    )
    line.send()
    until(lambda: made.pending_nbytes == 7)
    (place,) = made.results.state(staging_nbytes=0, pending_nbytes=0).places
    assert (place.where, place.state, place.reason) == ("here", "stopped", "full")


@pytest.mark.parametrize(
    "wrong",
    [
        report(delivered=3),
        report(standings=(pipe_messages.ConsumerReport("who", "", ""),)),
        pipe_messages.CommitFinished(),
    ],
    ids=["more than there was", "of nobody", "no report"],
)
def test_a_clerk_that_says_what_cannot_be_is_as_good_as_dead(
    clerk: tuple[RemoteBackend, Pipe],
    wrong: pipe_messages.WriterReport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, line = clerk
    made.begin(SEAT, order())
    line.add(wrong)
    line.send()
    until(lambda: made.results.of_stream(5)[0].state == "failed")
    assert made.failure == WRITER_ENDED
    assert "is not understood" in caplog.text
    until(lambda: line.receive() is None)  # it is told to end


def two_rows() -> pipe_messages.StagingLayout:
    part = pipe_messages.FormatRows(("post_block.0",), ("toy",), 0, 2)
    group = pipe_messages.EncodedGroup("raw", (("dtype", "float32"),), (part,), b"")
    counts = [np.array([number], kind).tobytes() for number, kind in NUMBERS]
    return pipe_messages.StagingLayout(1, "float32", (), (group,), *counts)


NUMBERS = ((2, np.int64), (SEAT[0], np.uint64), (SEAT[1], np.uint16), (0, np.int64))


def test_rows_that_a_clerk_did_not_take_before_it_ended_are_lost_at_the_end_too(
    clerk: tuple[RemoteBackend, Pipe],
) -> None:
    made, line = clerk
    made.begin(SEAT, order())
    made.set_layout(two_rows())
    for number in (1, 2):
        made.put(pipe_messages.StagedRows(number, 1, 0, 0, 0, b"", b""), lambda: None)
    line.add(report(delivered=1))
    line.send()
    line.shut_down()
    made.close()
    (found,) = made.results.of_stream(5)
    assert (found.state, found.dropped) == ("failed", 2)


def test_a_clerk_that_hears_nothing_for_long_is_as_good_as_dead(
    clerk: tuple[RemoteBackend, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = clerk
    monkeypatch.setattr(remote, "MAX_UNSENT_NBYTES", 1 << 20)
    made.begin(SEAT, order())
    for _ in range(40):
        made.set_weights("x" * (1 << 16))
    until(lambda: made.results.of_stream(5)[0].state == "failed")
    made.begin((6, 0), order())
    assert made.results.of_stream(6)[0].reason == WRITER_ENDED


def test_losses_of_a_consumer_that_nobody_asked_for_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_process, "LOSSES_INTERVAL_S", 0.0)
    monkeypatch.setattr(writer_process, "COUNTS_INTERVAL_S", 0.005)
    toy = ToyConsumer()
    consumers: Any = {"toy": toy}
    collector = Collector(consumers, ABOUT, batch_nbytes=1, pending_nbytes=1)
    ours, theirs = map(Pipe, socket.socketpair())
    teller_there = writer_process.Reporter(ours, collector, consumers)
    collector.begin(SEAT, order(), 3)
    toy.lost[5] = 7  # of rows that the disk did not take, long after they were given
    heard = list[pipe_messages.WriterMessage]()

    def is_told() -> bool:
        heard.extend(map(pipe_messages.WRITER_DECODER.decode, theirs.receive() or ()))
        reports = [one for one in heard if isinstance(one, pipe_messages.WriterReport)]
        return any(told.lost == (7,) and told.number == 3 for one in reports for told in one.told)

    until(is_told)
    collector.close()
    teller_there.close()
    ours.close()
    theirs.close()
