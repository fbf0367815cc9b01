"""Takes what `clairai vectors make` was given; gives a vector file, and in words what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from clairai.demo.console import say
from clairai.errors import ConfigError
from clairai.points import Point, quote
from clairai.probe import files as probe_files
from clairai.steer.files import save
from clairai.steer.make import METHODS, from_probe, told_apart
from clairai.steer.vector import Vector
from clairai.train.contrast import Sides, Tokens, read_sides
from clairai.train.documents import Document, read_pairs, read_texts
from clairai.train.engine import chosen, running, short_name
from clairai.train.rows import Source

Method = Literal["mean", "pca"]


@dataclass(frozen=True)
class Texts:
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
class Wish:
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
class Reading:
    """How rows become a vector, and where they are read."""

    method: Method = "mean"
    tokens: Tokens = "all"
    points: Sequence[str] = ()


@dataclass(frozen=True)
class Made:
    """A vector, and at each of its points how often it tells the two sides apart."""

    vector: Vector
    apart: tuple[float, ...]


def make_file(
    wish: Wish, texts: Texts, reading: Reading, model: str | None, arguments: str
) -> Iterator[str]:
    """Lines to print, the last of them after the file is there."""
    wish.check()
    positive, negative = texts.read()
    source, settings = chosen(model, arguments)
    say(f"starting vLLM for {source}")
    with running(source, reading.points, settings) as tapped:
        made = make(tapped, wish.name, (positive, negative), reading, model=short_name(source))
    yield f"{len(positive)} positive texts, {len(negative)} negative ones"
    yield "point           norm      told apart"
    listed = made.vector.listed()
    for point, length, share in zip(listed.points, listed.norms, made.apart, strict=True):
        yield f"{point:<15} {length:<9.4g} {share:.3f}"
    yield _saved(wish, made.vector)


def make_from_probe(wish: Wish, probe: Path, step: float) -> Iterator[str]:
    """As `make_file`, from a probe's file; needs no engine."""
    wish.check()
    yield _saved(wish, from_probe(probe_files.load(probe), step=step))


def make(
    source: Source,
    name: str,
    texts: tuple[Sequence[Document], Sequence[Document]],
    reading: Reading,
    *,
    model: str,
) -> Made:
    """Read both sides at every point of the engine, and make the vector of them."""
    sides = read_sides(source, *texts, reading.tokens)
    vector = METHODS[reading.method](name, sides.positive, sides.negative)
    return Made(replace(vector, model=model), apart(vector, sides))


def apart(vector: Vector, sides: Sides) -> tuple[float, ...]:
    rows = vector.rows.items()
    return tuple(
        told_apart(row_D, sides.positive[point], sides.negative[point]) for point, row_D in rows
    )


def _saved(wish: Wish, vector: Vector) -> str:
    told = wish.told(vector)
    save(told, wish.out)
    points = ", ".join(map(str, told.points))
    return f"{wish.out}: {told.name} at {points}, scale {told.scale:g}"
