"""Writers and readers are killed or stopped at any moment; the counts are exact afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as Gate
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError
from clairai.ring.attach import RingReader
from clairai.ring.follow import EngineAttached, EngineDetached, FollowEvent, RecordBatch, follow
from tests.support.footprint import footprint, nothing_left_behind
from tests.support.ring_engine import (
    DEADLINE_S,
    SMALL,
    attach_first,
    forked,
    is_intact,
    publish_marked,
    publish_plain,
    running_engine,
    until,
)

NUM_KILLS = 10
# By the connection that ends with it. A reader that did not see that would wait for ever.
NOTICED_S = 20.0


def test_a_killed_writer_is_noticed_drained_and_followed_by_the_next(tmp_path: Path) -> None:
    moment = random.Random(1)  # noqa: S311 - a test, not a secret
    following = follow(tmp_path, start="oldest", stop=lambda: False)
    with nothing_left_behind(), closing(following) as events:
        lives = [_one_life(tmp_path, events, moment.randint(1, 2000)) for _ in range(NUM_KILLS)]
    assert len({epoch for epoch, _ in lives}) == NUM_KILLS
    assert max(noticed_s for _, noticed_s in lives) <= NOTICED_S


def test_a_killed_reader_leaves_the_writer_as_it_was(tmp_path: Path) -> None:
    go = get_context("fork").Event()
    with forked(_read_forever, tmp_path, go) as reader, running_engine(tmp_path) as engine:
        alone = footprint()
        go.set()
        until(lambda: footprint().num_fds == alone.num_fds + 1)
        publish_plain(engine.writer, 100)
        os.kill(reader.pid or 0, signal.SIGKILL)
        publish_plain(engine.writer, 100)
        until(lambda: footprint() == alone)
        assert engine.writer.statistics().published == 200


def test_a_stopped_reader_counts_exactly_what_it_missed_and_goes_on(tmp_path: Path) -> None:
    ours, theirs = get_context("fork").Pipe()
    reading = forked(_report_counts, tmp_path, theirs)
    with ours, theirs, reading as reader, running_engine(tmp_path) as engine:
        publish_plain(engine.writer, 5)
        assert _counts_at(ours, 5) == (5, 0)
        os.kill(reader.pid or 0, signal.SIGSTOP)
        until(lambda: _is_stopped(reader.pid or 0))
        publish_plain(engine.writer, 1000)
        os.kill(reader.pid or 0, signal.SIGCONT)
        readable = SMALL.slots - 1
        assert _counts_at(ours, 1005) == (5 + readable, 1000 - readable)
        publish_plain(engine.writer, 3)
        assert _counts_at(ours, 1008) == (8 + readable, 1000 - readable)


def test_what_was_published_before_death_can_be_read_after_it(tmp_path: Path) -> None:
    with forked(_write_five_and_wait, tmp_path) as writer, attach_first(tmp_path) as reader:
        until(lambda: reader.statistics().lag == 5)
        writer.kill()
        until(lambda: not reader.is_alive())
        assert reader.wait(timeout_s=0)
        assert [record.seq for record in reader.poll()] == [0, 1, 2, 3, 4]
        with pytest.raises(EngineGoneError, match="attach to the next"):
            reader.bank(1)


def test_a_thousand_attachments_leave_nothing_behind(tmp_path: Path) -> None:
    with nothing_left_behind():
        for _ in range(20):
            _attach_often(tmp_path)


def test_the_leak_check_catches_a_reader_left_open(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        leaked: list[RingReader] = []
        with pytest.raises(AssertionError), nothing_left_behind(timeout_s=0.2):
            leaked.append(RingReader.attach(engine.server.path))
        leaked[0].close()


def _attach_often(folder: Path) -> None:
    with running_engine(folder) as engine:
        for _ in range(50):
            RingReader.attach(engine.server.path).close()


def _one_life(folder: Path, events: Iterator[FollowEvent], num_records: int) -> tuple[int, float]:
    """Kill a new writer after that many records; its epoch, and how long its death took to show."""
    with forked(_write_forever, folder) as writer:
        epoch = next(event.welcome.epoch for event in events if isinstance(event, EngineAttached))
        num_read = 0
        for event in events:
            assert isinstance(event, RecordBatch)
            assert all(is_intact(record, epoch) for record in event.records)
            num_read += len(event.records)
            if num_read >= num_records:
                break
        writer.kill()
        killed_s = time.monotonic()
        return epoch, _detach(events, epoch) - killed_s


def _detach(events: Iterator[FollowEvent], epoch: int) -> float:
    for event in events:
        if isinstance(event, EngineDetached):
            assert event.reason == "engine gone"
            assert (event.statistics.torn, event.statistics.lag) == (0, 0)
            break
        assert isinstance(event, RecordBatch)
        assert all(is_intact(record, epoch) for record in event.records)
    return time.monotonic()


def _write_forever(folder: Path) -> None:
    with running_engine(folder) as engine:
        for seq in count():
            publish_marked(engine.writer, engine.epoch, range(seq, seq + 1))


def _write_five_and_wait(folder: Path) -> None:
    with running_engine(folder) as engine:
        publish_plain(engine.writer, 5)
        signal.pause()


def _read_forever(folder: Path, go: Gate) -> None:
    go.wait()
    with attach_first(folder) as reader:
        while True:
            reader.wait(timeout_s=1)
            reader.poll()


def _report_counts(folder: Path, reports: Connection) -> None:
    """Send (delivered, lost) whenever they have changed and the ring is drained."""
    with attach_first(folder) as reader:
        while True:
            reader.wait(timeout_s=1)
            while reader.statistics().lag:
                reader.poll()
            counts = reader.statistics()
            reports.send((counts.delivered, counts.lost))


def _counts_at(reports: Connection, total: int) -> tuple[int, int]:
    while True:
        assert reports.poll(DEADLINE_S), "the reader has stopped"
        delivered, lost = reports.recv()
        if delivered + lost >= total:
            return delivered, lost


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
