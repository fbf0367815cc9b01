"""Makes vectors from rows of contrasting texts, or from a probe.

Scale 1 always has a meaning: for contrasting texts, the average difference between the two sides;
for a probe, one step of its raw score. N = texts of one side, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.errors import VectorError
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.vector.model import Row, Vector

TextRows = Mapping[Point, NDArray[np.floating]]  # at each point, a row for each text: [N, D]
VectorMaker = Callable[[str, TextRows, TextRows], Vector]


def difference_of_means(name: str, positive: TextRows, negative: TextRows) -> Vector:
    """The mean row of the positive texts minus that of the negative ones; pairs are not needed."""
    points = _check_sides(name, positive, negative)
    rows = {point: _mean(positive[point]) - _mean(negative[point]) for point in points}
    return Vector(name, _to_float32(rows), method="difference of means")


def pca(name: str, positive: TextRows, negative: TextRows) -> Vector:
    """The direction along which pairs differ most, as long as their mean difference along it.

    The first principal component of the pairs' differences around zero, not around their mean.
    The projection of the mean difference on it gives the length and the sign.
    """
    points = _check_sides(name, positive, negative)
    return Vector(
        name,
        _to_float32(
            {point: _principal_row(name, positive[point], negative[point]) for point in points}
        ),
        method="PCA of pair differences",
    )


def from_probe(probe: Probe, *, name: str | None = None, step: float = 1.0) -> Vector:
    """The probe's direction, of a length so that scale 1 moves its raw score by `step`.

    That holds at the probe's own point. The raw score is the activation's input:
    hidden @ direction + bias.
    """
    direction_D = probe.direction_D.astype(np.float64)
    row_D = direction_D * (step / (direction_D @ direction_D))
    return Vector(
        probe.name if name is None else name,
        _to_float32({probe.point: row_D}),
        description=probe.description,
        model=probe.model,
        method=f"direction of a probe, {step:g} a step",
    )


def measure_separation(
    row_D: Row, positive_ND: NDArray[np.floating], negative_ND: NDArray[np.floating]
) -> float:
    """The AUROC of the row: how often a positive text lies further along it than a negative one."""
    direction_D = row_D.astype(np.float64)
    above, below = positive_ND @ direction_D, np.sort(negative_ND @ direction_D)
    ranks = [np.searchsorted(below, above, side).mean() for side in ("left", "right")]
    return float(sum(ranks)) / 2 / len(below)  # a tie counts half


def _principal_row(
    name: str, positive_ND: NDArray[np.floating], negative_ND: NDArray[np.floating]
) -> NDArray[np.float64]:
    if len(positive_ND) != len(negative_ND) or len(positive_ND) < 2:
        raise VectorError(
            f"vector {name}: {len(positive_ND)} positive texts and {len(negative_ND)} negative "
            "ones; PCA needs pairs, 2 or more"
        )
    differences_ND = positive_ND.astype(np.float64) - negative_ND
    direction_D = np.linalg.svd(differences_ND, full_matrices=False)[2][0]
    length = float(differences_ND.mean(axis=0) @ direction_D)
    return np.asarray(direction_D * length, np.float64)


def _check_sides(name: str, positive: TextRows, negative: TextRows) -> tuple[Point, ...]:
    if positive.keys() != negative.keys():
        raise VectorError(f"vector {name}: the two sides have rows of different points")
    for side in (positive, negative):
        for point, rows_ND in side.items():
            if rows_ND.ndim != 2 or not len(rows_ND) or not np.isfinite(rows_ND).all():
                raise VectorError(
                    f"vector {name} at {point}: rows of shape {rows_ND.shape}; "
                    "give one finite row for each text, [texts, width]"
                )
    return tuple(positive)


def _mean(rows_ND: NDArray[np.floating]) -> NDArray[np.float64]:
    return np.asarray(rows_ND.mean(axis=0, dtype=np.float64), np.float64)


def _to_float32(rows: Mapping[Point, NDArray[np.float64]]) -> dict[Point, Row]:
    with np.errstate(over="ignore"):  # Vector refuses infinity with a message
        return {point: row_D.astype(np.float32) for point, row_D in rows.items()}


METHODS: Final[Mapping[str, VectorMaker]] = {"mean": difference_of_means, "pca": pca}
