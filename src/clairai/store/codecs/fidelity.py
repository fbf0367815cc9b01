"""How much an encoder loses, measured on a sample of rows.

N = rows, M = sampled rows, D = model width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.store.codecs.base import EncodedArrays, Encoder, RowArray
from clairai.store.codecs.philox import philox

SAMPLE_ROWS: Final = 128  # rows; 8128 pairs of them
_LEAST: Final = 2.0**-149


@dataclass(frozen=True)
class Fidelity:
    """The measures of one encoder on some rows; None where no row could be measured.

    Errors and cosines compare decoded rows with their reference: the row, or for rp8 its exact
    projection. A relative error is the norm of a row's error over the norm of the row. Distortions
    compare the distances between decoded rows with those between the rows themselves.
    """

    num_rows: int  # of the sample
    num_not_finite: int  # rows with NaN or infinity, not measured below
    num_overflowed: int  # finite rows that came back with NaN or infinity, not measured below
    relative_error_p50: float | None
    relative_error_p99: float | None
    relative_error_max: float | None
    cosine_min: float | None
    cosine_mean: float | None
    distortion_p50: float | None
    distortion_p95: float | None

    @property
    def numbers(self) -> dict[str, float]:
        """The measures that are known, as a shard stores them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sample_places(num_rows: int, size: int = SAMPLE_ROWS) -> NDArray[np.int64]:
    """Return the indices of the rows to measure, rising; they depend on the number of rows alone.

    They are chosen by a hash: every n-th row could always be of the same layer.
    """
    hashes_N = philox((np.arange(num_rows), 0, 0, 0), 0)[0]
    return np.sort(np.argsort(hashes_N, kind="stable")[:size])


def measure(encoder: Encoder, rows_ND: RowArray) -> Fidelity:
    """Measure an encoder on a sample of these rows."""
    rows_MD = rows_ND[sample_places(len(rows_ND))]
    return compare(encoder, rows_MD, encoder.encode(rows_MD))


def compare(encoder: Encoder, rows_MD: RowArray, encoded: EncodedArrays) -> Fidelity:
    """Measure rows that were encoded elsewhere, such as on a device, against the originals."""
    decoded = encoder.decode(encoded, width=rows_MD.shape[1])
    is_finite_M = np.isfinite(rows_MD).all(axis=1)
    is_whole_M = is_finite_M & np.isfinite(decoded).all(axis=1)
    good_MD = rows_MD[is_whole_M]
    reference = encoder.reference(good_MD).astype(np.float64)
    back = decoded[is_whole_M].astype(np.float64)
    errors_M, cosines_M = _errors(reference, back), _cosines(reference, back)
    distortions = _distortions(good_MD.astype(np.float64), back)
    return Fidelity(
        num_rows=len(rows_MD),
        num_not_finite=int((~is_finite_M).sum()),
        num_overflowed=int((is_finite_M & ~is_whole_M).sum()),
        relative_error_p50=_quantile(errors_M, 0.5),
        relative_error_p99=_quantile(errors_M, 0.99),
        relative_error_max=_quantile(errors_M, 1),
        cosine_min=_quantile(cosines_M, 0),
        cosine_mean=float(cosines_M.mean()) if len(cosines_M) else None,
        distortion_p50=_quantile(distortions, 0.5),
        distortion_p95=_quantile(distortions, 0.95),
    )


Reals = NDArray[np.float64]


def _errors(reference: Reals, back: Reals) -> Reals:
    norms = np.maximum(np.linalg.norm(reference, axis=1), _LEAST)
    found: Reals = np.linalg.norm(back - reference, axis=1) / norms
    return found


def _cosines(reference: Reals, back: Reals) -> Reals:
    """Cosines of pairs; 1 if both rows are zeros, 0 if only one is."""
    norms, norms_back = np.linalg.norm(reference, axis=1), np.linalg.norm(back, axis=1)
    product = (reference * back).sum(axis=1)
    is_measured = (norms > 0) & (norms_back > 0)
    cosines: Reals = product / np.where(is_measured, norms * norms_back, 1)
    return np.where(is_measured, cosines.clip(-1, 1), norms == norms_back)


def _distortions(rows: Reals, back: Reals) -> Reals:
    """The relative change of the distance of each pair of rows; equal rows have none."""
    found = [np.zeros(0)]
    for index in range(len(rows) - 1):
        distance = np.linalg.norm(rows[index + 1 :] - rows[index], axis=1)
        distance_back = np.linalg.norm(back[index + 1 :] - back[index], axis=1)
        apart = distance > 0
        found.append(np.abs(distance_back[apart] / distance[apart] - 1))
    return np.concatenate(found)


def _quantile(values: Reals, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
