"""Takes what `clairai probes train` was given; gives a probe file, and in words how good it is."""

# T = labelled tokens, D = model width
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
from clairai.errors import ConfigError
from clairai.points import Point, quote
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
from clairai.train.row_source import RowSource, prompt_batches
from clairai.train.start_engine import choose_model, model_name, run_engine
from clairai.wire import ring_messages


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
            with_it = read_texts(self.positive, label=True)
            return with_it + read_texts(self.negative, label=False)
        raise ConfigError("give --data, or both --positive and --negative")


@dataclass(frozen=True)
class TrainOptions:
    """What is wanted: a name, and where the probe goes."""

    name: str
    description: str | None
    out: Path
    points: Sequence[str]
    seed: int

    def check(self) -> None:
        """Now, and not after minutes of training."""
        Probe(
            self.name, Point("post_block", 0), np.ones(1, np.float32), description=self.description
        )
        if self.out.suffix != ".safetensors" or not self.out.parent.is_dir():
            raise ConfigError(
                f"--out is {quote(str(self.out), limit=200)}; give a name ending in .safetensors, "
                "in a folder that is there"
            )


def train_probe_file(
    wish: TrainOptions, texts: LabelledTexts, model: str | None, arguments: str
) -> Iterator[str]:
    """Lines to print, the last of them after the file is there."""
    wish.check()
    job = ProbeJob(wish.name, texts.read(), wish.description)
    source, settings = choose_model(model, arguments)
    say(f"starting vLLM for {source}")
    with run_engine(source, wish.points, settings) as tapped:
        (made,) = train(tapped, [job], model=model_name(source), seed=wish.seed)
    yield from report_lines(made)
    save(wish.out, made.probe)
    yield f"{wish.out}: {made.probe.name} at {made.probe.point}"


def report_lines(made: TrainedProbe) -> Iterator[str]:
    """What was tried, what was chosen, and how it does on documents that chose nothing."""
    yield "point           penalty  AUROC, cross-validated"
    for tried in made.tried:
        mark = "  <- chosen" if tried.point == made.probe.point else ""
        choice = tried.choice
        yield f"{tried.point!s:<15} {choice.penalty:<8g} {choice.auroc:.4f}{mark}"
    judged, probe = made.judged, made.probe
    low, high = probe.calibration or (0.0, 1.0)
    yield f"held out: {judged.num_documents} documents, {judged.num_tokens} tokens"
    yield f"  AUROC of tokens      {judged.auroc:.4f}  ({judged.auroc_all:.4f} with first tokens)"
    yield f"  AUROC of documents   {judged.auroc_documents:.4f}"
    yield f"  balanced accuracy    {judged.accuracy:.4f}  at the threshold, {probe.threshold:.3f}"
    yield f"  usual scores         {low:.3g} to {high:.3g}"


# MERGED
# Takes labelled documents and a tapped engine; gives a probe for each job, and how good it is.


NUM_BINS: Final = 32
CALIBRATION: Final = (1, 99)  # percentiles, of tokens without and with the concept
DECIMALS: Final = 4
NUM_COPIES: Final = 2

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class ProbeJob:
    """One probe to train. Jobs that are trained together say something of the same texts."""

    name: str
    documents: Sequence[Document]
    description: str | None = None


@dataclass(frozen=True)
class PointTrial:
    """What was found at one point."""

    point: Point
    choice: PenaltyChoice


@dataclass(frozen=True)
class Evaluation:
    """How the probe does on the fold that nothing was chosen by."""

    num_documents: int
    num_tokens: int
    auroc: float
    auroc_all: float  # the first tokens of each stretch counted too
    auroc_documents: float  # of the mean score of each document's labelled tokens
    accuracy: float  # balanced, at the threshold


@dataclass(frozen=True)
class TrainedProbe:
    probe: Probe
    tried: tuple[PointTrial, ...]
    judged: Evaluation


def train(
    source: RowSource, jobs: Sequence[ProbeJob], *, model: str, seed: int = 0
) -> list[TrainedProbe]:
    """Every document is forwarded as often as reading all points takes, whatever the jobs."""
    check_tokenizer(source.tokenizer)
    encodings = [[tokenize(d, source.tokenizer) for d in job.documents] for job in jobs]
    check_lengths(encodings[0], source.max_len)
    kept = choose_tokens(encodings, assign_folds(jobs[0].documents, seed=seed))
    labels = [label_kept_tokens(kept, encoded) for encoded in encodings]
    say(f"{len(kept.prompts)} documents, {kept.num_tokens} tokens with a label")
    searches = [PointSearch(job, known) for job, known in zip(jobs, labels, strict=True)]
    groups = source.groups()
    # a group being read, the best of each job, and what scikit-learn copies
    num_arrays = len(groups[0]) + len(jobs) + NUM_COPIES
    check_memory(kept, source.width, num_arrays, free_memory())
    for number, group in enumerate(groups, 1):
        name = f"rows at {', '.join(map(str, group))} ({number} of {len(groups)})"
        hidden = read_kept_rows(source, kept, group, name)
        tries = list(itertools.product(searches, hidden.items()))
        for search, (point, rows_TD) in show_progress(
            tries, total=len(tries), label="cross-validation"
        ):
            search.look(point, rows_TD)
    return [search.trained(model) for search in searches]


class PointSearch:
    """The best point so far for one job; the rows of others are let go."""

    def __init__(self, job: ProbeJob, labels: Labels) -> None:
        self._job = job
        self._labels = labels
        self._tried: list[PointTrial] = []
        self._best: tuple[PointTrial, Rows] | None = None

    def look(self, point: Point, rows_TD: Rows) -> None:
        tried = PointTrial(point, fit.choose_penalty(rows_TD, self._labels))
        self._tried.append(tried)
        if self._best is None or tried.choice.auroc > self._best[0].choice.auroc:
            self._best = tried, rows_TD

    def trained(self, model: str) -> TrainedProbe:
        assert self._best is not None, "there is at least one point"
        best, rows_TD = self._best
        line = fit.fit_direction(rows_TD, self._labels, best.choice.penalty)
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
        judged = evaluate(scores_T, self._labels, best.choice.threshold)
        return TrainedProbe(
            with_evaluation(bare, scores_T, self._labels, judged), tuple(self._tried), judged
        )


def evaluate(scores_T: fit.Scores, labels: Labels, threshold: float) -> Evaluation:
    is_held_T = labels.folds_T == HELD_OUT
    is_judged_T = is_held_T & labels.judged_T
    is_all_T = is_held_T & labels.said_T & ~labels.framing_T
    scores, positive = scores_T[is_judged_T], labels.positive_T[is_judged_T]
    means, has = _mean_by_document(scores, positive, labels.documents_T[is_judged_T])
    return Evaluation(
        num_documents=len(np.unique(labels.documents_T[is_judged_T])),
        num_tokens=int(is_judged_T.sum()),
        auroc=fit.auroc(scores, positive),
        auroc_all=fit.auroc(scores_T[is_all_T], labels.positive_T[is_all_T]),
        auroc_documents=fit.auroc(means, has),
        accuracy=fit.balanced_accuracy(scores, positive, threshold),
    )


def with_evaluation(
    probe: Probe, scores_T: fit.Scores, labels: Labels, judged: Evaluation
) -> Probe:
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
        histogram=ring_messages.Histogram(0.0, 1.0, tuple(counts.tolist())),
    )


def _mean_by_document(
    scores_T: fit.Scores, positive_T: fit.Mask, documents_T: NDArray[np.int64]
) -> tuple[fit.Scores, fit.Mask]:
    """The mean score of each side of each document; most have one side."""
    sides, at_T = np.unique(documents_T * 2 + positive_T, return_inverse=True)
    means = np.bincount(at_T, scores_T) / np.bincount(at_T)
    return means, sides % 2 == 1


# MERGED
# Takes encoded documents and a tapped engine; gives the rows of every token with a label.
#
# T = tokens that are kept, D = model width


# Enough that the start of every chat counts in the fit, too few that it weighs more than texts.
MAX_SAME_PREFIX: Final = 16


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Which tokens of each document are kept: the same for all that is trained on them."""

    prompts: tuple[tuple[int, ...], ...]
    positions: tuple[NDArray[np.int64], ...]
    folds: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.positions))


def choose_tokens(
    encodings: Sequence[Sequence[LabelledTokens]], folds: Sequence[int]
) -> KeptTokens:
    """Tokens that any of the encodings labels.

    Documents that begin alike have the same rows there: of each fold a few are kept.
    """
    seen: Counter[int] = Counter()
    positions = []
    for fold, *labelled in zip(folds, *encodings, strict=True):
        ids = labelled[0].ids
        assert all(other.ids == ids for other in labelled), "one text, labelled twice over"
        is_said = np.any([encoded.labels_T != UNLABELLED for encoded in labelled], axis=0)
        beginning = hash(fold)
        for position, token in enumerate(ids):
            beginning = hash((beginning, token))
            is_said[position] &= seen[beginning] < MAX_SAME_PREFIX
            seen[beginning] += 1
        positions.append(np.flatnonzero(is_said))
    return KeptTokens(
        tuple(encoded.ids for encoded in encodings[0]), tuple(positions), tuple(folds)
    )


def label_kept_tokens(kept: KeptTokens, encoded: Sequence[LabelledTokens]) -> Labels:
    """What one set of encodings says of the kept tokens."""
    pairs = list(zip(encoded, kept.positions, strict=True))
    said_T = np.concatenate([part.labels_T[at] for part, at in pairs])
    settled_T = np.concatenate([part.settled_T[at] for part, at in pairs])
    framing_T = np.concatenate([part.framing_T[at] for part, at in pairs])
    counts = [len(at) for at in kept.positions]
    return Labels(
        positive_T=said_T == 1,
        said_T=said_T != UNLABELLED,
        settled_T=settled_T,
        framing_T=framing_T,
        folds_T=np.repeat(np.array(kept.folds, np.int64), counts),
        documents_T=np.repeat(np.arange(len(counts)), counts),
    )


def read_kept_rows(
    source: RowSource, kept: KeptTokens, points: Sequence[Point], label: str
) -> dict[Point, NDArray[np.float32]]:
    """The kept rows at each of the points."""
    rows = {point: np.empty((kept.num_tokens, source.width), np.float32) for point in points}
    sizes = [len(batch) for batch in prompt_batches(kept.prompts)]
    steps = source.read(kept.prompts, points)
    row = document = column = 0
    for step in show_progress(steps, total=len(sizes) * source.passes(), label=label):
        num_columns = 0
        for point, parts in step.items():
            at = kept.positions[document : document + len(parts)]
            found = np.concatenate([part[chosen] for part, chosen in zip(parts, at, strict=True)])
            num_rows, num_columns = found.shape
            rows[point][row : row + num_rows, column : column + num_columns] = found
        row, document = row + num_rows, document + len(at)
        if document == len(kept.prompts):  # the next pass reads the next columns of all rows
            row, document, column = 0, 0, column + num_columns
    return rows


def check_memory(kept: KeptTokens, width: int, num_arrays: int, available: int) -> None:
    """Rows of every kept token, in so many arrays at once, have to fit."""
    needed = kept.num_tokens * width * 4 * num_arrays
    if needed > available:
        raise ConfigError(
            f"{kept.num_tokens} tokens with a label need {needed >> 20} MiB at width {width}, and "
            f"{available >> 20} are free; give fewer or shorter documents"
        )


def free_memory() -> int:
    """Bytes that can be had without swapping, as Linux estimates it."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10
