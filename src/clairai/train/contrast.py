"""Takes contrasting documents and a tapped engine; gives one row for each document, at each point.

N = documents of one side, D = model width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clairai.demo.console import shown
from clairai.points import Point
from clairai.train.documents import Document
from clairai.train.rows import Source, batches
from clairai.train.tokens import Encoded, check_lengths, check_tokenizer, encode

Tokens = Literal["all", "last"]
Rows = dict[Point, NDArray[np.float64]]


@dataclass(frozen=True)
class Sides:
    """What the two sides read, [N, D] at each point."""

    positive: Rows
    negative: Rows


def read_sides(
    source: Source, positive: Sequence[Document], negative: Sequence[Document], tokens: Tokens
) -> Sides:
    """Both sides are forwarded together: each point is read once."""
    check_tokenizer(source.tokenizer)
    encoded = [encode(document, source.tokenizer) for document in (*positive, *negative)]
    check_lengths(encoded, source.max_len)
    chosen = [_chosen(one, tokens) for one in encoded]
    rows: Rows = {}
    for points in source.groups():
        rows |= _read(source, [one.ids for one in encoded], chosen, points)
    at = len(positive)
    return Sides(
        {point: rows_ND[:at] for point, rows_ND in rows.items()},
        {point: rows_ND[at:] for point, rows_ND in rows.items()},
    )


def _chosen(encoded: Encoded, tokens: Tokens) -> NDArray[np.int64]:
    """The tokens of what is said, without the first few, which do not tell yet what it will be."""
    is_said_T = encoded.labels_T == 1
    said = np.flatnonzero(is_said_T)
    if tokens == "last":
        return said[-1:]
    settled = np.flatnonzero(is_said_T & encoded.settled_T)
    return settled if len(settled) else said


def _read(
    source: Source,
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[NDArray[np.int64]],
    points: Sequence[Point],
) -> Rows:
    """The mean of each document's chosen rows; the rows themselves are let go."""
    rows = {point: np.empty((len(prompts), source.width), np.float64) for point in points}
    places = _places(prompts, source.passes())
    label = f"rows at {', '.join(map(str, points))}"
    steps = shown(source.read(prompts, points), total=len(places), label=label)
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


def _places(prompts: Sequence[Sequence[int]], num_passes: int) -> list[tuple[int, bool]]:
    """Of each step of the reading: its first document, and whether it ends a pass."""
    firsts = list(_firsts(prompts))
    return [(first, first == firsts[-1]) for _ in range(num_passes) for first in firsts]


def _firsts(prompts: Sequence[Sequence[int]]) -> Iterator[int]:
    first = 0
    for batch in batches(prompts):
        yield first
        first += len(batch)
