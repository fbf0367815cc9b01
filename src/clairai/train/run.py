"""Takes labelled documents and a tapped engine; gives a probe for each job, and how good it is."""

# T = labelled tokens, D = model width

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai import wire
from clairai.demo.console import say, shown
from clairai.points import Point
from clairai.probe.model import Probe
from clairai.train import collect, fit
from clairai.train.documents import Document
from clairai.train.fit import Choice, Labels
from clairai.train.rows import Source
from clairai.train.split import HELD_OUT, folds
from clairai.train.tokens import check_lengths, check_tokenizer, encode

NUM_BINS: Final = 32
CALIBRATION: Final = (1, 99)  # percentiles, of tokens without and with the concept
DECIMALS: Final = 4
NUM_COPIES: Final = 2

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Job:
    """One probe to train. Jobs that are trained together say something of the same texts."""

    name: str
    documents: Sequence[Document]
    description: str | None = None


@dataclass(frozen=True)
class Tried:
    """What was found at one point."""

    point: Point
    choice: Choice


@dataclass(frozen=True)
class Judged:
    """How the probe does on the fold that nothing was chosen by."""

    num_documents: int
    num_tokens: int
    auroc: float
    auroc_all: float  # the first tokens of each stretch counted too
    auroc_documents: float  # of the mean score of each document's labelled tokens
    accuracy: float  # balanced, at the threshold


@dataclass(frozen=True)
class Trained:
    probe: Probe
    tried: tuple[Tried, ...]
    judged: Judged


def train(source: Source, jobs: Sequence[Job], *, model: str, seed: int = 0) -> list[Trained]:
    """Every document is forwarded as often as reading all points takes, whatever the jobs."""
    check_tokenizer(source.tokenizer)
    encodings = [[encode(d, source.tokenizer) for d in job.documents] for job in jobs]
    check_lengths(encodings[0], source.max_len)
    kept = collect.keep(encodings, folds(jobs[0].documents, seed=seed))
    labels = [collect.labels(kept, encoded) for encoded in encodings]
    say(f"{len(kept.prompts)} documents, {kept.num_tokens} tokens with a label")
    searches = [Search(job, known) for job, known in zip(jobs, labels, strict=True)]
    groups = source.groups()
    # a group being read, the best of each job, and what scikit-learn copies
    num_arrays = len(groups[0]) + len(jobs) + NUM_COPIES
    collect.check_memory(kept, source.width, num_arrays, collect.free_memory())
    for number, group in enumerate(groups, 1):
        name = f"rows at {', '.join(map(str, group))} ({number} of {len(groups)})"
        hidden = collect.hidden(source, kept, group, name)
        tries = list(itertools.product(searches, hidden.items()))
        for search, (point, rows_TD) in shown(tries, total=len(tries), label="cross-validation"):
            search.look(point, rows_TD)
    return [search.trained(model) for search in searches]


class Search:
    """The best point so far for one job; the rows of others are let go."""

    def __init__(self, job: Job, labels: Labels) -> None:
        self._job = job
        self._labels = labels
        self._tried: list[Tried] = []
        self._best: tuple[Tried, Rows] | None = None

    def look(self, point: Point, rows_TD: Rows) -> None:
        tried = Tried(point, fit.choose(rows_TD, self._labels))
        self._tried.append(tried)
        if self._best is None or tried.choice.auroc > self._best[0].choice.auroc:
            self._best = tried, rows_TD

    def trained(self, model: str) -> Trained:
        assert self._best is not None, "there is at least one point"
        best, rows_TD = self._best
        line = fit.fit(rows_TD, self._labels, best.choice.penalty)
        bare = Probe(
            name=self._job.name,
            point=best.point,
            direction_D=line.direction_D,
            bias=line.bias,
            activation="sigmoid",
            threshold=best.choice.threshold,
            model=model,
            description=self._job.description,
        )
        # by the probe itself, rounded to float32 as its file has it
        scores_T = bare.apply(rows_TD)
        judged = judge(scores_T, self._labels, best.choice.threshold)
        return Trained(told(bare, scores_T, self._labels, judged), tuple(self._tried), judged)


def judge(scores_T: fit.Scores, labels: Labels, threshold: float) -> Judged:
    is_held_T = labels.folds_T == HELD_OUT
    is_judged_T = is_held_T & labels.judged_T
    is_all_T = is_held_T & labels.said_T & ~labels.framing_T
    scores, positive = scores_T[is_judged_T], labels.positive_T[is_judged_T]
    means, has = _by_document(scores, positive, labels.documents_T[is_judged_T])
    return Judged(
        num_documents=len(np.unique(labels.documents_T[is_judged_T])),
        num_tokens=int(is_judged_T.sum()),
        auroc=fit.auroc(scores, positive),
        auroc_all=fit.auroc(scores_T[is_all_T], labels.positive_T[is_all_T]),
        auroc_documents=fit.auroc(means, has),
        accuracy=fit.balanced_accuracy(scores, positive, threshold),
    )


def told(probe: Probe, scores_T: fit.Scores, labels: Labels, judged: Judged) -> Probe:
    """The probe with what people are told of it, all from the fold held out."""
    is_judged_T = (labels.folds_T == HELD_OUT) & labels.judged_T
    scores, positive = scores_T[is_judged_T], labels.positive_T[is_judged_T]
    counts, _ = np.histogram(scores, bins=NUM_BINS, range=(0, 1))
    low = float(np.percentile(scores[~positive], CALIBRATION[0]))
    high = float(np.percentile(scores[positive], CALIBRATION[1]))
    return replace(
        probe,
        auroc=round(judged.auroc, DECIMALS),
        calibration=(low, high) if low < high else None,
        histogram=wire.Histogram(0.0, 1.0, tuple(counts.tolist())),
    )


def _by_document(
    scores_T: fit.Scores, positive_T: fit.Mask, documents_T: NDArray[np.int64]
) -> tuple[fit.Scores, fit.Mask]:
    """The mean score of each side of each document; most have one side."""
    sides, at_T = np.unique(documents_T * 2 + positive_T, return_inverse=True)
    means = np.bincount(at_T, scores_T) / np.bincount(at_T)
    return means, sides % 2 == 1
