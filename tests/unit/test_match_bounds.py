"""What the ledger keeps: watched streams only, within its bounds; what it drops is counted."""

from __future__ import annotations

import pytest

from clairai.errors import ConfigError
from clairai.match.ledger import Ledger
from tests.unit.tiny_records import Row, cached, fed, finished, known


def test_only_watched_streams_are_kept_and_the_rest_is_counted() -> None:
    ledger = fed([Row(1, 0, 0), Row(2, 0, 0), Row(2, 1, 0)], ledger=Ledger(only=[1]))
    assert ledger.rows(2) is None
    ledger.watch(2)
    fed([Row(2, 2, 0)], ledger=ledger)
    assert known(ledger, 2).positions.tolist() == [2]
    assert (ledger.statistics().rows, ledger.statistics().orphaned) == (2, 2)


def test_a_closed_stream_is_given_once_and_no_longer_watched() -> None:
    ledger = fed([Row(1, 0, 0), Row(1, 0, 0, choice=3)], ledger=Ledger(only=[1]))
    assert sorted(ledger.close(1)) == [0, 3]
    assert ledger.close(1) == {}
    fed([Row(1, 1, 0)], ledger=ledger)
    assert ledger.rows(1) is None
    assert ledger.statistics().held_rows == 0


def test_watching_a_ledger_that_keeps_all_changes_nothing() -> None:
    ledger = Ledger()
    ledger.watch(1)
    assert known(fed([Row(2, 0, 0)], ledger=ledger), 2).positions.tolist() == [0]


def test_the_end_of_a_watched_stream_is_noted_even_without_rows() -> None:
    assert known(fed([finished(1)], ledger=Ledger(only=[1])), 1).finished


def test_an_end_mark_after_close_does_not_open_the_stream_again() -> None:
    ledger = fed([Row(1, 0, 0)])
    ledger.close(1)
    fed([finished(1)], ledger=ledger)
    assert ledger.statistics().streams == 0
    assert ledger.statistics().orphaned == 1


def held_streams(ledger: Ledger, *streams: int) -> list[int]:
    return [stream for stream in streams if ledger.rows(stream) is not None]


def test_the_stream_that_finished_first_is_evicted_first() -> None:
    ledger = fed([Row(stream, 0, 0) for stream in (1, 2, 3)], ledger=Ledger(max_streams=3))
    fed([finished(3)], [finished(2)], [Row(4, 0, 0)], ledger=ledger)
    assert held_streams(ledger, 1, 2, 3, 4) == [1, 2, 4]
    fed([Row(5, 0, 0)], [Row(6, 0, 0)], ledger=ledger)
    assert held_streams(ledger, 1, 2, 4, 5, 6) == [4, 5, 6]  # 2 had ended; then 1 was the oldest
    assert ledger.statistics().evicted == 3


def test_a_stream_is_finished_when_all_its_choices_are() -> None:
    ledger = Ledger(max_streams=2)
    fed([Row(1, 0, 0), Row(1, 0, 0, choice=1), Row(2, 0, 0)], [finished(1)], ledger=ledger)
    fed([finished(2)], [Row(3, 0, 0)], ledger=ledger)
    assert held_streams(ledger, 1, 2, 3) == [1, 3]


def test_a_choice_that_begins_late_opens_its_stream_again() -> None:
    ledger = Ledger(max_streams=2)
    fed([Row(1, 0, 0)], [finished(1)], [Row(2, 0, 0)], [finished(2)], ledger=ledger)
    fed([Row(1, 0, 0, choice=1)], [Row(3, 0, 0)], ledger=ledger)
    assert held_streams(ledger, 1, 2, 3) == [1, 3]


def test_rows_held_never_exceed_the_bound() -> None:
    ledger = Ledger(max_rows=10)
    for step in range(40):
        fed([Row(step % 3, step, 0), cached(step % 3, step, 5)], ledger=ledger)
        assert ledger.statistics().held_rows <= 10
    assert ledger.statistics().evicted > 0


def test_a_stream_longer_than_the_bound_is_evicted_and_counted() -> None:
    ledger = fed([Row(1, position, 0) for position in range(11)], ledger=Ledger(max_rows=10))
    assert ledger.rows(1) is None
    statistics = ledger.statistics()
    assert (statistics.streams, statistics.held_rows, statistics.evicted) == (0, 0, 1)


@pytest.mark.parametrize("bounds", [{"max_streams": 0}, {"max_rows": 0}, {"max_rows": -1}])
def test_a_ledger_without_room_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Ledger(max_streams=bounds.get("max_streams", 1), max_rows=bounds.get("max_rows", 1))
