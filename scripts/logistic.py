"""Takes labelled rows; gives a linear probe fitted by logistic regression, and how good it is."""

# T = tokens, D = model width

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Labels = NDArray[np.bool_]
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Line:
    """`rows @ direction_D + bias`: above zero means that the concept is there."""

    direction_D: NDArray[np.float32]
    bias: float

    def scores(self, rows_TD: Rows) -> Scores:
        """The log odds of each row."""
        return rows_TD.astype(np.float64) @ self.direction_D.astype(np.float64) + self.bias


def fit(rows_TD: Rows, labels_T: Labels, *, l2: float) -> Line:
    """Fit on standardised rows, both sides weighing the same; fold the standardising into it."""
    mean_D, std_D = rows_TD.mean(0), rows_TD.std(0) + 1e-6
    x_TD = torch.from_numpy((rows_TD - mean_D) / std_D)
    y_T = torch.from_numpy(labels_T.astype(np.float32))
    side_T = torch.where(y_T > 0, 0.5 / y_T.mean(), 0.5 / (1 - y_T.mean()))
    weight_D = torch.zeros(x_TD.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    steps = torch.optim.LBFGS([weight_D, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        steps.zero_grad()
        logits_T = x_TD @ weight_D + bias
        cross = torch.nn.functional.binary_cross_entropy_with_logits(logits_T, y_T, weight=side_T)
        value = cross + 0.5 * l2 * weight_D.square().sum()
        value.backward()
        return value

    steps.step(loss)
    direction_D = (weight_D.detach().numpy() / std_D).astype(np.float32)
    return Line(direction_D, float(bias.item() - mean_D.astype(np.float64) @ direction_D))


def auroc(scores_T: Scores, labels_T: Labels) -> float:
    """How often a token with the concept scores above one without; ties count half."""
    order, ranks = np.unique(scores_T, return_inverse=True)
    counts = np.bincount(ranks, minlength=len(order))
    middle = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of each tied group, from 1
    num_present = int(labels_T.sum())
    rank_sum = middle[ranks][labels_T].sum() - num_present * (num_present + 1) / 2
    return float(rank_sum / (num_present * (len(labels_T) - num_present)))


def balanced_accuracy(scores_T: Scores, labels_T: Labels, *, threshold: float) -> float:
    """The mean of both sides' share of tokens on the right side of `threshold`."""
    found_T = scores_T >= threshold
    return float((found_T[labels_T].mean() + (~found_T[~labels_T]).mean()) / 2)


def best_threshold(scores_T: Scores, labels_T: Labels) -> float:
    """The score at which the balanced accuracy is highest."""
    candidates = np.quantile(scores_T, np.linspace(0.01, 0.99, 197))
    values = [balanced_accuracy(scores_T, labels_T, threshold=float(c)) for c in candidates]
    return float(candidates[int(np.argmax(values))])


def sigmoid(scores_T: Scores) -> Scores:
    """Log odds to a number between 0 and 1."""
    return np.asarray(0.5 * (1 + np.tanh(scores_T / 2)))
