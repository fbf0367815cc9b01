"""Takes the demo's probes and their training; checks the files, the folds and the numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import clairai.demo
from clairai.demo.model import NAME
from clairai.probe.files import load_many
from scripts import logistic
from scripts.demo_documents import CONCEPTS, NUM_FOLDS, Concept, documents, texts

WIDTH = 576
NUM_LAYERS = 30


def test_every_concept_ships_a_probe_for_the_demo_model() -> None:
    probes = load_many(Path(clairai.demo.__file__).parent / "probes")
    assert {probe.name for probe in probes} == {concept.name for concept in CONCEPTS}
    for probe in probes:
        assert (probe.width, probe.model, probe.activation) == (WIDTH, NAME, "sigmoid")
        assert probe.point.layer < NUM_LAYERS
        assert probe.threshold is not None
        assert 0 < probe.threshold < 1
        assert probe.calibration is not None


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_no_text_is_in_two_folds(concept: Concept) -> None:
    seen = [
        {
            span.text
            for document in documents(concept, fold)
            for span in document.spans
            if span.text.strip()
        }
        for fold in range(NUM_FOLDS)
    ]
    for one, other in itertools.combinations(seen, 2):
        assert not one & other


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_both_sides_have_at_least_forty_texts(concept: Concept) -> None:
    folds = range(NUM_FOLDS)
    assert sum(len(texts(concept.present, fold)) for fold in folds) >= 40
    assert sum(len(texts(name, fold)) for name in concept.absent for fold in folds) >= 40


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    random = np.random.default_rng(0)
    scores_T = random.integers(0, 8, size=60).astype(np.float64)  # few values, so many ties
    labels_T = random.random(60) < 0.4
    pairs = itertools.product(scores_T[labels_T], scores_T[~labels_T])
    shares = [
        1.0 if present > absent else 0.5 if present == absent else 0.0 for present, absent in pairs
    ]
    assert logistic.auroc(scores_T, labels_T) == pytest.approx(np.mean(shares))


def test_a_planted_direction_is_found_on_raw_rows() -> None:
    random = np.random.default_rng(0)
    # columns of very different size and centre: what standardising is for
    size_D = np.array([1e-2, 1.0, 1e2, 1.0], np.float32)
    rows_TD = (random.normal(size=(600, 4)).astype(np.float32) + 3) * size_D
    labels_T = rows_TD[:, 2] / 1e2 > 3
    line = logistic.fit(rows_TD[:400], labels_T[:400], l2=1e-3)
    scores_T = line.scores(rows_TD[400:])
    assert logistic.auroc(scores_T, labels_T[400:]) > 0.99
    assert logistic.balanced_accuracy(scores_T, labels_T[400:], threshold=0.0) > 0.95


def test_the_best_threshold_splits_two_heaps() -> None:
    scores_T = np.concatenate([np.linspace(0, 1, 300), np.linspace(2, 3, 60)])
    labels_T = scores_T >= 2
    threshold = logistic.best_threshold(scores_T, labels_T)
    assert logistic.balanced_accuracy(scores_T, labels_T, threshold=threshold) > 0.98
