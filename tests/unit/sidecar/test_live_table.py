"""The table that `clairai sidecar` draws for records, as text without colour."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from clairai.ring.reader import ReaderStatistics, Record
from clairai.sidecar import live_table
from clairai.sidecar.live_state import MAX_REQUESTS, RATE_WINDOW_S, LiveState
from clairai.wire import ring_messages
from tests.support.records import Row, bank, cached, finished, record
from tests.support.ring_engine import SMALL, welcome


def _record(*rows: Row, num_columns: int = 1) -> Record:
    tiny = record(rows, num_columns)
    return Record(0, 0, 0, False, 0, tiny.rows, tiny.scores_RC)


def _bank(threshold: float | None, *names: str) -> ring_messages.Bank:
    infos = (ring_messages.ProbeInfo(name, "post_block.0", threshold=threshold) for name in names)
    return ring_messages.Bank(0, tuple(infos))


def _drawn(state: LiveState, *, width: int = 100, height: int = 24) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(live_table.draw_table(state, status="toy on vLLM 0", width=width, height=height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_request_shows_its_newest_score_and_how_far_it_is() -> None:
    state = LiveState()
    state.add(
        _record(Row(12345, 0, 5, phase=ring_messages.PREFILL), Row(12345, 1, 6, (0.25,))), bank("a")
    )
    drawn = _drawn(state)
    assert drawn[0] == "toy on vLLM 0"
    assert "12345 decode 2 1 0.250" in [" ".join(line.split()) for line in drawn]


def test_a_threshold_is_marked_without_colour_now_and_afterwards() -> None:
    state = LiveState()
    judged = _bank(0.5, "a")
    state.add(_record(Row(1, 0, 5, (0.75,)), Row(2, 0, 5, (0.5,)), Row(3, 0, 5, (0.1,))), judged)
    state.add(_record(Row(1, 1, 6, (0.125,))), judged)
    scores = {
        line.split()[0]: line.split()[4:]
        for line in _drawn(state)
        if line[:1].isdigit() and "rows/s" not in line
    }
    assert scores == {"1": ["△", "0.125"], "2": ["▲", "0.500"], "3": ["0.100"]}
    assert any("▲ at or above its threshold" in line for line in _drawn(state))


def test_a_legend_for_thresholds_needs_thresholds() -> None:
    state = LiveState()
    state.add(_record(Row(1, 0, 5)), bank("a"))
    assert not any("threshold" in line for line in _drawn(state))


def test_probes_that_do_not_fit_are_counted_and_long_names_are_cut() -> None:
    state = LiveState()
    names = [f"probe_with_a_long_name_{index}" for index in range(9)]
    state.add(_record(Row(1, 0, 5, (0.0,) * 9), num_columns=9), bank(*names))
    drawn = _drawn(state, width=80)
    assert all(len(line) <= 80 for line in drawn)
    assert any("probe_with_a_lo…" in line for line in drawn)
    assert any("7 more probes in a wider terminal" in line for line in drawn)


def test_requests_that_run_come_first_and_the_picture_keeps_to_the_screen() -> None:
    state = LiveState()
    state.add(_record(*(Row(stream, 0, 5) for stream in range(1, 60))), bank("a"))
    state.add(_record(finished(59)), bank("a"))
    drawn = _drawn(state, height=24)
    assert len(drawn) < 24
    assert [line.split()[0] for line in drawn if " decode" in line][:2] == ["58", "57"]


def test_counts_go_on_over_engines_and_requests_of_a_dead_one_are_over() -> None:
    state = LiveState()
    state.attach(welcome(1, SMALL))
    state.add(_record(Row(1, 0, 5), Row(2, 0, 5)), bank("a"))
    state.add(_record(finished(1)), bank("a"))
    assert (state.num_live, state.num_finished) == (1, 1)
    state.set_statistics(ReaderStatistics(0, 2, 3, 1, 0))
    state.detach()
    state.attach(welcome(2, SMALL))
    state.set_statistics(ReaderStatistics(0, 10, 1, 0, 4))
    assert (state.num_live, state.num_finished, state.num_rows) == (0, 1, 2)
    assert state.statistics == ReaderStatistics(0, 12, 4, 1, 4)
    assert any("cut off" in line for line in _drawn(state))
    assert any("attached 2 times" in line for line in _drawn(state))
    assert any("12 records, 4 lost, 1 torn · lag 4" in line for line in _drawn(state))


def test_a_stream_that_is_used_again_is_a_new_request() -> None:
    state = LiveState()
    state.add(_record(Row(1, 9, 5), finished(1)), bank("a"))
    state.add(_record(cached(1, 0, 4), Row(1, 4, 6)), bank("a"))
    (request,) = state.newest(10)
    assert (request.num_scored, request.num_cached, request.phase) == (1, 4, ring_messages.DECODE)


def test_the_end_of_a_request_that_was_never_seen_shows_nothing() -> None:
    state = LiveState()
    state.add(_record(finished(1)), bank("a"))
    assert (state.newest(10), state.num_finished) == ([], 0)
    assert "no requests yet" in _drawn(state)


def test_a_probe_that_left_the_bank_has_no_score() -> None:
    state = LiveState()
    state.add(_record(Row(1, 0, 5, (0.5,))), bank("old"))
    state.add(_record(Row(2, 0, 5, (0.25,))), bank("new", version=1))
    rows = {
        line.split()[0]: line.split()[-1]
        for line in _drawn(state)
        if line[:1].isdigit() and "rows/s" not in line
    }
    assert rows == {"1": live_table.UNKNOWN, "2": "0.250"}


def test_the_rate_falls_to_nothing_when_the_engine_rests() -> None:
    now_s = [100.0]
    state = LiveState(clock=lambda: now_s[0])
    state.add(_record(*(Row(1, position, 5) for position in range(10))), bank("a"))
    assert state.rows_per_s() == 10 / RATE_WINDOW_S
    now_s[0] += RATE_WINDOW_S + 1
    assert state.rows_per_s() == 0


def test_a_board_is_bounded() -> None:
    state = LiveState()
    for begin in range(0, MAX_REQUESTS + 100, 50):
        rows = (Row(stream + 1, 0, 5) for stream in range(begin, begin + 50))
        state.add(_record(*rows), bank("a"))
    assert state.num_live == MAX_REQUESTS


def test_long_streams_and_odd_scores_stay_readable() -> None:
    assert live_table.short_stream_id(2**64 - 1, 0) == "…09551615"
    assert live_table.short_stream_id(12345, 2) == "12345.2"
    assert live_table.format_score(float(np.float32(12345.678))) == "1.23e+04"
    assert live_table.format_score(float("nan")) == live_table.UNKNOWN
    assert live_table.format_score(float("-inf")) == "-inf"
