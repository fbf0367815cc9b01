"""The JSON lines that `clairai sidecar --json` prints for records."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from clairai.ring.reader import ReaderStatistics, Record
from clairai.sidecar import json_lines
from clairai.wire import ring_messages
from tests.support.records import Row, cached, finished, record


def _record(*rows: Row, num_columns: int = 1) -> Record:
    tiny = record(rows, num_columns)
    return Record(0, 0, 0, False, 0, tiny.rows, tiny.scores_RC)


def _bank(*names: str, weights: int | None = None) -> ring_messages.Bank:
    return ring_messages.Bank(
        0, tuple(ring_messages.ProbeInfo(name, "post_block.0") for name in names), weights
    )


def _printed(
    made: Record, *names: str, with_events: bool = False, weights: int | None = None
) -> list[dict[str, Any]]:
    bank = _bank(*names, weights=weights)
    raw = json_lines.encode_lines(json_lines.record_lines(made, bank, with_events=with_events))
    assert raw.endswith(b"\n")
    return [json.loads(line, parse_constant=_refuse) for line in raw.splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_row_is_printed_with_its_names_and_no_more() -> None:
    made = _record(Row(2**64 - 1, 7, 42, (0.5, -1.0)), num_columns=2)
    assert _printed(made, "a", "b") == [
        {
            "stream": 2**64 - 1,
            "position": 7,
            "token_id": 42,
            "phase": "decode",
            "scores": {"a": 0.5, "b": -1.0},
        }
    ]


def test_choice_and_recomputed_are_printed_only_where_they_say_something() -> None:
    made = _record(
        Row(1, 0, 5, phase=ring_messages.PREFILL, choice=3),
        Row(1, 1, 6, phase=ring_messages.PREFILL),
    )
    made.rows["flags"][1] = ring_messages.RECOMPUTED
    first, second = _printed(made, "a")
    assert first["choice"] == 3
    assert "recomputed" not in first
    assert second["recomputed"] is True
    assert "choice" not in second
    assert first["phase"] == second["phase"] == "prefill"


def test_a_row_and_a_cached_span_of_an_image_say_so() -> None:
    image = Row(1, 4, 500, phase=ring_messages.PREFILL, media=ring_messages.IMAGE)
    spans = [cached(1, 0, 1), cached(1, 1, 3)._replace(media=ring_messages.AUDIO)]
    made = _record(*spans, image, image._replace(position=5, media=ring_messages.TEXT))
    told = _printed(made, "a", with_events=True)
    assert [line.get("media") for line in told] == [None, "audio", "image", None]
    assert [line["media"] for line in told if "media" in line] == ["audio", "image"]
    assert told[2]["token_id"] == 500


def test_rows_have_the_version_of_the_weights_if_the_engine_takes_new_ones() -> None:
    made = _record(Row(1, 0, 5))
    assert [_printed(made, "a", weights=version)[0]["weights"] for version in (0, 3)] == [0, 3]


def test_a_score_that_is_not_finite_is_null() -> None:
    made = _record(Row(1, 0, 5, (np.nan, np.inf, -np.inf)), num_columns=3)
    assert _printed(made, "a", "b", "c")[0]["scores"] == {"a": None, "b": None, "c": None}


def test_only_tokens_are_printed_unless_events_are_asked_for() -> None:
    made = _record(cached(1, 0, 16), Row(1, 16, 5), finished(2, 1), Row(1, 17, 6))
    assert [row["position"] for row in _printed(made, "a")] == [16, 17]
    told = _printed(made, "a", with_events=True)
    assert told[0] == {"event": "cached", "stream": 1, "position": 0, "span": 16}
    assert told[1]["position"] == 16
    assert told[2] == {"event": "finished", "stream": 2, "choice": 1}
    assert told[3]["position"] == 17


def test_a_record_without_tokens_prints_nothing() -> None:
    made = _record(finished(1))
    assert (
        json_lines.encode_lines(json_lines.record_lines(made, _bank("a"), with_events=False)) == b""
    )


def test_what_happens_to_the_ring_is_an_event_with_its_counts() -> None:
    made = json_lines.encode_lines(
        [
            json_lines.LostLine(3),
            json_lines.DetachedLine.from_statistics(ReaderStatistics(0, 9, 3, 1, 0), "engine gone"),
        ]
    )
    assert [json.loads(line) for line in made.splitlines()] == [
        {"event": "lost", "records": 3},
        {"event": "detached", "delivered": 9, "lost": 3, "torn": 1, "reason": "engine gone"},
    ]
