"""Rows are joined to tokens in order, once, and only where the token ids agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clairai.match.choice_scores import ChoiceScores, PromptRows, ScoreColumns, ScoreRow
from clairai.wire import ring_messages

COLUMNS = ScoreColumns(("a",), (0.5,))
FIRST = 4


def row(token_id: int, score: float = 0.0) -> ScoreRow:
    return ScoreRow(token_id, COLUMNS, [score])


def scores_of(*token_ids: int, first: int | None = FIRST) -> ChoiceScores:
    scores = ChoiceScores(first)
    scores.add_tokens(token_ids)
    return scores


def test_a_delivered_row_is_not_held_again() -> None:
    scores = scores_of(5, 6, 7)
    scores.add_row(FIRST, row(5, 0.5))
    scores.add_row(FIRST, row(5, 1.0))
    assert scores.size == 2
    assert scores.take(is_final=False) == [row(5, 1.0)]
    scores.add_row(FIRST, row(5, 2.0))
    assert scores.size == 0
    assert scores.take(is_final=False) is None


def test_a_choice_without_tokens_has_nothing_to_deliver() -> None:
    scores = scores_of()
    assert scores.is_complete
    assert scores.is_up_to_date
    assert scores.take(is_final=True) is None


def test_the_newest_token_has_no_row_even_if_the_engine_forwarded_it() -> None:
    scores = scores_of(5, 6)
    scores.add_row(FIRST, row(5))
    scores.add_row(FIRST + 1, row(6))
    assert scores.is_complete
    assert scores.take(is_final=False) == [row(5)]
    assert scores.take(is_final=True) == []
    assert scores.num_delivered == 2


def test_a_row_of_another_token_is_not_delivered_and_is_counted() -> None:
    scores = scores_of(5, 6, 7)
    scores.add_row(FIRST, row(6))
    scores.add_row(FIRST + 1, row(6))
    assert scores.take(is_final=False) == [None, row(6)]
    assert scores.num_mismatched == 1


def test_a_missing_row_is_lost_once_a_later_one_is_there() -> None:
    scores = scores_of(5, 6, 7)
    assert scores.take(is_final=False) is None
    assert not scores.is_complete
    scores.add_row(FIRST + 1, row(6))
    assert scores.take(is_final=False) == [None, row(6)]


def test_missing_rows_are_lost_once_the_engine_has_finished() -> None:
    scores = scores_of(5, 6, 7)
    scores.add_row(FIRST, row(5))
    assert not scores.is_complete
    scores.end()
    assert scores.is_complete
    assert scores.take(is_final=False) == [row(5), None]


def test_a_row_without_room_is_lost_once_a_later_one_is_there() -> None:
    scores = scores_of(5, 6, 7)
    scores.add_row(FIRST, None)
    assert scores.take(is_final=False) is None
    scores.add_row(FIRST + 1, row(6))
    assert scores.take(is_final=False) == [None, row(6)]


@pytest.mark.parametrize("options", [{"is_final": True}, {"is_final": False, "can_wait": False}])
def test_rows_that_cannot_arrive_are_lost(options: dict[str, bool]) -> None:
    assert scores_of(5, 6, 7).take(**options) == [None, None]


def test_without_the_first_position_nothing_is_matched() -> None:
    scores = scores_of(5, 6, first=None)
    scores.add_row(FIRST, row(5))
    assert scores.is_complete
    scores.first = FIRST
    assert scores.take(is_final=False) == [row(5)]
    late = scores_of(5, 6, first=None)
    late.add_row(FIRST, row(5))
    assert late.take(is_final=False) == [None]


@given(st.data())
def test_every_score_is_of_its_own_token_in_any_order_of_arrival(data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
    carried = [data.draw(st.sampled_from((token, token, 9))) for token in token_ids]
    arrivals = data.draw(st.permutations(["token"] * len(token_ids) + ["row"] * len(token_ids)))
    scores, tokens, rows = ChoiceScores(FIRST), iter(token_ids), enumerate(carried)
    found: list[ScoreRow | None] = []
    for arrival in arrivals:
        if arrival == "token":
            scores.add_tokens([next(tokens)])
        else:
            at, token_id = next(rows)
            scores.add_row(FIRST + at, row(token_id, float(at)))
        found += scores.take(is_final=False) or []
    found += scores.take(is_final=True) or []
    assert found == [
        row(token, float(at)) if token == carried[at] else None
        for at, token in enumerate(token_ids[:-1])
    ]


def test_a_prompt_is_complete_when_every_token_has_a_row_or_was_cached() -> None:
    prompt = PromptRows()
    prompt.add_cached(0, 2)
    assert not prompt.is_complete(3)
    prompt.add_row(2, row(7))
    assert prompt.is_complete(3)
    assert prompt.take([5, 6, 7]) == ([None, None, row(7)], ())
    assert prompt.size == 0


def test_a_lost_or_mismatched_row_of_a_prompt_is_named() -> None:
    prompt = PromptRows()
    prompt.add_cached(0, 2)
    prompt.add_row(1, row(9))
    prompt.end()
    assert prompt.is_complete(4)
    assert prompt.take([5, 6, 7, 8]) == ([None] * 4, (1, 2, 3))
    assert prompt.num_mismatched == 1


def test_the_tokens_of_images_in_a_prompt_are_told_as_spans() -> None:
    image, audio = ring_messages.IMAGE, ring_messages.AUDIO
    prompt = PromptRows()
    prompt.add_cached(0, 1)
    prompt.add_cached(1, 2, image)
    for at, media in ((3, image), (4, audio), (5, 0), (6, audio), (3, image)):
        prompt.add_row(at, None if at == 6 else row(5), media)
    assert prompt.media_spans() == ((image, 1, 3), (audio, 4, 1), (audio, 6, 1))
    prompt.take([5] * 7)
    prompt.add_row(9, row(5), image)
    prompt.add_cached(9, 1, image)
    assert prompt.media_spans() == ()


def test_a_prompt_is_delivered_once() -> None:
    prompt = PromptRows()
    prompt.add_row(0, row(5))
    prompt.take([5])
    prompt.add_row(0, row(5))
    prompt.add_cached(0, 1)
    prompt.add_row(1, None)
    assert prompt.size == 0
    assert prompt.is_delivered
