"""Takes token ids; gives residual rows, forwarded by vLLM and read through taps, ring and bank.

A probe that is a unit vector scores one number of a row, so a bank of them gives the row itself.
Where a row is wider than the bank, its parts are read one after the other.

N = tokens of one prompt, D = model width, K = unit vectors in the bank for one point
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clairai.compat import offline_llm as engine
from clairai.library.probe_bank import ProbeBank
from clairai.library.scores import scores as read_scores
from clairai.points import Point
from clairai.probe.bank import MAX_PROBES
from clairai.probe.model import Probe

MAX_CAPACITY: Final = 1024  # of settings.capacity
BATCH_TOKENS: Final = 4096

Prompt = Sequence[int]


@dataclass(frozen=True)
class RowSource:
    """A running engine, tapped at every point that rows are wanted of."""

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

    def groups(self) -> list[tuple[Point, ...]]:
        """As many points at once as a bank has room for."""
        size = MAX_PROBES // self.capacity
        return [self.points[at : at + size] for at in range(0, len(self.points), size)]

    def passes(self) -> int:
        """How often every prompt is forwarded to read one group."""
        return -(-self.width // self.capacity)

    def read(
        self, prompts: Sequence[Prompt], points: Sequence[Point]
    ) -> Iterator[dict[Point, list[NDArray[np.float32]]]]:
        """For each pass and batch: at each point, of each prompt of the batch, [N, K]."""
        bank = ProbeBank(self.llm)
        for first in range(0, self.width, self.capacity):
            part = range(first, min(first + self.capacity, self.width))
            bank.add(*(unit_probe(point, index, self.width) for point in points for index in part))
            for batch in prompt_batches(prompts):
                yield self._forward(batch, points, part)
            bank.remove(*(info.name for info in bank.list()))

    def _forward(
        self, prompts: Sequence[Prompt], points: Sequence[Point], part: range
    ) -> dict[Point, list[NDArray[np.float32]]]:
        outputs = engine.forward_prompts(self.llm, prompts)
        found = [answers[0] for answers in read_scores(self.llm, outputs)]
        at = {name: column for column, name in enumerate(found[0].names)}
        columns = {point: [at[unit_name(point, index)] for index in part] for point in points}
        return {point: [scores.prompt[:, columns[point]] for scores in found] for point in points}


def unit_probe(point: Point, index: int, width: int) -> Probe:
    direction_D = np.zeros(width, np.float32)
    direction_D[index] = 1
    return Probe(unit_name(point, index), point, direction_D)


def unit_name(point: Point, index: int) -> str:
    return f"{point}:{index}"


def prompt_batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """In order, each of at most BATCH_TOKENS tokens or of one prompt."""
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
