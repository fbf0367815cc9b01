"""Train probes on labelled documents, and report how good they are.

Rows of every labelled token are read from an engine at several points. For each job the point and
the penalty with the best cross-validated AUROC win; the fold held out gives the reported numbers.

T = labelled tokens that are kept, D = model width.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.demo.console import say, show_progress
from clairai.errors import ConfigError, quote
from clairai.points import Point
from clairai.probe.files import save
from clairai.probe.model import Probe
from clairai.train import fit
from clairai.train.documents import Document, read_json_lines, read_texts
from clairai.train.fit import HELD_OUT, Labels, PenaltyChoice, assign_folds
from clairai.train.label_tokens import (
    UNLABELLED,
    LabelledTokens,
    check_lengths,
    check_tokenizer,
    tokenize,
)
from clairai.train.row_source import RowSource
from clairai.train.start_engine import choose_model, model_name, run_engine
from clairai.wire import control_messages

NUM_BINS: Final = 32
CALIBRATION: Final = (1, 99)  # percentiles, of tokens without and with the concept
DECIMALS: Final = 4
NUM_COPIES: Final = 2  # that scikit-learn makes of the rows
# How often the same beginning of a document is kept in a fold: often enough that the start of every
# chat counts in the fit, and not so often that it outweighs the texts.
MAX_SAME_PREFIX: Final = 16

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class LabelledTexts:
    """Where the labelled texts are: one file of JSON lines, or one file for each label."""

    data: Path | None
    positive: Path | None
    negative: Path | None

    def read(self) -> list[Document]:
        if self.data is not None and self.positive is None and self.negative is None:
            return read_json_lines(self.data)
        if self.data is None and self.positive is not None and self.negative is not None:
            positive = read_texts(self.positive, label=True)
            return positive + read_texts(self.negative, label=False)
        raise ConfigError("give --data, or both --positive and --negative")


@dataclass(frozen=True)
class TrainOptions:
    """What to train, and where to save it."""

    name: str
    description: str | None
    out: Path
    points: Sequence[str]
    seed: int

    def check(self) -> None:
        """Refuse what could not be saved now, and not after minutes of training."""
        Probe(
            self.name, Point("post_block", 0), np.ones(1, np.float32), description=self.description
        )
        if self.out.suffix != ".safetensors" or not self.out.parent.is_dir():
            raise ConfigError(
                f"--out is {quote(str(self.out), limit=200)}; give a name ending in .safetensors, "
                "in a folder that is there"
            )


def train_probe_file(
    options: TrainOptions, texts: LabelledTexts, model: str | None, arguments: str
) -> Iterator[str]:
    """Train one probe and save it. Yields lines to print, the last when the file is written."""
    options.check()
    job = ProbeJob(options.name, texts.read(), options.description)
    model, engine_arguments = choose_model(model, arguments)
    say(f"starting vLLM for {model}")
    with run_engine(model, options.points, engine_arguments) as source:
        (trained,) = train(source, [job], model=model_name(model), seed=options.seed)
    yield from report_lines(trained)
    save(options.out, trained.probe)
    yield f"{options.out}: {trained.probe.name} at {trained.probe.point}"


def report_lines(trained: TrainedProbe) -> Iterator[str]:
    """Describe what was tried, what was chosen, and how it does on the fold held out."""
    yield "point           penalty  AUROC, cross-validated"
    for trial in trained.trials:
        mark = "  <- chosen" if trial.point == trained.probe.point else ""
        choice = trial.choice
        yield f"{trial.point!s:<15} {choice.penalty:<8g} {choice.auroc:.4f}{mark}"
    result, probe = trained.evaluation, trained.probe
    low, high = probe.calibration or (0.0, 1.0)
    yield f"held out: {result.num_documents} documents, {result.num_tokens} tokens"
    yield f"  AUROC of tokens      {result.auroc:.4f}  ({result.auroc_all:.4f} with first tokens)"
    yield f"  AUROC of documents   {result.auroc_documents:.4f}"
    yield f"  balanced accuracy    {result.accuracy:.4f}  at the threshold, {probe.threshold:.3f}"
    yield f"  usual scores         {low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class ProbeJob:
    """One probe to train. Jobs that are trained together label the same texts."""

    name: str
    documents: Sequence[Document]
    description: str | None = None


@dataclass(frozen=True)
class PointTrial:
    """The result at one point."""

    point: Point
    choice: PenaltyChoice


@dataclass(frozen=True)
class Evaluation:
    """How a probe does on the fold held out."""

    num_documents: int
    num_tokens: int
    auroc: float
    auroc_all: float  # with the first tokens of each span
    auroc_documents: float  # of the mean score of each document's labelled tokens
    accuracy: float  # balanced, at the threshold


@dataclass(frozen=True)
class TrainedProbe:
    probe: Probe
    trials: tuple[PointTrial, ...]
    evaluation: Evaluation


def train(
    source: RowSource, jobs: Sequence[ProbeJob], *, model: str, seed: int = 0
) -> list[TrainedProbe]:
    """Train a probe for each job. The documents are forwarded once for all jobs."""
    check_tokenizer(source.tokenizer)
    tokens = [[tokenize(d, source.tokenizer) for d in job.documents] for job in jobs]
    check_lengths(tokens[0], source.max_len)
    kept = choose_tokens(tokens, assign_folds(jobs[0].documents, seed=seed))
    say(f"{len(kept.prompts)} documents, {kept.num_tokens} tokens with a label")
    searches = [
        PointSearch(job, label_kept_tokens(kept, labelled))
        for job, labelled in zip(jobs, tokens, strict=True)
    ]
    groups = source.point_groups()
    # the group being read, the best rows of each job, and scikit-learn's copies
    num_arrays = len(groups[0]) + len(jobs) + NUM_COPIES
    check_memory(kept, source.width, num_arrays, free_memory())
    for number, group in enumerate(groups, 1):
        label = f"rows at {', '.join(map(str, group))} ({number} of {len(groups)})"
        rows = read_kept_rows(source, kept, group, label)
        trials = list(itertools.product(searches, rows.items()))
        for search, (point, rows_TD) in show_progress(
            trials, total=len(trials), label="cross-validation"
        ):
            search.try_point(point, rows_TD)
    return [search.finish(model) for search in searches]


class PointSearch:
    """Finds the best point for one job, and keeps the rows of the best so far only."""

    def __init__(self, job: ProbeJob, labels: Labels) -> None:
        self._job = job
        self._labels = labels
        self._trials: list[PointTrial] = []
        self._best: tuple[PointTrial, Rows] | None = None

    def try_point(self, point: Point, rows_TD: Rows) -> None:
        trial = PointTrial(point, fit.choose_penalty(rows_TD, self._labels))
        self._trials.append(trial)
        if self._best is None or trial.choice.auroc > self._best[0].choice.auroc:
            self._best = trial, rows_TD

    def finish(self, model: str) -> TrainedProbe:
        """Fit a probe at the best point, and evaluate it."""
        assert self._best is not None, "there is at least one point"
        best, rows_TD = self._best
        fitted = fit.fit_direction(rows_TD, self._labels, best.choice.penalty)
        probe = Probe(
            name=self._job.name,
            point=best.point,
            direction_D=fitted.direction_D,
            bias=fitted.bias,
            activation="sigmoid",
            threshold=best.choice.threshold,
            model=model,
            description=self._job.description,
        )
        # scored by the probe itself, in float32 as its file has it
        scores_T = probe.apply(rows_TD)
        evaluation = evaluate(scores_T, self._labels, best.choice.threshold)
        described = _with_evaluation(probe, scores_T, self._labels, evaluation)
        return TrainedProbe(described, tuple(self._trials), evaluation)


def evaluate(scores_T: fit.Scores, labels: Labels, threshold: float) -> Evaluation:
    """Evaluate scores on the fold held out."""
    is_held_T = labels.folds_T == HELD_OUT
    is_evaluated_T = is_held_T & labels.evaluated_T
    is_all_T = is_held_T & labels.labelled_T & ~labels.template_T
    scores, positive = scores_T[is_evaluated_T], labels.positive_T[is_evaluated_T]
    means, is_positive = _mean_by_document(scores, positive, labels.documents_T[is_evaluated_T])
    return Evaluation(
        num_documents=len(np.unique(labels.documents_T[is_evaluated_T])),
        num_tokens=int(is_evaluated_T.sum()),
        auroc=fit.auroc(scores, positive),
        auroc_all=fit.auroc(scores_T[is_all_T], labels.positive_T[is_all_T]),
        auroc_documents=fit.auroc(means, is_positive),
        accuracy=fit.balanced_accuracy(scores, positive, threshold),
    )


def _with_evaluation(
    probe: Probe, scores_T: fit.Scores, labels: Labels, evaluation: Evaluation
) -> Probe:
    """Add the fields for people, all from the fold held out."""
    is_evaluated_T = (labels.folds_T == HELD_OUT) & labels.evaluated_T
    scores, positive = scores_T[is_evaluated_T], labels.positive_T[is_evaluated_T]
    counts, _ = np.histogram(scores, bins=NUM_BINS, range=(0, 1))
    low = float(np.percentile(scores[~positive], CALIBRATION[0]))
    high = float(np.percentile(scores[positive], CALIBRATION[1]))
    return replace(
        probe,
        auroc=round(evaluation.auroc, DECIMALS),
        calibration=(low, high) if low < high else None,
        histogram=control_messages.Histogram(0.0, 1.0, tuple(counts.tolist())),
    )


def _mean_by_document(
    scores_T: fit.Scores, positive_T: fit.Mask, documents_T: NDArray[np.int64]
) -> tuple[fit.Scores, fit.Mask]:
    """Average the scores of each label of each document; most documents have one label."""
    keys, index_T = np.unique(documents_T * 2 + positive_T, return_inverse=True)
    means = np.bincount(index_T, scores_T) / np.bincount(index_T)
    return means, keys % 2 == 1


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens of each document whose rows are kept, the same for all jobs."""

    prompts: tuple[tuple[int, ...], ...]
    positions: tuple[NDArray[np.int64], ...]
    folds: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.positions))


def choose_tokens(tokens: Sequence[Sequence[LabelledTokens]], folds: Sequence[int]) -> KeptTokens:
    """Keep the tokens that any job labels.

    Documents that begin alike have the same rows there, so a fold keeps only a few of those.
    """
    seen: Counter[int] = Counter()
    positions = []
    for fold, *labelled in zip(folds, *tokens, strict=True):
        ids = labelled[0].ids
        assert all(other.ids == ids for other in labelled), "all jobs label the same texts"
        is_kept = np.any([one.labels_T != UNLABELLED for one in labelled], axis=0)
        prefix = hash(fold)
        for position, token in enumerate(ids):
            prefix = hash((prefix, token))
            is_kept[position] &= seen[prefix] < MAX_SAME_PREFIX
            seen[prefix] += 1
        positions.append(np.flatnonzero(is_kept))
    return KeptTokens(tuple(one.ids for one in tokens[0]), tuple(positions), tuple(folds))


def label_kept_tokens(kept: KeptTokens, tokens: Sequence[LabelledTokens]) -> Labels:
    """Return one job's labels of the kept tokens."""
    pairs = list(zip(tokens, kept.positions, strict=True))
    labels_T = np.concatenate([one.labels_T[at] for one, at in pairs])
    counts = [len(at) for at in kept.positions]
    return Labels(
        positive_T=labels_T == 1,
        labelled_T=labels_T != UNLABELLED,
        settled_T=np.concatenate([one.settled_T[at] for one, at in pairs]),
        template_T=np.concatenate([one.template_T[at] for one, at in pairs]),
        folds_T=np.repeat(np.array(kept.folds, np.int64), counts),
        documents_T=np.repeat(np.arange(len(counts)), counts),
    )


def read_kept_rows(
    source: RowSource, kept: KeptTokens, points: Sequence[Point], label: str
) -> dict[Point, Rows]:
    """Read the rows of the kept tokens at each of the points."""
    rows = {point: np.empty((kept.num_tokens, source.width), np.float32) for point in points}
    starts = np.cumsum([0, *map(len, kept.positions)])  # of each document's rows
    batches = source.read(kept.prompts, points)
    total = source.num_batches(kept.prompts)
    for first, columns, batch in show_progress(batches, total=total, label=label):
        for point, parts in batch.items():
            end = first + len(parts)
            selected = zip(parts, kept.positions[first:end], strict=True)
            found = np.concatenate([part[positions] for part, positions in selected])
            rows[point][starts[first] : starts[end], columns] = found
    return rows


def check_memory(kept: KeptTokens, width: int, num_arrays: int, available: int) -> None:
    """Refuse documents whose rows, in so many arrays at once, do not fit into memory."""
    needed = kept.num_tokens * width * 4 * num_arrays
    if needed > available:
        raise ConfigError(
            f"{kept.num_tokens} tokens with a label need {needed >> 20} MiB at width {width}, and "
            f"{available >> 20} are free; give fewer or shorter documents"
        )


def free_memory() -> int:
    """Bytes that are available without swapping, as Linux estimates them."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10
