"""Fit a linear direction to labelled rows, cross-validated over folds of whole documents.

The last fold is held out: it is used for nothing but the final evaluation. The others are left out
in turn to choose a penalty and a threshold.

T = labelled tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from clairai.errors import ConfigError
from clairai.train.documents import Document

NUM_FOLDS: Final = 4
HELD_OUT: Final = NUM_FOLDS - 1
MIN_DOCUMENTS: Final = 2 * NUM_FOLDS  # of each label
PENALTIES: Final = (
    0.001,
    0.01,
    0.1,
)  # on the squared weights, relative to the mean loss of a token
MAX_FALSE_ALARMS: Final = 0.01
EVEN_ODDS: Final = 0.5  # the score at which both labels are equally likely
MAX_STEPS: Final = 2000

Rows = NDArray[np.float32]
Scores = NDArray[np.floating]
Mask = NDArray[np.bool_]


def assign_folds(documents: Sequence[Document], *, seed: int) -> list[int]:
    """Return the folds the documents state, or draw them: each with both labels, no text in two."""
    given = [document.fold for document in documents if document.fold is not None]
    if given:
        assert len(given) == len(documents), "either all documents know their fold, or none does"
        return given
    return _draw_folds(documents, seed)


def _draw_folds(documents: Sequence[Document], seed: int) -> list[int]:
    """Draw folds of whole documents, never of tokens: neighbouring tokens are too similar."""
    numbers: dict[object, int] = {}
    groups = [numbers.setdefault(document.key, len(numbers)) for document in documents]
    positive = np.array([document.is_positive for document in documents])
    for label, name in ((True, "with"), (False, "without")):
        num_texts = len({g for g, has_it in zip(groups, positive, strict=True) if has_it == label})
        if num_texts < MIN_DOCUMENTS:
            raise ConfigError(
                f"{num_texts} different documents {name} the concept; give at least {MIN_DOCUMENTS}"
            )
    folds = [0] * len(documents)
    splitter = StratifiedGroupKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    for fold, (_, chosen) in enumerate(splitter.split(positive, positive, groups)):
        for index in chosen.tolist():
            folds[index] = fold
    return folds


@dataclass(frozen=True, eq=False)
class Labels:
    """What is known about each token."""

    positive_T: Mask
    labelled_T: Mask  # whether `positive_T` means anything
    settled_T: Mask  # not among the first tokens of a span with the concept
    template_T: Mask  # added by the chat template
    folds_T: NDArray[np.int64]
    documents_T: NDArray[np.int64]

    @property
    def fitted_T(self) -> Mask:
        """The tokens to fit."""
        return self.labelled_T & self.settled_T

    @property
    def evaluated_T(self) -> Mask:
        """The tokens to evaluate: the template is easy to recognise and would flatter the probe."""
        return self.fitted_T & ~self.template_T


@dataclass(frozen=True)
class PenaltyChoice:
    """A penalty and its cross-validated results."""

    penalty: float
    auroc: float
    threshold: float


@dataclass(frozen=True)
class LinearFit:
    """`rows @ direction_D + bias` is the log odds that the concept is there."""

    direction_D: NDArray[np.float32]
    bias: float


def choose_penalty(rows_TD: Rows, labels: Labels) -> PenaltyChoice:
    """Return the penalty with the best cross-validated AUROC; `HELD_OUT` is not used."""
    return max(
        (_cross_validate(rows_TD, labels, p) for p in PENALTIES), key=lambda choice: choice.auroc
    )


def _cross_validate(rows_TD: Rows, labels: Labels, penalty: float) -> PenaltyChoice:
    scores, positive = [], []
    for fold in range(HELD_OUT):
        is_known_T = (labels.folds_T != fold) & (labels.folds_T != HELD_OUT) & labels.fitted_T
        is_left_T = (labels.folds_T == fold) & labels.evaluated_T
        pipeline = _fit_pipeline(rows_TD[is_known_T], labels.positive_T[is_known_T], penalty)
        scores.append(pipeline.predict_proba(rows_TD[is_left_T])[:, 1])
        positive.append(labels.positive_T[is_left_T])
    scores_T, positive_T = np.concatenate(scores), np.concatenate(positive)
    return PenaltyChoice(
        penalty, auroc(scores_T, positive_T), choose_threshold(scores_T, positive_T)
    )


def fit_direction(rows_TD: Rows, labels: Labels, penalty: float) -> LinearFit:
    """Fit on all folds but `HELD_OUT`, and fold the standardisation into the result."""
    is_known_T = (labels.folds_T != HELD_OUT) & labels.fitted_T
    pipeline = _fit_pipeline(rows_TD[is_known_T], labels.positive_T[is_known_T], penalty)
    scaler, regression = pipeline[0], pipeline[1]
    weights_D = regression.coef_[0].astype(np.float64) / scaler.scale_
    bias = float(regression.intercept_[0] - weights_D @ scaler.mean_)
    return LinearFit(weights_D.astype(np.float32), bias)


def _fit_pipeline(rows_TD: Rows, positive_T: Mask, penalty: float) -> Pipeline:
    """Fit with both labels weighing the same, however many tokens each has."""
    _check_sides(positive_T)
    # C weighs the *sum* of losses: divided by their number, a penalty means the same for any size.
    strength = 1 / (penalty * len(rows_TD))
    regression = LogisticRegression(C=strength, class_weight="balanced", max_iter=MAX_STEPS)
    return make_pipeline(StandardScaler(), regression).fit(rows_TD, positive_T)


def auroc(scores_T: Scores, positive_T: Mask) -> float:
    """Return how often a token with the concept scores above one without."""
    _check_sides(positive_T)
    return float(roc_auc_score(positive_T, scores_T))


def balanced_accuracy(scores_T: Scores, positive_T: Mask, least: float) -> float:
    """Return the mean over both labels of the share of tokens on the right side of `least`."""
    return float(balanced_accuracy_score(positive_T, scores_T >= least))


def choose_threshold(scores_T: Scores, positive_T: Mask) -> float:
    """Return even odds, or more if over 1 % of the tokens without the concept reach that."""
    rare = float(np.quantile(scores_T[~positive_T], 1 - MAX_FALSE_ALARMS, method="higher"))
    return max(EVEN_ODDS, rare)


def _check_sides(positive_T: Mask) -> None:
    if positive_T.all() or not positive_T.any():
        raise ConfigError("a fold has tokens of one label only; give more and longer documents")
