"""Make a steering vector from contrasting texts, or from a probe, and save it.

N = documents of one side, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clairai.demo.console import say, show_progress
from clairai.errors import ConfigError, quote
from clairai.points import Point
from clairai.probe import files as probe_files
from clairai.train.documents import Document, read_pairs, read_texts
from clairai.train.label_tokens import LabelledTokens, check_lengths, check_tokenizer, tokenize
from clairai.train.row_source import RowSource
from clairai.train.start_engine import choose_model, model_name, run_engine
from clairai.vector.files import save
from clairai.vector.make import METHODS, from_probe, measure_separation
from clairai.vector.model import Vector

Method = Literal["mean", "pca"]
Tokens = Literal["all", "last"]
RowsByPoint = dict[Point, NDArray[np.float64]]


@dataclass(frozen=True)
class ContrastTexts:
    """Where the contrasting texts are: one file of pairs, or one file for each side."""

    pairs: Path | None = None
    positive: Path | None = None
    negative: Path | None = None

    def read(self) -> tuple[list[Document], list[Document]]:
        if self.pairs is not None and self.positive is None and self.negative is None:
            return read_pairs(self.pairs)
        if self.pairs is None and self.positive is not None and self.negative is not None:
            return read_texts(self.positive, label=True), read_texts(self.negative, label=True)
        raise ConfigError("give --pairs, or both --positive and --negative, or --probe")


@dataclass(frozen=True)
class VectorOptions:
    """What the vector is called, and where to save it."""

    name: str
    out: Path
    description: str | None = None
    scale: float = 1.0

    def check(self) -> None:
        """Refuse what could not be saved now, and not after minutes of reading."""
        self.apply(Vector(self.name, {Point("post_block", 0): np.ones(1, np.float32)}))
        if self.out.suffix != ".safetensors" or not self.out.parent.is_dir():
            raise ConfigError(
                f"--out is {quote(str(self.out), limit=200)}; give a name ending in .safetensors, "
                "in a folder that is there"
            )

    def apply(self, vector: Vector) -> Vector:
        description = self.description or vector.description
        return replace(vector, name=self.name, description=description, scale=self.scale)


@dataclass(frozen=True)
class ReadingOptions:
    """How rows become a vector, and where they are read."""

    method: Method = "mean"
    tokens: Tokens = "all"
    points: Sequence[str] = ()


@dataclass(frozen=True)
class MadeVector:
    """A vector, and how well it separates the two sides at each of its points."""

    vector: Vector
    separation: tuple[float, ...]


def make_vector_file(
    options: VectorOptions,
    texts: ContrastTexts,
    reading: ReadingOptions,
    model: str | None,
    arguments: str,
) -> Iterator[str]:
    """Make a vector of texts and save it. Yields lines to print, the last when it is written."""
    options.check()
    positive, negative = texts.read()
    model, engine_arguments = choose_model(model, arguments)
    say(f"starting vLLM for {model}")
    with run_engine(model, reading.points, engine_arguments) as source:
        made = make_vector(
            source, options.name, (positive, negative), reading, model=model_name(model)
        )
    yield f"{len(positive)} positive texts, {len(negative)} negative ones"
    yield "point           norm      told apart"
    listed = made.vector.listed()
    for point, norm, share in zip(listed.points, listed.norms, made.separation, strict=True):
        yield f"{point:<15} {norm:<9.4g} {share:.3f}"
    yield _save(options, made.vector)


def make_vector_from_probe(options: VectorOptions, probe: Path, step: float) -> Iterator[str]:
    """Make a vector of a probe's file and save it; this needs no engine."""
    options.check()
    yield _save(options, from_probe(probe_files.load(probe), step=step))


def make_vector(
    source: RowSource,
    name: str,
    texts: tuple[Sequence[Document], Sequence[Document]],
    reading: ReadingOptions,
    *,
    model: str,
) -> MadeVector:
    """Read both sides at every point of the engine, and make a vector of them."""
    sides = read_contrast(source, *texts, reading.tokens)
    vector = METHODS[reading.method](name, sides.positive, sides.negative)
    separation = tuple(
        measure_separation(row_D, sides.positive[point], sides.negative[point])
        for point, row_D in vector.rows.items()
    )
    return MadeVector(replace(vector, model=model), separation)


def _save(options: VectorOptions, vector: Vector) -> str:
    vector = options.apply(vector)
    save(vector, options.out)
    points = ", ".join(map(str, vector.points))
    return f"{options.out}: {vector.name} at {points}, scale {vector.scale:g}"


@dataclass(frozen=True)
class ContrastRows:
    """One mean row for each document of the two sides, [N, D] at each point."""

    positive: RowsByPoint
    negative: RowsByPoint


def read_contrast(
    source: RowSource, positive: Sequence[Document], negative: Sequence[Document], tokens: Tokens
) -> ContrastRows:
    """Read both sides together, so that each point is read once."""
    check_tokenizer(source.tokenizer)
    documents = [tokenize(document, source.tokenizer) for document in (*positive, *negative)]
    check_lengths(documents, source.max_len)
    positions = [_choose_positions(document, tokens) for document in documents]
    rows: RowsByPoint = {}
    for points in source.point_groups():
        rows |= _read_means(source, [document.ids for document in documents], positions, points)
    middle = len(positive)
    return ContrastRows(
        {point: rows_ND[:middle] for point, rows_ND in rows.items()},
        {point: rows_ND[middle:] for point, rows_ND in rows.items()},
    )


def _choose_positions(document: LabelledTokens, tokens: Tokens) -> NDArray[np.int64]:
    """Choose the labelled tokens, without the first few, which do not show the concept yet."""
    is_labelled_T = document.labels_T == 1
    labelled = np.flatnonzero(is_labelled_T)
    if tokens == "last":
        return labelled[-1:]
    settled = np.flatnonzero(is_labelled_T & document.settled_T)
    return settled if len(settled) else labelled


def _read_means(
    source: RowSource,
    prompts: Sequence[Sequence[int]],
    positions: Sequence[NDArray[np.int64]],
    points: Sequence[Point],
) -> RowsByPoint:
    """Read the mean of each document's chosen rows; the rows themselves are not kept."""
    rows = {point: np.empty((len(prompts), source.width), np.float64) for point in points}
    label = f"rows at {', '.join(map(str, points))}"
    batches = source.read(prompts, points)
    total = source.num_batches(prompts)
    for first, columns, batch in show_progress(batches, total=total, label=label):
        for point, parts in batch.items():
            for document, part in enumerate(parts, first):
                mean = part[positions[document]].mean(axis=0, dtype=np.float64)
                rows[point][document, columns] = mean
    return rows
