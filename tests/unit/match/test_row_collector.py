"""The collector gives every row to its own stream and choice, or counts it; planted bugs show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clairai.errors import ClairaiError, ConfigError
from clairai.match import row_collector
from clairai.match.row_collector import ChoiceRows, RowCollector, RowSpan, split_rows
from clairai.wire import ring_messages
from tests.support.records import Row, TinyRecord, bank, cached, fed, finished, known, record


# A probe that scores the row's own identity: any misrouted row is a visible number.
def identity(stream: int, choice: int, position: int) -> float:
    return stream * 10_000.0 + choice * 1_000.0 + position


def interleaved(steps: int = 6) -> list[list[Row]]:
    """Two streams of two choices each, neighbours in every record, growing at unequal pace."""
    owners = [(stream, choice) for stream in (1, 2) for choice in (0, 1)]
    return [
        [
            Row(stream, position, position, (identity(stream, choice, position),), choice=choice)
            for stream, choice in (owners if step % 2 else reversed(owners))
            for position in range(step * stream, (step + 1) * stream)
        ]
        for step in range(steps)
    ]


def assert_routed(collector: RowCollector) -> None:
    fed(*interleaved(), collector=collector)
    for stream in (1, 2):
        for choice in (0, 1):
            rows = known(collector, stream, choice)
            expected = [identity(stream, choice, position) for position in range(6 * stream)]
            assert rows.scores_NP[:, 0].tolist() == expected


def test_rows_go_to_their_stream_and_choice_exactly() -> None:
    assert_routed(RowCollector())


class ForgetsChoice(RowCollector):
    """Planted bug: all choices of a stream are one."""

    def _find_choice(self, span: RowSpan, rows: NDArray[np.void]) -> ChoiceRows | None:
        return super()._find_choice(span._replace(choice=0), rows)


class SharesOneStream(RowCollector):
    """Planted bug: a stream that is not known yet gets the rows of the latest known one."""

    def _find_choice(self, span: RowSpan, rows: NDArray[np.void]) -> ChoiceRows | None:
        return super()._find_choice(
            span._replace(stream=next(iter(self._choices), span.stream)), rows
        )


@pytest.mark.parametrize("planted", [ForgetsChoice, SharesOneStream])
def test_a_collector_that_ignores_stream_or_choice_is_caught(planted: type[RowCollector]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        assert_routed(planted())


def test_a_split_that_ignores_the_choice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_stream_only(rows: NDArray[np.void]) -> list[RowSpan]:
        blind = rows.copy()
        blind["choice"] = 0
        return list(split_rows(blind))

    monkeypatch.setattr(row_collector, "split_rows", by_stream_only)
    with pytest.raises(AssertionError):
        assert_routed(RowCollector())


def test_streams_that_differ_in_any_of_64_bits_are_kept_apart() -> None:
    streams = [0, *(1 << bit for bit in range(64)), 2**64 - 1]
    collector = fed([Row(stream, 0, 7, (index,)) for index, stream in enumerate(streams)])
    for index, stream in enumerate(streams):
        assert known(collector, stream).scores_NP.tolist() == [[index]]


def test_a_later_row_of_a_position_replaces_the_earlier() -> None:
    first = [Row(1, position, position, (position,)) for position in range(4)]
    again = [Row(1, position, position, (position + 100,)) for position in (1, 2)]
    rows = known(fed(first, again), 1)
    assert rows.positions.tolist() == [0, 1, 2, 3]
    assert rows.scores_NP[:, 0].tolist() == [0, 101, 102, 3]


def test_rows_are_in_order_of_position_whatever_the_order_of_arrival() -> None:
    rows = known(fed([Row(1, 5, 50)], [Row(1, 2, 20), Row(1, 9, 90)]), 1)
    assert rows.positions.tolist() == [2, 5, 9]
    assert rows.token_ids.tolist() == [20, 50, 90]


def test_cached_spans_and_the_end_are_noted() -> None:
    begun = fed([cached(1, 0, 16), Row(1, 16, 3, phase=ring_messages.PREFILL)], [Row(1, 17, 4)])
    assert not known(begun, 1).finished
    rows = known(fed([finished(1)], collector=begun), 1)
    assert rows.cached == ((0, 16, 0),)
    assert rows.finished
    assert rows.phases.tolist() == [ring_messages.PREFILL, ring_messages.DECODE]


def test_a_request_served_whole_from_a_cache_has_its_probes_without_scores() -> None:
    rows = known(fed([cached(1, 0, 16), finished(1)]), 1)
    assert (rows.names, rows.scores_NP.shape) == (("a",), (0, 1))


def test_marks_of_a_stream_do_not_touch_its_neighbours() -> None:
    collector = fed([Row(1, 0, 1), Row(2, 0, 1)], [finished(1), cached(2, 4, 2), Row(2, 1, 1)])
    assert known(collector, 1).finished
    assert not known(collector, 2).finished
    assert (known(collector, 1).cached, known(collector, 2).cached) == ((), ((4, 2, 0),))


def test_probes_that_come_and_go_are_kept_apart_by_name() -> None:
    collector = RowCollector()
    collector.add(record([Row(1, 0, 0, (1, 2))], 2), bank("a", "b"))
    collector.add(record([Row(1, 1, 0, (3, 4))], 2), bank("c", "a", version=1))
    collector.add(record([Row(1, 2, 0, ())], 0), bank(version=2))
    rows = known(collector, 1)
    assert rows.names == ("a", "b", "c")
    none = np.nan
    np.testing.assert_array_equal(rows.scores_NP, [[1, 2, none], [4, none, 3], [none] * 3])


def test_a_record_that_contradicts_its_bank_is_refused_whole() -> None:
    collector = RowCollector()
    with pytest.raises(ClairaiError, match="please report"):
        collector.add(record([Row(1, 0, 0)]), bank("a", "b"))
    with pytest.raises(ClairaiError, match="phase 9"):
        collector.add(record([Row(1, 0, 0), Row(1, 1, 0, phase=9)]), bank("a"))
    assert collector.statistics().rows == collector.statistics().streams == 0


def test_an_empty_record_adds_nothing() -> None:
    assert fed([]).statistics().rows == 0


def test_the_collector_copies_the_rows_it_is_given() -> None:
    made = record([Row(1, 0, 5, (1.0,))])
    collector = RowCollector()
    collector.add(made, bank("a"))
    made.rows["token_id"], made.scores_RC[:] = 9, 9
    rows = known(collector, 1)
    assert (rows.token_ids.tolist(), rows.scores_NP.tolist()) == ([5], [[1]])


row_lists = st.lists(
    st.builds(
        Row,
        stream=st.integers(0, 3),
        position=st.integers(0, 6),
        token_id=st.integers(0, 5),
        scores=st.tuples(st.integers(0, 99).map(float)),
        phase=st.sampled_from(
            [
                ring_messages.PREFILL,
                ring_messages.DECODE,
                ring_messages.CACHED,
                ring_messages.FINISHED,
            ]
        ),
        choice=st.integers(0, 2),
        span=st.integers(0, 5),
        media=st.integers(0, ring_messages.OTHER_MEDIA),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(row_lists, max_size=6))
def test_any_records_are_collected_as_row_by_row(records: list[list[Row]]) -> None:
    collector = fed(*records, collector=RowCollector(only=range(3)))
    plain: dict[tuple[int, int], dict[int, Row]] = {}
    flat = [row for rows in records for row in rows]
    for row in flat:
        if row.stream < 3 and row.phase in (ring_messages.PREFILL, ring_messages.DECODE):
            plain.setdefault((row.stream, row.choice), {})[row.position] = row
    for (stream, choice), by_position in plain.items():
        rows = known(collector, stream, choice)
        expected = [by_position[position] for position in sorted(by_position)]
        assert rows.positions.tolist() == [row.position for row in expected]
        assert rows.token_ids.tolist() == [row.token_id for row in expected]
        assert rows.phases.tolist() == [row.phase for row in expected]
        assert rows.media.tolist() == [row.media for row in expected]
        assert rows.scores_NP[:, 0].tolist() == [row.scores[0] for row in expected]
    statistics = collector.statistics()
    assert statistics.rows + statistics.orphaned == len(flat)
    assert statistics.orphaned == sum(row.stream == 3 for row in flat)


@settings(max_examples=200, deadline=None)
@given(row_lists)
def test_spans_cover_a_record_once_and_never_mix_two_requests(rows: list[Row]) -> None:
    found = list(split_rows(record(rows).rows))
    assert [index for span in found for index in range(span.begin, span.end)] == [*range(len(rows))]
    for span in found:
        part = rows[span.begin : span.end]
        assert {(row.stream, row.choice) for row in part} == {(span.stream, span.choice)}
        assert {row.phase >= ring_messages.CACHED for row in part} == {span.is_marks}


def test_a_long_request_is_kept_in_time_proportional_to_its_length() -> None:
    held = ChoiceRows()
    made: TinyRecord = record([Row(1, 0, 0)])
    for position in range(5000):
        made.rows["position"] = position
        held.add_tokens(made.rows, made.scores_RC, ("a",))
    assert held.rows().positions.tolist() == [*range(5000)]
    assert len(held._segments) == 1


def test_only_watched_streams_are_kept_and_the_rest_is_counted() -> None:
    collector = fed([Row(1, 0, 0), Row(2, 0, 0), Row(2, 1, 0)], collector=RowCollector(only=[1]))
    assert collector.rows(2) is None
    collector.watch(2)
    fed([Row(2, 2, 0)], collector=collector)
    assert known(collector, 2).positions.tolist() == [2]
    assert (collector.statistics().rows, collector.statistics().orphaned) == (2, 2)


def test_a_closed_stream_is_returned_once_and_no_longer_watched() -> None:
    collector = fed([Row(1, 0, 0), Row(1, 0, 0, choice=3)], collector=RowCollector(only=[1]))
    assert sorted(collector.close(1)) == [0, 3]
    assert collector.close(1) == {}
    fed([Row(1, 1, 0)], collector=collector)
    assert collector.rows(1) is None
    assert collector.statistics().held_rows == 0


def test_watching_changes_nothing_in_a_collector_that_keeps_all() -> None:
    collector = RowCollector()
    collector.watch(1)
    assert known(fed([Row(2, 0, 0)], collector=collector), 2).positions.tolist() == [0]


def test_the_end_of_a_watched_stream_is_noted_even_without_rows() -> None:
    assert known(fed([finished(1)], collector=RowCollector(only=[1])), 1).finished


def test_an_end_mark_after_close_does_not_open_the_stream_again() -> None:
    collector = fed([Row(1, 0, 0)])
    collector.close(1)
    fed([finished(1)], collector=collector)
    assert collector.statistics().streams == 0
    assert collector.statistics().orphaned == 1


def held_streams(collector: RowCollector, *streams: int) -> list[int]:
    return [stream for stream in streams if collector.rows(stream) is not None]


def test_the_stream_that_finished_first_is_evicted_first() -> None:
    collector = fed(
        [Row(stream, 0, 0) for stream in (1, 2, 3)], collector=RowCollector(max_streams=3)
    )
    fed([finished(3)], [finished(2)], [Row(4, 0, 0)], collector=collector)
    assert held_streams(collector, 1, 2, 3, 4) == [1, 2, 4]
    fed([Row(5, 0, 0)], [Row(6, 0, 0)], collector=collector)
    assert held_streams(collector, 1, 2, 4, 5, 6) == [4, 5, 6]  # 2 had ended; then 1 was the oldest
    assert collector.statistics().evicted == 3


def test_a_stream_is_finished_when_all_its_choices_are() -> None:
    collector = RowCollector(max_streams=2)
    fed([Row(1, 0, 0), Row(1, 0, 0, choice=1), Row(2, 0, 0)], [finished(1)], collector=collector)
    fed([finished(2)], [Row(3, 0, 0)], collector=collector)
    assert held_streams(collector, 1, 2, 3) == [1, 3]


def test_a_choice_that_begins_late_opens_its_stream_again() -> None:
    collector = RowCollector(max_streams=2)
    fed([Row(1, 0, 0)], [finished(1)], [Row(2, 0, 0)], [finished(2)], collector=collector)
    fed([Row(1, 0, 0, choice=1)], [Row(3, 0, 0)], collector=collector)
    assert held_streams(collector, 1, 2, 3) == [1, 3]


def test_rows_held_never_exceed_the_bound() -> None:
    collector = RowCollector(max_rows=10)
    for step in range(40):
        fed([Row(step % 3, step, 0), cached(step % 3, step, 5)], collector=collector)
        assert collector.statistics().held_rows <= 10
    assert collector.statistics().evicted > 0


def test_a_stream_longer_than_the_bound_is_evicted_and_counted() -> None:
    collector = fed(
        [Row(1, position, 0) for position in range(11)], collector=RowCollector(max_rows=10)
    )
    assert collector.rows(1) is None
    statistics = collector.statistics()
    assert (statistics.streams, statistics.held_rows, statistics.evicted) == (0, 0, 1)


@pytest.mark.parametrize("bounds", [{"max_streams": 0}, {"max_rows": 0}, {"max_rows": -1}])
def test_a_collector_without_room_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        RowCollector(max_streams=bounds.get("max_streams", 1), max_rows=bounds.get("max_rows", 1))
