"""Every token gets the label of the span of text it is in, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from clairai.errors import ConfigError
from clairai.train.documents import Document, TextSpan, Turn
from clairai.train.label_tokens import (
    NUM_UNSETTLED,
    UNLABELLED,
    LabelledTokens,
    check_tokenizer,
    tokenize,
)
from clairai.train.train_probe import MAX_SAME_PREFIX, choose_tokens, label_kept_tokens
from tests.support.labelled_rows import WordTokenizer

YES, NO, OPEN = 1, 0, UNLABELLED


def _encoded(*turns: Turn) -> LabelledTokens:
    return tokenize(Document(turns), WordTokenizer())


def test_plain_text_is_labelled_by_span_and_its_start_token_is_not() -> None:
    found = _encoded(
        Turn(None, (TextSpan("a b", False), TextSpan(" c d", True), TextSpan(" e", None)))
    )
    assert found.labels_T.tolist() == [OPEN, NO, NO, YES, YES, OPEN]
    assert found.template_T.tolist() == [True, False, False, False, False, False]


def test_the_first_tokens_of_a_span_with_the_concept_are_not_settled() -> None:
    spans = (TextSpan("a b", False), TextSpan(" c d", True), TextSpan(" e f g", True))
    found = _encoded(Turn(None, spans))
    assert found.labels_T.tolist() == [OPEN, NO, NO, YES, YES, YES, YES, YES]
    is_settled = [True, True, True, *[False] * NUM_UNSETTLED, True]
    assert found.settled_T.tolist() == is_settled


def test_in_a_chat_without_the_concept_the_template_is_without_it_too() -> None:
    found = _encoded(Turn("user", (TextSpan("Hi you", False),)))
    # <system> be kind <end> <user> Hi you <end> <assistant>
    assert found.labels_T.tolist() == [NO] * 9
    assert found.template_T.tolist() == [True] * 5 + [False] * 2 + [True] * 2


def test_in_a_chat_with_the_concept_nothing_is_claimed_of_the_template() -> None:
    found = _encoded(
        Turn("user", (TextSpan("Hi", None),)), Turn("assistant", (TextSpan("a b", True),))
    )
    # <system> be kind <end> <user> Hi <end> <assistant> a b <end>: no further turn is opened
    assert found.labels_T.tolist() == [OPEN] * 8 + [YES] * 2 + [OPEN]


@pytest.mark.parametrize("word", ["word", "user", "a", "end", "be kind"])
def test_words_that_occur_twice_are_labelled_in_their_own_place(word: str) -> None:
    found = _encoded(
        Turn("user", (TextSpan(word, False),)), Turn("assistant", (TextSpan(word, True),))
    )
    num_words = len(word.split())
    assert found.template_T.sum() == 8
    is_text = ~found.template_T
    assert found.labels_T[is_text].tolist() == [NO] * num_words + [YES] * num_words
    assert not is_text[:5].any()


def test_a_template_that_changes_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat template changes"):
        _encoded(Turn("user", (TextSpan(" a ", True),)))


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        check_tokenizer(WordTokenizer(is_fast=False))


def test_tokens_that_any_job_labels_are_kept_once_for_all() -> None:
    texts = [Turn(None, (TextSpan("a", None), TextSpan(" b", mark))) for mark in (True, None)]
    first, second = (_encoded(turn) for turn in texts)
    kept = choose_tokens([[first], [second]], [0])
    assert [at.tolist() for at in kept.positions] == [[2]]
    assert label_kept_tokens(kept, [first]).positive_T.tolist() == [True]
    assert label_kept_tokens(kept, [second]).labelled_T.tolist() == [False]


def test_a_beginning_that_many_documents_share_is_kept_a_few_times_in_each_fold() -> None:
    num_documents = 2 * (MAX_SAME_PREFIX + 5)
    encoded = [
        _encoded(Turn(None, (TextSpan(f"the same start {number}", False),)))
        for number in range(num_documents)
    ]
    kept = choose_tokens([encoded], [number % 2 for number in range(num_documents)])
    assert sum(1 in at for at in kept.positions) == 2 * MAX_SAME_PREFIX
    assert all(at[-1] == 4 for at in kept.positions)  # what differs is always kept
    assert (
        np.bincount(label_kept_tokens(kept, encoded).folds_T).tolist() == [kept.num_tokens // 2] * 2
    )
