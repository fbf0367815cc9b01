"""Takes encoded documents and a tapped engine; gives the rows of every token with a label.

T = tokens that are kept, D = model width
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clairai.demo.console import shown
from clairai.errors import ConfigError
from clairai.points import Point
from clairai.train.fit import Labels
from clairai.train.rows import Source, batches
from clairai.train.tokens import UNSAID, Encoded

# Enough that the start of every chat counts in the fit, too few that it weighs more than texts.
MAX_ALIKE: Final = 16


@dataclass(frozen=True, eq=False)
class Kept:
    """Which tokens of each document are kept: the same for all that is trained on them."""

    prompts: tuple[tuple[int, ...], ...]
    positions: tuple[NDArray[np.int64], ...]
    folds: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.positions))


def keep(encodings: Sequence[Sequence[Encoded]], folds: Sequence[int]) -> Kept:
    """Tokens that any of the encodings labels.

    Documents that begin alike have the same rows there: of each fold a few are kept.
    """
    seen: Counter[int] = Counter()
    positions = []
    for fold, *labelled in zip(folds, *encodings, strict=True):
        ids = labelled[0].ids
        assert all(other.ids == ids for other in labelled), "one text, labelled twice over"
        is_said = np.any([encoded.labels_T != UNSAID for encoded in labelled], axis=0)
        beginning = hash(fold)
        for position, token in enumerate(ids):
            beginning = hash((beginning, token))
            is_said[position] &= seen[beginning] < MAX_ALIKE
            seen[beginning] += 1
        positions.append(np.flatnonzero(is_said))
    return Kept(tuple(encoded.ids for encoded in encodings[0]), tuple(positions), tuple(folds))


def labels(kept: Kept, encoded: Sequence[Encoded]) -> Labels:
    """What one set of encodings says of the kept tokens."""
    pairs = list(zip(encoded, kept.positions, strict=True))
    said_T = np.concatenate([part.labels_T[at] for part, at in pairs])
    settled_T = np.concatenate([part.settled_T[at] for part, at in pairs])
    framing_T = np.concatenate([part.framing_T[at] for part, at in pairs])
    counts = [len(at) for at in kept.positions]
    return Labels(
        positive_T=said_T == 1,
        said_T=said_T != UNSAID,
        settled_T=settled_T,
        framing_T=framing_T,
        folds_T=np.repeat(np.array(kept.folds, np.int64), counts),
        documents_T=np.repeat(np.arange(len(counts)), counts),
    )


def hidden(
    source: Source, kept: Kept, points: Sequence[Point], label: str
) -> dict[Point, NDArray[np.float32]]:
    """The kept rows at each of the points."""
    rows = {point: np.empty((kept.num_tokens, source.width), np.float32) for point in points}
    sizes = [len(batch) for batch in batches(kept.prompts)]
    steps = source.read(kept.prompts, points)
    row = document = column = 0
    for step in shown(steps, total=len(sizes) * source.passes(), label=label):
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


def check_memory(kept: Kept, width: int, num_arrays: int, available: int) -> None:
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
