"""Takes what `clairai vectors make` was given; gives a vector file, and in words what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clairai.demo.console import say, show_progress
from clairai.errors import ConfigError
from clairai.points import Point, quote
from clairai.probe import files as probe_files
from clairai.train.documents import Document, read_pairs, read_texts
from clairai.train.label_tokens import LabelledTokens, check_lengths, check_tokenizer, tokenize
from clairai.train.row_source import RowSource, prompt_batches
from clairai.train.start_engine import choose_model, model_name, run_engine
from clairai.vector.files import save
from clairai.vector.make import METHODS, from_probe, measure_separation
from clairai.vector.model import Vector

Method = Literal["mean", "pca"]


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
    """What is wanted: a name, and where the vector goes."""

    name: str
    out: Path
    description: str | None = None
    scale: float = 1.0

    def check(self) -> None:
        """Now, and not after minutes of reading."""
        self.told(Vector(self.name, {Point("post_block", 0): np.ones(1, np.float32)}))
        if self.out.suffix != ".safetensors" or not self.out.parent.is_dir():
            raise ConfigError(
                f"--out is {quote(str(self.out), limit=200)}; give a name ending in .safetensors, "
                "in a folder that is there"
            )

    def told(self, vector: Vector) -> Vector:
        described = self.description or vector.description
        return replace(vector, name=self.name, description=described, scale=self.scale)


@dataclass(frozen=True)
class ReadingOptions:
    """How rows become a vector, and where they are read."""

    method: Method = "mean"
    tokens: Tokens = "all"
    points: Sequence[str] = ()


@dataclass(frozen=True)
class MadeVector:
    """A vector, and at each of its points how often it tells the two sides apart."""

    vector: Vector
    apart: tuple[float, ...]


def make_vector_file(
    wish: VectorOptions,
    texts: ContrastTexts,
    reading: ReadingOptions,
    model: str | None,
    arguments: str,
) -> Iterator[str]:
    """Lines to print, the last of them after the file is there."""
    wish.check()
    positive, negative = texts.read()
    source, settings = choose_model(model, arguments)
    say(f"starting vLLM for {source}")
    with run_engine(source, reading.points, settings) as tapped:
        made = make_vector(
            tapped, wish.name, (positive, negative), reading, model=model_name(source)
        )
    yield f"{len(positive)} positive texts, {len(negative)} negative ones"
    yield "point           norm      told apart"
    listed = made.vector.listed()
    for point, length, share in zip(listed.points, listed.norms, made.apart, strict=True):
        yield f"{point:<15} {length:<9.4g} {share:.3f}"
    yield _save(wish, made.vector)


def make_vector_from_probe(wish: VectorOptions, probe: Path, step: float) -> Iterator[str]:
    """As `make_file`, from a probe's file; needs no engine."""
    wish.check()
    yield _save(wish, from_probe(probe_files.load(probe), step=step))


def make_vector(
    source: RowSource,
    name: str,
    texts: tuple[Sequence[Document], Sequence[Document]],
    reading: ReadingOptions,
    *,
    model: str,
) -> MadeVector:
    """Read both sides at every point of the engine, and make the vector of them."""
    sides = read_contrast(source, *texts, reading.tokens)
    vector = METHODS[reading.method](name, sides.positive, sides.negative)
    return MadeVector(replace(vector, model=model), separation(vector, sides))


def separation(vector: Vector, sides: ContrastRows) -> tuple[float, ...]:
    rows = vector.rows.items()
    return tuple(
        measure_separation(row_D, sides.positive[point], sides.negative[point])
        for point, row_D in rows
    )


def _save(wish: VectorOptions, vector: Vector) -> str:
    told = wish.told(vector)
    save(told, wish.out)
    points = ", ".join(map(str, told.points))
    return f"{wish.out}: {told.name} at {points}, scale {told.scale:g}"


# MERGED
# Takes contrasting documents and a tapped engine; gives one row for each document, at each point.
#
# N = documents of one side, D = model width


Tokens = Literal["all", "last"]
RowsByPoint = dict[Point, NDArray[np.float64]]


@dataclass(frozen=True)
class ContrastRows:
    """What the two sides read, [N, D] at each point."""

    positive: RowsByPoint
    negative: RowsByPoint


def read_contrast(
    source: RowSource, positive: Sequence[Document], negative: Sequence[Document], tokens: Tokens
) -> ContrastRows:
    """Both sides are forwarded together: each point is read once."""
    check_tokenizer(source.tokenizer)
    encoded = [tokenize(document, source.tokenizer) for document in (*positive, *negative)]
    check_lengths(encoded, source.max_len)
    chosen = [_choose_positions(one, tokens) for one in encoded]
    rows: RowsByPoint = {}
    for points in source.groups():
        rows |= _read_means(source, [one.ids for one in encoded], chosen, points)
    at = len(positive)
    return ContrastRows(
        {point: rows_ND[:at] for point, rows_ND in rows.items()},
        {point: rows_ND[at:] for point, rows_ND in rows.items()},
    )


def _choose_positions(encoded: LabelledTokens, tokens: Tokens) -> NDArray[np.int64]:
    """The tokens of what is said, without the first few, which do not tell yet what it will be."""
    is_said_T = encoded.labels_T == 1
    said = np.flatnonzero(is_said_T)
    if tokens == "last":
        return said[-1:]
    settled = np.flatnonzero(is_said_T & encoded.settled_T)
    return settled if len(settled) else said


def _read_means(
    source: RowSource,
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[NDArray[np.int64]],
    points: Sequence[Point],
) -> RowsByPoint:
    """The mean of each document's chosen rows; the rows themselves are let go."""
    rows = {point: np.empty((len(prompts), source.width), np.float64) for point in points}
    places = _step_starts(prompts, source.passes())
    label = f"rows at {', '.join(map(str, points))}"
    steps = show_progress(source.read(prompts, points), total=len(places), label=label)
    column = 0
    for step, (first, is_last) in zip(steps, places, strict=True):
        num_columns = 0
        for point, parts in step.items():
            for number, part in enumerate(parts, first):
                num_columns = part.shape[1]
                mean = part[chosen[number]].mean(axis=0, dtype=np.float64)
                rows[point][number, column : column + num_columns] = mean
        column += num_columns if is_last else 0  # the next pass reads the next columns
    return rows


def _step_starts(prompts: Sequence[Sequence[int]], num_passes: int) -> list[tuple[int, bool]]:
    """Of each step of the reading: its first document, and whether it ends a pass."""
    firsts = list(_batch_starts(prompts))
    return [(first, first == firsts[-1]) for _ in range(num_passes) for first in firsts]


def _batch_starts(prompts: Sequence[Sequence[int]]) -> Iterator[int]:
    first = 0
    for batch in prompt_batches(prompts):
        yield first
        first += len(batch)
