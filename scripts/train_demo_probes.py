"""Takes the demo model and the labelled texts; gives the probe files that the package ships.

Layer and penalty are chosen by cross-validation on the training folds; the held-out fold, whose
sentences are in no other, is scored once at the end. Run: python -m scripts.train_demo_probes
"""

# T = tokens, D = model width

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from clairai.demo.console import say
from clairai.demo.model import NAME, smollm2
from clairai.points import Point
from clairai.probe import files
from clairai.probe.model import Probe
from scripts import logistic, numbers
from scripts.demo_documents import (
    CONCEPTS,
    HELD_OUT,
    NUM_FOLDS,
    Concept,
    documents,
    neutral_documents,
)
from scripts.demo_rows import Reader, Rows

LAYERS: Final = tuple(range(8, 27, 2))
PENALTIES: Final = (0.003, 0.03, 0.3)
FOLDER: Final = Path(__file__).resolve().parent.parent / "src" / "clairai" / "demo" / "probes"
COMMAND: Final = "python -m scripts.train_demo_probes"


@dataclass(frozen=True)
class Choice:
    """A layer (by its index in LAYERS) and a penalty, with what cross-validation says of them."""

    layer_index: int
    l2: float
    auroc: float
    threshold: float


@dataclass(frozen=True)
class Trained:
    """A probe, and one line of numbers about it."""

    probe: Probe
    cells: tuple[str, ...]


def main() -> None:
    """Train every concept, write the files and the table."""
    torch.manual_seed(0)
    started = time.monotonic()
    reader = Reader(smollm2(), LAYERS)
    neutral = reader.rows(neutral_documents(HELD_OUT))
    FOLDER.mkdir(exist_ok=True)
    cells = []
    for concept in CONCEPTS:
        trained = train(concept, reader, neutral)
        files.save(FOLDER / f"{concept.name}.safetensors", trained.probe)
        cells.append(trained.cells)
        say(" ".join(trained.cells))
    table = numbers.table(HEADINGS, cells)
    sys.stdout.write(f"{table}\n")
    took = f"{time.monotonic() - started:.0f} s"
    numbers.write_section("Demo probes", [numbers.stamp(COMMAND, took=took), EXPLANATION, table])


def train(concept: Concept, reader: Reader, neutral: Rows) -> Trained:
    """Choose, fit on all training folds, and score the held-out fold."""
    folds = range(NUM_FOLDS)
    rows = reader.rows(itertools.chain.from_iterable(documents(concept, fold) for fold in folds))
    choice = choose(rows)
    hidden_TD = rows.hidden_LTD[choice.layer_index]
    known_T = rows.settled_T & (rows.folds_T != HELD_OUT)
    line = logistic.fit(hidden_TD[known_T], rows.labels_T[known_T], l2=choice.l2)
    usual_T = logistic.sigmoid(line.scores(neutral.hidden_LTD[choice.layer_index]))
    low, high = (float(end) for end in np.percentile(usual_T, (1, 99)))
    probe = Probe(
        name=concept.name,
        point=Point("post_block", LAYERS[choice.layer_index]),
        direction_D=line.direction_D,
        bias=line.bias,
        activation="sigmoid",
        threshold=choice.threshold,
        calibration=(low, high),
        model=NAME,
    )
    return _judged(probe, rows, hidden_TD, choice)


def choose(rows: Rows) -> Choice:
    """The layer and penalty with the best AUROC on training folds left out in turn."""
    found = (
        _cross_validated(rows, layer_index, l2)
        for layer_index in range(len(LAYERS))
        for l2 in PENALTIES
    )
    return max(found, key=lambda choice: choice.auroc)


def _cross_validated(rows: Rows, layer_index: int, l2: float) -> Choice:
    hidden_TD = rows.hidden_LTD[layer_index]
    scores, labels = [], []
    for fold in range(HELD_OUT):
        test_T = rows.settled_T & (rows.folds_T == fold)
        known_T = rows.settled_T & (rows.folds_T != fold) & (rows.folds_T != HELD_OUT)
        line = logistic.fit(hidden_TD[known_T], rows.labels_T[known_T], l2=l2)
        scores.append(logistic.sigmoid(line.scores(hidden_TD[test_T])))
        labels.append(rows.labels_T[test_T])
    scores_T, labels_T = np.concatenate(scores), np.concatenate(labels)
    threshold = logistic.best_threshold(scores_T, labels_T)
    return Choice(layer_index, l2, logistic.auroc(scores_T, labels_T), threshold)


HEADINGS: Final = (
    "probe",
    "point",
    "held-out documents",
    "held-out tokens",
    "AUROC",
    "AUROC, all tokens",
    "balanced accuracy",
    "threshold",
    "calibration",
)
EXPLANATION: Final = (
    "Measured on documents made of texts that no training document has; a quarter of all texts is "
    "held out, and each that has the concept stands in two documents. `AUROC` leaves out "
    "the first four tokens of each stretch of text, where nothing tells yet which concept it is; "
    "`AUROC, all tokens` counts them. Balanced accuracy is at the stored threshold, which comes "
    "from cross-validation on the training documents, as do layer and penalty. Calibration is the "
    "1st to 99th percentile of the score on held-out neutral statements. Texts: "
    "`scripts/demo_texts/`."
)


def _judged(probe: Probe, rows: Rows, hidden_TD: logistic.Rows, choice: Choice) -> Trained:
    held_T = rows.folds_T == HELD_OUT
    settled_T = held_T & rows.settled_T
    scores_T = probe.apply(hidden_TD).astype(np.float64)
    auroc = logistic.auroc(scores_T[settled_T], rows.labels_T[settled_T])
    auroc_all = logistic.auroc(scores_T[held_T], rows.labels_T[held_T])
    accuracy = logistic.balanced_accuracy(
        scores_T[settled_T], rows.labels_T[settled_T], threshold=choice.threshold
    )
    low, high = probe.calibration or (0.0, 0.0)
    num_documents = len(np.unique(rows.documents_T[held_T]))
    cells = (
        f"`{probe.name}`",
        f"`{probe.point}`",
        f"{num_documents}",
        f"{int(settled_T.sum())}",
        f"{auroc:.3f}",
        f"{auroc_all:.3f}",
        f"{accuracy:.3f}",
        f"{choice.threshold:.2f}",
        f"{low:.2g} to {high:.2g}",
    )
    return Trained(probe, cells)


if __name__ == "__main__":
    main()
