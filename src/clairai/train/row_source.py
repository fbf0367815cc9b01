"""Read residual rows from an engine: forwarded by vLLM, read through taps, ring and bank.

A probe that is a unit vector scores one number of a row, so a bank of them gives the row itself.
Where a row is wider than the bank, its columns are read in several passes.

N = tokens of one prompt, D = model width, K = unit vectors in the bank for one point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clairai.compat import offline_llm
from clairai.library.probe_bank import ProbeBank
from clairai.library.scores import scores as read_scores
from clairai.points import Point
from clairai.probe.bank import MAX_PROBES
from clairai.probe.model import Probe

MAX_CAPACITY: Final = 1024  # of settings.capacity
BATCH_TOKENS: Final = 4096

Prompt = Sequence[int]


class BatchRows(NamedTuple):
    """Some columns of the rows of consecutive prompts."""

    first: int  # the index of the first prompt
    columns: slice
    rows: dict[Point, list[NDArray[np.float32]]]  # [N, K] for each prompt


@dataclass(frozen=True)
class RowSource:
    """A running engine, tapped at every point whose rows are wanted."""

    llm: Any
    points: tuple[Point, ...]
    width: int
    max_len: int

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    @property
    def capacity(self) -> int:
        return min(self.width, MAX_CAPACITY)

    def point_groups(self) -> list[tuple[Point, ...]]:
        """The points, in groups as large as a bank has room for."""
        size = MAX_PROBES // self.capacity
        return [self.points[at : at + size] for at in range(0, len(self.points), size)]

    def num_batches(self, prompts: Sequence[Prompt]) -> int:
        """How many batches `read` yields."""
        num_passes = -(-self.width // self.capacity)
        return num_passes * sum(1 for _ in prompt_batches(prompts))

    def read(self, prompts: Sequence[Prompt], points: Sequence[Point]) -> Iterator[BatchRows]:
        """Yield every column of every row at a group of points, batch by batch."""
        bank = ProbeBank(self.llm)
        for start in range(0, self.width, self.capacity):
            columns = range(start, min(start + self.capacity, self.width))
            bank.add(
                *(unit_probe(point, index, self.width) for point in points for index in columns)
            )
            first = 0
            for batch in prompt_batches(prompts):
                rows = self._forward(batch, points, columns)
                yield BatchRows(first, slice(columns.start, columns.stop), rows)
                first += len(batch)
            bank.remove(*(info.name for info in bank.list()))

    def _forward(
        self, prompts: Sequence[Prompt], points: Sequence[Point], columns: range
    ) -> dict[Point, list[NDArray[np.float32]]]:
        outputs = offline_llm.forward_prompts(self.llm, prompts)
        scores = [choices[0] for choices in read_scores(self.llm, outputs)]
        index_of = {name: index for index, name in enumerate(scores[0].names)}
        order = {point: [index_of[unit_name(point, c)] for c in columns] for point in points}
        return {point: [one.prompt[:, order[point]] for one in scores] for point in points}


def unit_probe(point: Point, index: int, width: int) -> Probe:
    direction_D = np.zeros(width, np.float32)
    direction_D[index] = 1
    return Probe(unit_name(point, index), point, direction_D)


def unit_name(point: Point, index: int) -> str:
    return f"{point}:{index}"


def prompt_batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Yield the prompts in order, in batches of one prompt or at most BATCH_TOKENS tokens."""
    batch: list[Prompt] = []
    num_tokens = 0
    for prompt in prompts:
        if batch and num_tokens + len(prompt) > BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(prompt)
        num_tokens += len(prompt)
    if batch:
        yield batch
