"""Measure what each encoder loses on rows of the demo model, over the demo's texts.

Rows are computed by Hugging Face in float32. Beside the fidelity of each encoder: what probes lose
that are trained and evaluated on decoded rows. Run: python -m bench.encoders [--stride 2]
T = tokens that are kept, D = model width.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from clairai.demo.console import say, show_progress
from clairai.demo.model import smollm2
from clairai.store.codecs.base import Encoder
from clairai.store.codecs.fidelity import Fidelity, measure
from clairai.store.codecs.registry import named
from clairai.train import fit, train_probe
from clairai.train.fit import HELD_OUT
from clairai.train.label_tokens import tokenize
from clairai.train.train_probe import KeptTokens
from scripts import numbers
from scripts.demo_documents import CONCEPTS, documents

LAYERS: Final = (0, 9, 19, 28)  # outputs of these blocks; the last block's are normed by then
PROBED: Final = 19
PENALTY: Final = 0.01
MEASURED: Final = tuple(map(named, ("full8", "fp8", "int4", "rp8", "topk8")))
TRAINED_ON: Final = tuple(map(named, ("full8", "int4", "rp8")))
EXPLANATION: Final = (
    "Rows of the demo model in float32 (width 576) by Hugging Face, on every {stride}th text of "
    "the demo probes. Errors, cosines and distortions are of 128 rows of each point, chosen as for "
    "a shard: the norm of a row's error over the row's, the cosine with the row, and how far "
    "distances between rows are off; for `rp8` error and cosine are against the exact projection."
)
PROBES: Final = (
    "Probes as the demo's, at `post_block.{point}`, with a penalty of {penalty}: fitted on decoded "
    "rows, and the AUROC over decoded rows of held-out texts, {num_tokens} tokens in all. "
    "Whitened: with all principal components of the training rows brought to the same size first."
)
Rows = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stride", type=int, default=2, help="take every n-th text")
    stride = parser.parse_args().stride
    started = time.monotonic()
    kept, labels, rows = _read(stride)
    losses = numbers.table(_HEADINGS, [line for layer in LAYERS for line in _lines(layer, rows)])
    sys.stdout.write(f"{losses}\n\n")
    sys.stdout.flush()
    headings = ("probe", "raw", *_names(TRAINED_ON), "`rp8`, whitened")
    aurocs = numbers.table(headings, _aurocs(labels, rows[PROBED]))
    took = f"{time.monotonic() - started:.0f} s"
    command = f"python -m bench.encoders --stride {stride}"
    probes = PROBES.format(point=PROBED, penalty=PENALTY, num_tokens=kept.num_tokens)
    told = EXPLANATION.format(stride=stride)
    paragraphs = [numbers.stamp(command, took=took), told, losses, probes, aurocs]
    sys.stdout.write(f"{aurocs}\n")
    numbers.write_section("Encoders", paragraphs)


def _read(stride: int) -> tuple[KeptTokens, dict[str, fit.Labels], dict[int, Rows]]:
    """Which tokens are kept, what each concept says of them, and their rows at each layer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(smollm2())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {concept.name: documents(concept)[::stride] for concept in CONCEPTS}
    encodings = {
        name: [tokenize(text, tokenizer) for text in labelled] for name, labelled in texts.items()
    }
    folds = [text.fold for text in next(iter(texts.values()))]
    kept = train_probe.choose_tokens(
        list(encodings.values()), [fold for fold in folds if fold is not None]
    )
    labels = {
        name: train_probe.label_kept_tokens(kept, encoded) for name, encoded in encodings.items()
    }
    say(f"{len(kept.prompts)} texts, {kept.num_tokens} tokens with a label")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return kept, labels, _forward(model, kept)


def _forward(model: Any, kept: KeptTokens) -> dict[int, Rows]:
    parts: dict[int, list[Rows]] = {layer: [] for layer in LAYERS}
    pairs = list(zip(kept.prompts, kept.positions, strict=True))
    for ids, at in show_progress(pairs, total=len(pairs), label="rows"):
        with torch.inference_mode():
            found = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in LAYERS:
            parts[layer].append(found[layer + 1][0].numpy()[at])
    return {layer: np.concatenate(part) for layer, part in parts.items()}


_HEADINGS: Final = (
    *("point", "encoder", "bytes a row", "error p50", "p99", "max", "cosine min", "mean"),
    *("distortion p50", "p95"),
)


def _lines(layer: int, rows: dict[int, Rows]) -> list[Sequence[str]]:
    rows_TD = rows[layer]
    return [_line(layer, encoder, measure(encoder, rows_TD)) for encoder in MEASURED]


def _line(layer: int, encoder: Encoder, found: Fidelity) -> Sequence[str]:
    assert (found.num_not_finite, found.num_overflowed) == (0, 0)
    errors = (found.relative_error_p50, found.relative_error_p99, found.relative_error_max)
    cosines = (found.cosine_min, found.cosine_mean)
    distortions = (found.distortion_p50, found.distortion_p95)
    return (
        *(f"`post_block.{layer}`", f"`{encoder.name}`", f"{encoder.nbytes_per_row(576)}"),
        *(f"{error:.2%}" for error in errors),
        *(f"{cosine:.6f}" for cosine in cosines),
        *(f"{distortion:.2%}" for distortion in distortions),
    )


def _names(encoders: Sequence[Encoder]) -> list[str]:
    return [f"`{encoder.name}`" for encoder in encoders]


def _aurocs(labels: dict[str, fit.Labels], rows_TD: Rows) -> Sequence[Sequence[str]]:
    width = rows_TD.shape[1]
    decoded = [encoder.decode(encoder.encode(rows_TD), width=width) for encoder in TRAINED_ON]
    lines = []
    for name, known in show_progress(list(labels.items()), total=len(labels), label="probes"):
        whitened = _whitened(decoded[-1], known)
        raw, *others = [_auroc(found, known) for found in (rows_TD, *decoded, whitened)]
        lines.append((f"`{name}`", f"{raw:.4f}", *(f"{o:.4f} ({o - raw:+.4f})" for o in others)))
    return lines


def _whitened(rows_TD: Rows, labels: fit.Labels) -> Rows:
    known = PCA(whiten=True).fit(rows_TD[labels.folds_T != HELD_OUT])
    return np.asarray(known.transform(rows_TD), np.float32)


def _auroc(rows_TD: Rows, labels: fit.Labels) -> float:
    line = fit.fit_direction(rows_TD, labels, PENALTY)
    is_evaluated_T = (labels.folds_T == HELD_OUT) & labels.evaluated_T
    scores_T = rows_TD[is_evaluated_T] @ line.direction_D + line.bias
    return fit.auroc(scores_T.astype(np.float64), labels.positive_T[is_evaluated_T])


if __name__ == "__main__":
    main()
