"""Reduces the scores of one answer to one number for each probe.

Runs in: any reader.

N = tokens that are reduced, P = probes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from clairai.errors import ConfigError, ProbeError, quote
from clairai.match.align import Scores

Reduction = Literal["max", "min", "mean", "sum", "last"]
Part = Literal["generated", "prompt", "all"]


@dataclass(frozen=True, eq=False)
class ReducedScores:
    """One number for each probe: NaN for a probe that scored none of the tokens."""

    names: tuple[str, ...]
    values_P: NDArray[np.float32]
    # The token that has the value, counted from the first of the prompt; -1: no single one has.
    tokens_P: NDArray[np.int64]
    num_rows: int  # tokens with scores
    missing: int  # forwarded tokens of the whole answer whose rows were lost

    def __getitem__(self, name: str) -> float:
        """One probe's value."""
        if name not in self.names:
            held = quote(", ".join(self.names), limit=200)
            raise ProbeError(f"no scores of a probe named {quote(name)}; there are {held}")
        return float(self.values_P[self.names.index(name)])


def check_reduction(reduce: str | None, over: str) -> None:
    """ConfigError if it is not one that can be asked for."""
    if reduce is not None and reduce not in _REDUCTIONS:
        raise ConfigError(f"reduce is {quote(reduce)}; use one of {', '.join(_REDUCTIONS)}")
    if over not in get_args(Part):
        raise ConfigError(f"over is {quote(over)}; use one of {', '.join(get_args(Part))}")


def reduce_scores(scores: Scores, reduce: Reduction, over: Part = "generated") -> ReducedScores:
    """Tokens without a score do not count: the last one, cached and lost ones."""
    parts = {"generated": "generated", "prompt": "prompt", "all": "scores_NP"}
    values_NP: NDArray[np.float32] = getattr(scores, parts[over])
    first = scores.num_prompt if over == "generated" else 0
    is_scored_N = ~np.isnan(values_NP).all(axis=1)
    kept = np.flatnonzero(is_scored_N)
    num_probes = len(scores.names)
    values_P = np.full(num_probes, np.nan, np.float32)
    tokens_P = np.full(num_probes, -1, np.int64)
    if len(kept) and num_probes:
        # Most often all but the last are scored, and nothing is copied.
        is_run = kept[-1] - kept[0] + 1 == len(kept)
        values_NP = values_NP[kept[0] : kept[-1] + 1] if is_run else values_NP[kept]
        values_P, at_P = _REDUCTIONS[reduce](values_NP)
        tokens_P = np.where(at_P >= 0, kept[at_P] + first, -1)
    return ReducedScores(scores.names, values_P, tokens_P, len(kept), scores.missing)


_Reduced = tuple[NDArray[np.float32], NDArray[np.intp]]  # values, and their rows or -1


def _max(values_NP: NDArray[np.float32]) -> _Reduced:
    return _pick(values_NP, np.where(np.isnan(values_NP), -np.inf, values_NP).argmax(axis=0))


def _min(values_NP: NDArray[np.float32]) -> _Reduced:
    return _pick(values_NP, np.where(np.isnan(values_NP), np.inf, values_NP).argmin(axis=0))


def _last(values_NP: NDArray[np.float32]) -> _Reduced:
    """Of each probe: one that was added late has its last token too."""
    from_end = (~np.isnan(values_NP))[::-1].argmax(axis=0)
    return _pick(values_NP, len(values_NP) - 1 - from_end)


def _pick(values_NP: NDArray[np.float32], at_P: NDArray[np.intp]) -> _Reduced:
    values_P = values_NP[at_P, np.arange(values_NP.shape[1])]
    return values_P, np.where(np.isnan(values_P), -1, at_P)


def _mean(values_NP: NDArray[np.float32]) -> _Reduced:
    sum_P, num_P = _add_up(values_NP)
    mean_P = np.divide(sum_P, num_P, out=np.full(len(sum_P), np.nan), where=num_P > 0)
    return mean_P.astype(np.float32), np.full(len(sum_P), -1)


def _sum(values_NP: NDArray[np.float32]) -> _Reduced:
    sum_P, num_P = _add_up(values_NP)
    return np.where(num_P > 0, sum_P, np.nan).astype(np.float32), np.full(len(sum_P), -1)


def _add_up(values_NP: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """In double precision: thousands of tokens must not lose digits."""
    is_scored_NP = ~np.isnan(values_NP)
    sum_P = np.where(is_scored_NP, values_NP, 0).sum(axis=0, dtype=np.float64)
    return sum_P, is_scored_NP.sum(axis=0)


_REDUCTIONS: Final[dict[str, Callable[[NDArray[np.float32]], _Reduced]]] = {
    "max": _max,
    "min": _min,
    "mean": _mean,
    "sum": _sum,
    "last": _last,
}
