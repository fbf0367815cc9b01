"""What a follower sees of engines that come and go in a folder."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from clairai.errors import EngineGoneError
from clairai.ring.follow import EngineAttached, EngineDetached, NoEngine, RecordBatch, follow
from clairai.ring.reader import ReaderStatistics
from clairai.wire.ring_messages import Bank
from tests.support.ring_engine import publish_plain, running_engine


def test_a_follower_waits_for_an_engine_and_reads_it_from_its_first_record(tmp_path: Path) -> None:
    with closing(follow(tmp_path, start="newest", stop=lambda: False)) as events:
        assert next(events) == NoEngine(f"no engine in {tmp_path}")
        with running_engine(tmp_path) as engine:
            publish_plain(engine.writer, 3)
            attached, batch = next(events), next(events)
    assert isinstance(attached, EngineAttached)
    assert attached.welcome.epoch == engine.epoch
    assert isinstance(batch, RecordBatch)
    assert [record.seq for record in batch.records] == [0, 1, 2]


def test_an_engine_that_was_there_before_is_read_from_where_was_asked(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        publish_plain(engine.writer, 3)
        with closing(follow(tmp_path, start="newest", stop=lambda: False)) as events:
            next(events)
            publish_plain(engine.writer, 1)
            batch = next(events)
    assert isinstance(batch, RecordBatch)
    assert [record.seq for record in batch.records] == [3]


def test_a_dead_engine_is_read_to_its_end_before_the_next_one(tmp_path: Path) -> None:
    with closing(follow(tmp_path, start="oldest", stop=lambda: False)) as events:
        next(events)
        with running_engine(tmp_path) as first:
            next(events)
            publish_plain(first.writer, 20)
        batch, detached = next(events), next(events)
        with running_engine(tmp_path) as second:
            attached = next(event for event in events if not isinstance(event, NoEngine))
    assert isinstance(batch, RecordBatch)
    assert detached == EngineDetached(ReaderStatistics(0, 7, 13, 0, 0), "engine gone")
    assert isinstance(attached, EngineAttached)
    assert attached.welcome.epoch == second.epoch != first.epoch


def test_all_cores_of_an_engine_are_read_and_no_ring_of_another(tmp_path: Path) -> None:
    """One attaches first, the other when it is there; what is counted is the sum."""
    read: dict[int, int] = {}
    with closing(follow(tmp_path, start="oldest", stop=lambda: False)) as events:
        with ExitStack() as running:
            first = running.enter_context(running_engine(tmp_path, engine="ours"))
            attached = next(events)
            stranger = running.enter_context(running_engine(tmp_path, engine="other"))
            second = running.enter_context(running_engine(tmp_path, engine="ours"))
            for core in (stranger, first, second):
                publish_plain(core.writer, 3)
            while len(read) < 2:
                batch = next(events)
                assert isinstance(batch, RecordBatch)
                read[batch.reader.welcome.epoch] = len(batch.records)
        detached = next(events)
    assert isinstance(attached, EngineAttached)
    assert read == {first.epoch: 3, second.epoch: 3}
    assert detached == EngineDetached(ReaderStatistics(0, 6, 0, 0, 0), "engine gone")


def test_a_bank_can_be_asked_for_while_a_batch_is_in_hand(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        publish_plain(engine.writer, 1)
        with closing(follow(tmp_path, start="oldest", stop=lambda: False)) as events:
            batch = next(event for event in events if isinstance(event, RecordBatch))
            bank = batch.reader.bank(batch.records[0].bank_version)
    assert [probe.name for probe in bank.probes] == ["kind"]


def test_a_stopped_follower_reports_its_position(tmp_path: Path) -> None:
    stops = iter([False, False, True, True])
    with running_engine(tmp_path) as engine:
        publish_plain(engine.writer, 2)
        *_, last = follow(tmp_path, start="oldest", stop=lambda: next(stops))
    assert last == EngineDetached(ReaderStatistics(0, 2, 0, 0, 0), "stopped")


def test_an_engine_that_hangs_up_but_lives_is_read_on_without_a_repeat(tmp_path: Path) -> None:
    def fail(version: int) -> Bank:
        raise LookupError(version)

    with (
        running_engine(tmp_path, bank_of=fail) as engine,
        closing(follow(tmp_path, start="oldest", stop=lambda: False)) as events,
    ):
        publish_plain(engine.writer, 2)
        batch = next(event for event in events if isinstance(event, RecordBatch))
        with pytest.raises(EngineGoneError):
            batch.reader.bank(1)
        assert [type(next(events)), type(next(events))] == [EngineDetached, EngineAttached]
        publish_plain(engine.writer, 2)
        batch = next(event for event in events if isinstance(event, RecordBatch))
    assert [record.seq for record in batch.records] == [2, 3]


def test_an_engine_of_another_version_is_named_as_the_reason_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.ring_engine.WIRE_VERSION", 999)
    with (
        running_engine(tmp_path),
        closing(follow(tmp_path, start="oldest", stop=lambda: False)) as events,
    ):
        event = next(events)
    assert isinstance(event, NoEngine)
    assert "wire version 999" in event.reason
