"""The fit finds a planted direction, and reports honestly what it did not find."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from clairai.errors import ConfigError
from clairai.points import Point
from clairai.train import fit
from clairai.train.documents import Document, TextSpan, Turn
from clairai.train.fit import HELD_OUT, NUM_FOLDS, assign_folds
from clairai.train.train_probe import (
    NUM_BINS,
    KeptTokens,
    PointSearch,
    ProbeJob,
    check_memory,
    evaluate,
    free_memory,
)
from tests.support.labelled_rows import PLANTED, labels, rows


def test_a_planted_direction_is_found_whatever_the_size_of_the_columns() -> None:
    known = labels()
    rows_TD = rows(known, strength=3.0)
    choice = fit.choose_penalty(rows_TD, known)
    line = fit.fit_direction(rows_TD, known, choice.penalty)
    share_D = np.abs(line.direction_D * rows_TD.std(axis=0))
    assert share_D.argmax() == PLANTED
    assert share_D[PLANTED] > 5 * np.delete(share_D, PLANTED).max()
    assert choice.auroc > 0.95


def test_the_fitted_direction_scores_as_scikit_learn_does() -> None:
    known = labels()
    rows_TD = rows(known, strength=3.0)
    line = fit.fit_direction(rows_TD, known, 0.01)
    is_known_T = known.folds_T != HELD_OUT
    pipeline = fit._fit_pipeline(rows_TD[is_known_T], known.positive_T[is_known_T], 0.01)
    expected_T = pipeline.decision_function(rows_TD.astype(np.float64))
    found_T = rows_TD.astype(np.float64) @ line.direction_D + line.bias
    np.testing.assert_allclose(found_T, expected_T, atol=2e-4)


def test_nothing_of_the_held_out_fold_reaches_the_fit_or_a_choice() -> None:
    known = labels()
    rows_TD = rows(known, strength=1.0)
    spoiled_TD = rows_TD.copy()
    spoiled_TD[known.folds_T == HELD_OUT] *= -1e3
    assert fit.choose_penalty(spoiled_TD, known) == fit.choose_penalty(rows_TD, known)
    one, other = fit.fit_direction(rows_TD, known, 0.01), fit.fit_direction(spoiled_TD, known, 0.01)
    assert (one.direction_D.tolist(), one.bias) == (other.direction_D.tolist(), other.bias)


def test_a_feature_of_single_documents_is_not_taken_for_a_concept() -> None:
    """Each document has a random feature of its own, which says nothing about other documents."""
    known = labels(num_documents=160)
    random = np.random.default_rng(3)
    marks_TD = random.normal(size=(160, 200)).astype(np.float32)[known.documents_T]
    choice = fit.choose_penalty(marks_TD, known)
    assert 0.25 < choice.auroc < 0.75
    # the same rows, split by token, look like a perfect probe: what splitting by document prevents
    by_token = replace(known, folds_T=np.arange(len(known.folds_T)) % NUM_FOLDS)
    assert fit.choose_penalty(marks_TD, by_token).auroc > 0.9


def test_first_tokens_and_the_template_are_not_evaluated() -> None:
    known = labels()
    rows_TD = rows(known, strength=3.0)
    flipped = known.documents_T % 5 == 0
    unsettled = replace(
        known, settled_T=~(flipped & known.positive_T), template_T=flipped & ~known.positive_T
    )
    assert fit.choose_penalty(rows_TD, unsettled).auroc > 0.95
    assert not (unsettled.evaluated_T & flipped).any()
    assert (unsettled.fitted_T & unsettled.template_T).any()


@pytest.mark.parametrize("fold", range(NUM_FOLDS))
def test_a_concept_that_is_in_one_fold_only_is_refused(fold: int) -> None:
    known = labels()
    search = PointSearch(ProbeJob("a", ()), replace(known, positive_T=known.folds_T == fold))
    with pytest.raises(ConfigError, match="one label only"):
        _search_all(search, known)


def test_a_held_out_fold_without_the_concept_is_refused() -> None:
    known = labels()
    positive_T = known.positive_T & (known.folds_T != HELD_OUT)
    with pytest.raises(ConfigError, match="one label only"):
        _search_all(PointSearch(ProbeJob("a", ()), replace(known, positive_T=positive_T)), known)


def _search_all(search: PointSearch, known: fit.Labels) -> None:
    search.try_point(Point("post_block", 0), rows(known, strength=1.0))
    search.finish("toy")


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    random = np.random.default_rng(0)
    scores_T = random.integers(0, 8, size=60).astype(np.float64)  # few values, so many ties
    positive_T = random.random(60) < 0.4
    pairs = itertools.product(scores_T[positive_T], scores_T[~positive_T])
    shares = [float(np.sign(present - absent) + 1) / 2 for present, absent in pairs]
    assert fit.auroc(scores_T, positive_T) == pytest.approx(np.mean(shares))


def test_the_threshold_is_even_odds_or_where_false_alarms_are_rare() -> None:
    quiet_T = np.concatenate([np.linspace(0, 0.4, 990), np.linspace(0.9, 1, 60)])
    assert fit.choose_threshold(quiet_T, quiet_T > 0.5) == 0.5
    noisy_T, without_T = np.linspace(0, 1, 1001), np.zeros(1001, np.bool_)
    least = fit.choose_threshold(noisy_T, without_T)
    assert least == pytest.approx(0.99)
    assert (noisy_T >= least).mean() <= 0.0110


def test_a_search_keeps_the_best_point_and_reports_the_held_out_fold() -> None:
    known = labels()
    search = PointSearch(ProbeJob("planted", (), "Words."), known)
    for layer, strength in enumerate((0.5, 3.0, 1.0)):
        search.try_point(Point("post_block", layer), rows(known, strength=strength))
    made = search.finish("toy")
    probe = made.probe
    assert (str(probe.point), probe.model, probe.activation) == ("post_block.1", "toy", "sigmoid")
    assert [str(trial.point) for trial in made.trials] == [f"post_block.{n}" for n in range(3)]
    held = known.folds_T == HELD_OUT
    scores_T = probe.apply(rows(known, strength=3.0))
    assert probe.auroc == round(fit.auroc(scores_T[held], known.positive_T[held]), 4)
    assert probe.histogram is not None
    assert sum(probe.histogram.counts) == held.sum() == made.evaluation.num_tokens
    assert len(probe.histogram.counts) == NUM_BINS
    assert probe.calibration is not None
    assert 0 <= probe.calibration[0] < 0.5 < probe.calibration[1] <= 1
    assert made.evaluation.auroc_documents == 1.0
    assert made.evaluation.accuracy > 0.85


def test_documents_with_both_labels_count_once_for_each() -> None:
    known = labels(num_documents=8, length=4)
    halves_T = np.arange(len(known.positive_T)) % 4 < 2
    both = replace(known, positive_T=halves_T)
    scores_T = np.where(halves_T, 0.75, 0.25)
    result = evaluate(scores_T, both, 0.5)
    assert (result.auroc, result.auroc_documents, result.accuracy) == (1.0, 1.0, 1.0)
    assert (result.num_documents, result.num_tokens) == (2, 8)


def _text(text: str, *, label: bool, fold: int | None = None) -> Document:
    return Document((Turn(None, (TextSpan(text, label),)),), fold)


def test_folds_have_both_labels_and_no_text_twice() -> None:
    documents = [_text(f"{n % 23}", label=n % 23 < 9) for n in range(60)]
    folds = assign_folds(documents, seed=0)
    assert folds == assign_folds(documents, seed=0)
    assert folds != assign_folds(documents, seed=1)
    sides = {(fold, d.is_positive) for fold, d in zip(folds, documents, strict=True)}
    assert sides == set(itertools.product(range(NUM_FOLDS), (True, False)))
    of_text = {(d.key, fold) for fold, d in zip(folds, documents, strict=True)}
    assert len(of_text) == 23


def test_documents_that_know_their_fold_keep_it() -> None:
    given = [_text("a", label=True, fold=3), _text("b", label=False, fold=1)]
    assert assign_folds(given, seed=0) == [3, 1]


@pytest.mark.parametrize("label", [True, False])
def test_too_few_documents_of_a_label_are_refused(label: bool) -> None:
    many = [_text(f"many {n}", label=not label) for n in range(20)]
    few = [_text(f"few {n % 7}", label=label) for n in range(20)]  # 7 texts, some repeated
    with pytest.raises(ConfigError, match="7 different documents"):
        assign_folds(many + few, seed=0)


def test_rows_that_would_not_fit_are_refused_before_they_are_read() -> None:
    kept = KeptTokens(((1, 2),), (np.arange(2),), (0,))
    check_memory(kept, 1024, 4, available=2 * 1024 * 4 * 4)
    with pytest.raises(ConfigError, match="fewer or shorter"):
        check_memory(kept, 1024, 4, available=2 * 1024 * 4 * 4 - 1)
    assert 1 << 20 < free_memory() < 1 << 50
