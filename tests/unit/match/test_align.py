"""Scores meet tokens: each row at the token it was computed for, and every gap is stated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clairai.errors import ClairaiError, ProbeError
from clairai.match.align import Scores, align, align_nothing
from clairai.match.row_collector import RowCollector, RowsByPosition
from clairai.wire import ring_messages
from tests.support.records import Row, bank, cached, finished, record

PROMPT, OUTPUT = (11, 12, 13), (21, 22, 23)


def rows_of(*steps: Sequence[Row]) -> RowsByPosition:
    collector = RowCollector()
    for step in steps:
        collector.add(record(step), bank("a"))
    return collector.close(1)[0]


# A probe that scores the token id itself: a shifted or swapped row is a visible integer.
def rows_at(positions: Iterable[int], tokens: Sequence[int] = PROMPT + OUTPUT) -> list[Row]:
    return [
        Row(
            1,
            at,
            tokens[at],
            (tokens[at],),
            ring_messages.PREFILL if at < len(PROMPT) else ring_messages.DECODE,
        )
        for at in positions
    ]


def listed(scores: Scores) -> list[float | None]:
    return [None if np.isnan(score) else float(score) for score in scores["a"]]


def test_row_j_of_generated_scores_generated_token_j() -> None:
    scores = align(rows_of(rows_at(range(5))), PROMPT, OUTPUT)
    assert scores.prompt[:, 0].tolist() == list(PROMPT)
    assert scores.generated[:2, 0].tolist() == list(OUTPUT[:2])
    assert scores.token_ids.tolist() == [*PROMPT, *OUTPUT]
    assert scores.phase.tolist() == [ring_messages.PREFILL] * 3 + [ring_messages.DECODE] * 3
    assert (scores.num_prompt, scores.missing) == (3, 0)


def test_tokens_that_stand_for_an_image_are_marked_whether_forwarded_or_cached() -> None:
    image, audio = ring_messages.IMAGE, ring_messages.AUDIO
    forwarded = [row._replace(media=image if row.position == 1 else 0) for row in rows_at([1, 3])]
    spans = [cached(1, 0, 1), cached(1, 2, 1)._replace(media=audio)]
    scores = align(rows_of(spans, forwarded), PROMPT, OUTPUT)
    assert scores.media.tolist() == [0, image, audio, 0, 0, 0]
    assert scores.is_text.tolist() == [True, False, False, True, True, True]
    assert align(rows_of(rows_at(range(5))), PROMPT, OUTPUT).is_text.all()


def test_a_mark_of_a_later_version_stands_for_something_that_is_not_text() -> None:
    flags = np.array([0b1110, 0b1010, 0b0001], np.uint8)
    assert ring_messages.media_of(flags).tolist() == [ring_messages.OTHER_MEDIA] * 2 + [0]


def test_rows_are_counted_without_those_that_are_lost_cached_or_never_there() -> None:
    assert align(rows_of(rows_at(range(5))), PROMPT, OUTPUT).num_rows == 5
    assert align(rows_of(rows_at([0, 1, 2, 4])), PROMPT, OUTPUT).num_rows == 4
    assert align(rows_of([cached(1, 0, 2)], rows_at([2, 3, 4])), PROMPT, OUTPUT).num_rows == 3
    assert align(rows_of(rows_at(range(3))), PROMPT, ()).num_rows == 3


def test_an_answer_without_any_row_lacks_all_of_them() -> None:
    scores = align_nothing(PROMPT, OUTPUT)
    assert (scores.missing, scores.num_rows, scores.names) == (5, 0, ())
    assert scores.scores_NP.shape == (6, 0)


def test_the_last_sampled_token_has_no_score_and_is_not_missing() -> None:
    scores = align(rows_of(rows_at(range(5))), PROMPT, OUTPUT)
    assert np.isnan(scores.generated[-1]).all()
    assert scores.missing == 0


def test_forwards_past_the_stop_token_are_cut_whatever_token_they_carry() -> None:
    past = [Row(1, 5, 99, (99,)), Row(1, 6, 98, (98,)), Row(1, 2**32 - 1, 97, (97,))]
    scores = align(rows_of([*rows_at(range(5)), *past]), PROMPT, OUTPUT)
    assert listed(scores) == [11, 12, 13, 21, 22, None]


def test_a_request_that_generated_nothing_scores_its_whole_prompt() -> None:
    scores = align(rows_of(rows_at(range(3))), PROMPT, ())
    assert listed(scores) == [11, 12, 13]
    assert scores.generated.shape == (0, 1)


def test_cached_tokens_are_marked_and_not_missing() -> None:
    scores = align(rows_of([cached(1, 0, 2), *rows_at(range(2, 5))]), PROMPT, OUTPUT)
    assert listed(scores) == [None, None, 13, 21, 22, None]
    assert scores.phase[:3].tolist() == [
        ring_messages.CACHED,
        ring_messages.CACHED,
        ring_messages.PREFILL,
    ]
    assert scores.missing == 0


def test_a_token_that_was_scored_before_a_cache_served_it_keeps_its_score() -> None:
    scores = align(rows_of(rows_at(range(4)), [cached(1, 0, 4), *rows_at([4])]), PROMPT, OUTPUT)
    assert listed(scores) == [11, 12, 13, 21, 22, None]
    assert ring_messages.CACHED not in scores.phase


def test_a_cached_run_longer_than_the_request_is_cut() -> None:
    scores = align(rows_of([cached(1, 1, 2**32 - 1), *rows_at([0])]), PROMPT, OUTPUT)
    assert scores.phase.tolist() == [ring_messages.PREFILL] + [ring_messages.CACHED] * 5


def test_lost_rows_are_counted() -> None:
    scores = align(rows_of(rows_at([0, 3])), PROMPT, OUTPUT)
    assert scores.missing == 3
    assert listed(scores) == [11, None, None, 21, None, None]


def test_a_recomputed_row_is_the_one_that_counts() -> None:
    again = [row._replace(scores=(row.scores[0] + 0.5,)) for row in rows_at(range(2))]
    assert listed(align(rows_of(rows_at(range(5)), again), PROMPT, OUTPUT))[:3] == [11.5, 12.5, 13]


def test_a_row_of_another_token_is_an_error_and_never_a_score() -> None:
    wrong = [*rows_at(range(3)), Row(1, 3, 77)]
    words = "row for position 3 carries token 77, request has token 21: please report"
    with pytest.raises(ClairaiError, match=words):
        align(rows_of(wrong), PROMPT, OUTPUT)


def shifted(rows: list[Row]) -> list[Row]:
    return [row._replace(position=row.position + 1) for row in rows]


def swapped(rows: list[Row]) -> list[Row]:
    return [rows[0]._replace(position=1), rows[1]._replace(position=0), *rows[2:]]


@pytest.mark.parametrize("planted", [shifted, swapped])
def test_rows_planted_at_the_wrong_position_are_caught(planted: object) -> None:
    assert callable(planted)
    with pytest.raises(ClairaiError, match="please report"):
        align(rows_of(planted(rows_at(range(5)))), PROMPT, OUTPUT)


def test_a_probe_added_halfway_has_no_score_before() -> None:
    collector = RowCollector()
    collector.add(record(rows_at(range(4))), bank("a"))
    added = [row._replace(scores=(row.scores[0], -1.0)) for row in rows_at([4])]
    collector.add(record(added, 2), bank("a", "b", version=1))
    scores = align(collector.close(1)[0], PROMPT, OUTPUT)
    assert scores.names == ("a", "b")
    np.testing.assert_array_equal(scores["b"], [np.nan] * 4 + [-1, np.nan])
    assert listed(scores) == [11, 12, 13, 21, 22, None]


def test_a_probe_that_was_never_there_is_named_in_the_error() -> None:
    scores = align(rows_of(rows_at(range(5))), PROMPT, OUTPUT)
    with pytest.raises(ProbeError, match="named 'b'; there are 'a'"):
        scores["b"]


def test_prompt_and_generated_are_views_of_the_same_scores() -> None:
    scores = align(rows_of(rows_at(range(5))), PROMPT, OUTPUT)
    assert np.shares_memory(scores.prompt, scores.scores_NP)
    assert np.shares_memory(scores.generated, scores.scores_NP)


def test_token_ids_may_be_arrays() -> None:
    prompt, output = cast(Sequence[int], np.array(PROMPT)), cast(Sequence[int], np.array(OUTPUT))
    scores = align(rows_of(rows_at(range(5))), prompt, output)
    assert listed(scores) == listed(align(rows_of(rows_at(range(5))), PROMPT, OUTPUT))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_is_scored_cached_last_or_missing_and_nothing_else(data: st.DataObject) -> None:
    num_prompt, num_output = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 8))
    tokens = [*range(100, 100 + num_prompt + num_output)]
    present = data.draw(st.sets(st.integers(0, len(tokens) - 1)))
    span = data.draw(st.integers(0, num_prompt))
    forwarded = [Row(1, at, tokens[at], (tokens[at],)) for at in sorted(present)]
    scores = align(
        rows_of([cached(1, 0, span), *forwarded]), tokens[:num_prompt], tokens[num_prompt:]
    )
    last = len(tokens) - 1 if num_output else None
    for at, score in enumerate(listed(scores)):
        assert score == (tokens[at] if at in present and at != last else None)
    gaps = [at for at in range(len(tokens)) if at not in present and at >= span and at != last]
    assert scores.missing == len(gaps)


def weighed(*steps: tuple[Sequence[Row], int | None]) -> tuple[int, ...]:
    """What the scores say of their weights, if each step has these."""
    collector = RowCollector()
    for rows, weights in steps:
        collector.add(record(rows), bank("a", weights=weights))
    return align(collector.close(1)[0], PROMPT, OUTPUT).weights


def test_scores_say_which_weights_their_rows_are_of() -> None:
    assert weighed((rows_at(range(5)), 4)) == (4,)
    assert weighed((rows_at(range(5)), None)) == ()
    assert weighed((rows_at(range(3)), 0), (rows_at([3, 4]), 1)) == (0, 1)


def test_weights_are_those_of_rows_that_count() -> None:
    """Not of one that was forwarded again, nor of a forward past the end, nor of an end mark."""
    again = (rows_at([3]), 7), (rows_at([3]), 8)
    assert weighed((rows_at(range(3)), 8), *again, (rows_at([4]), 8)) == (8,)
    assert weighed((rows_at(range(5)), 8), (rows_at([5]), 9)) == (8,)
    assert weighed((rows_at(range(5)), 8), ([finished(1)], 9)) == (8,)
