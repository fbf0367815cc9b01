"""Results of captured answers, in the writer process and in the engine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from clairai.capture import pipe_messages, remote, writer_process
from clairai.capture.collector import Collector
from clairai.capture.pipe import Pipe
from clairai.capture.remote import WRITER_ENDED, RemoteBackend, WriterLink
from clairai.capture.results import CaptureResults, RowTotals
from clairai.capture.staging_arena import StagingArena
from clairai.wire.capture_messages import ConsumerStatus
from tests.support.capture_parts import ToyConsumer, capture_plan
from tests.support.capture_rig import ABOUT
from tests.support.ring_engine import until

ANSWER = (5, 0)


def told(there: CaptureResults, here: CaptureResults) -> None:
    here.apply(there.changes(asks_consumers=True), there.totals())


def test_changes_in_the_writer_become_known_in_the_engine() -> None:
    consumers = {"toy": ToyConsumer(), "other": ToyConsumer()}
    there, here = (
        CaptureResults(consumers),
        CaptureResults({"toy": ToyConsumer(), "other": ToyConsumer()}),
    )
    wanted = capture_plan(to=("toy", "other"))
    there.open(ANSWER, wanted, here.open(ANSWER, wanted))
    there.add_rows({ANSWER: 8})
    there.add_dropped(ANSWER, 2, "no room to hold it")
    consumers["other"].lost[5] = 3
    here.add_dropped(ANSWER, 1, "no room")
    told(there, here)
    (found,) = here.of_stream(5)
    assert (found.state, found.rows, found.dropped, found.lost) == ("open", 8, 3, 6)
    assert found.reason == "no room to hold it"
    assert [place.lost for place in found.places] == [0, 3]
    there.finish(ANSWER)
    there.set_waiting([ANSWER], "the disk is full")
    told(there, here)
    assert here.of_stream(5)[0].state == "writing"
    for name in ("toy", "other"):
        there.set_safe([ANSWER], name)
    told(there, here)
    assert (here.of_stream(5)[0].state, here.of_stream(5)[0].lost) == ("kept", 6)
    assert there.changes(asks_consumers=True) == []  # nothing is told twice
    assert here.totals() == RowTotals(8, 3, 0)


def test_reports_of_an_earlier_answer_with_the_same_id_are_ignored() -> None:
    there, here = CaptureResults({"toy": ToyConsumer()}), CaptureResults({"toy": ToyConsumer()})
    there.open(ANSWER, capture_plan(), here.open(ANSWER, capture_plan()))
    there.add_rows({ANSWER: 8})
    there.finish(ANSWER)
    there.set_safe([ANSWER], "toy")
    late = there.changes()
    here.open(ANSWER, capture_plan())
    here.apply(late, there.totals())
    assert (here.of_stream(5)[0].state, here.of_stream(5)[0].rows) == ("open", 0)


@pytest.fixture
def writer() -> Iterator[tuple[RemoteBackend, Pipe]]:
    """The backend, and the end of its pipe at which the test plays the writer process."""
    ours, theirs = map(Pipe, socket.socketpair())
    ready = pipe_messages.WriterReady(0, (pipe_messages.OpenedConsumer("toy", "here", "drop"),))
    made = RemoteBackend(WriterLink(ours, ready), StagingArena.create(4096))
    yield made, theirs
    theirs.close()
    made.close()


def report(**changes: object) -> pipe_messages.WriterReport:
    given = {"delivered": 0, "told": (), "standings": (), "rows": 0, "dropped": 0}
    return pipe_messages.WriterReport(**{**given, "discarded": 0, "pending_nbytes": 0, **changes})  # type: ignore[arg-type]


def test_the_state_of_a_remote_consumer_is_known(writer: tuple[RemoteBackend, Pipe]) -> None:
    made, pipe = writer
    pipe.add(
        report(
            standings=(ConsumerStatus("toy", "there", "stopped", "full", 5.0, lost=3),),
            pending_nbytes=7,
        )
    )
    pipe.send()
    until(lambda: made.pending_nbytes == 7)
    (place,) = made.results.state(staging_nbytes=0, pending_nbytes=0).places
    assert place == ConsumerStatus("toy", "here", "stopped", "full", 5.0, lost=3)


@pytest.mark.parametrize(
    "wrong",
    [
        report(delivered=3),
        report(standings=(ConsumerStatus("who", ""),)),
        pipe_messages.CommitFinished(),
    ],
    ids=["more than there was", "of nobody", "no report"],
)
def test_a_writer_that_sends_nonsense_is_given_up(
    writer: tuple[RemoteBackend, Pipe],
    wrong: pipe_messages.WriterReport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, pipe = writer
    made.begin(ANSWER, capture_plan())
    pipe.add(wrong)
    pipe.send()
    until(lambda: made.results.of_stream(5)[0].state == "failed")
    assert made.failure == WRITER_ENDED
    assert "is not understood" in caplog.text
    until(lambda: pipe.receive() is None)  # it is told to end


def two_rows() -> pipe_messages.StagingLayout:
    part = pipe_messages.FormatRows(("post_block.0",), ("toy",), 0, 2)
    group = pipe_messages.EncodedGroup("raw", (("dtype", "float32"),), (part,), b"")
    counts = [np.array([number], kind).tobytes() for number, kind in NUMBERS]
    return pipe_messages.StagingLayout(1, "float32", (), (group,), *counts)


NUMBERS = ((2, np.int64), (ANSWER[0], np.uint64), (ANSWER[1], np.uint16), (0, np.int64))


def test_undelivered_rows_of_a_writer_that_ends_are_counted_as_lost(
    writer: tuple[RemoteBackend, Pipe],
) -> None:
    made, pipe = writer
    made.begin(ANSWER, capture_plan())
    made.set_layout(two_rows())
    for number in (1, 2):
        made.put(pipe_messages.StagedRows(number, 1, 0, 0, 0, b"", b""), lambda: None)
    pipe.add(report(delivered=1))
    pipe.send()
    pipe.shut_down()
    made.close()
    (found,) = made.results.of_stream(5)
    assert (found.state, found.dropped) == ("failed", 2)


def test_a_writer_that_reads_nothing_for_long_is_given_up(
    writer: tuple[RemoteBackend, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = writer
    monkeypatch.setattr(remote, "MAX_UNSENT_NBYTES", 1 << 20)
    made.begin(ANSWER, capture_plan())
    for _ in range(40):
        made.set_weights("x" * (1 << 16))
    until(lambda: made.results.of_stream(5)[0].state == "failed")
    made.begin((6, 0), capture_plan())
    assert made.results.of_stream(6)[0].reason == WRITER_ENDED


def test_losses_of_a_consumer_are_reported_without_being_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_process, "LOSSES_INTERVAL_S", 0.0)
    monkeypatch.setattr(writer_process, "COUNTS_INTERVAL_S", 0.005)
    toy = ToyConsumer()
    consumers: Any = {"toy": toy}
    collector = Collector(consumers, ABOUT, batch_nbytes=1, pending_nbytes=1)
    ours, theirs = map(Pipe, socket.socketpair())
    reporter = writer_process.Reporter(ours, collector, consumers, lambda: 0)
    collector.begin(ANSWER, capture_plan(), 3)
    toy.lost[5] = 7  # of rows that the disk did not take, long after they were given
    heard = list[pipe_messages.WriterMessage]()

    def is_told() -> bool:
        heard.extend(map(pipe_messages.WRITER_DECODER.decode, theirs.receive() or ()))
        reports = [one for one in heard if isinstance(one, pipe_messages.WriterReport)]
        return any(told.lost == (7,) and told.number == 3 for one in reports for told in one.told)

    until(is_told)
    collector.close()
    reporter.close()
    ours.close()
    theirs.close()


def test_the_newest_answers_are_those_of_one_owner_or_of_all() -> None:
    results = CaptureResults({"toy": ToyConsumer()})
    for stream, owner in enumerate(("alice", "bob", None, "alice"), 1):
        plan = msgspec.structs.replace(capture_plan(), owner=owner, label=f"request {stream}")
        results.open((stream, 0), plan)
    found = {owner: results.newest(2, owner) for owner in (None, "alice", "bob", "eve")}
    streams = {owner: [one.stream for (one,) in answers] for owner, answers in found.items()}
    assert streams == {None: [4, 3], "alice": [4, 1], "bob": [2], "eve": []}
    assert [(one.owner, one.label) for (one,) in found[None]] == [
        ("alice", "request 4"),
        ("", "request 3"),
    ]
