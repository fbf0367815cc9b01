"""Takes prompts and an engine; gives their rows to a folder, batch by batch, from where it was.

A batch is what one commit holds: after it, all of its prompts are done, or none is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from clairai.batch.prompts import Prompt
from clairai.errors import ConfigError

MAX_BATCH: Final = 4096  # prompts


class Engine(Protocol):
    """A running engine that captures into the folder."""

    @property
    def batch_nbytes(self) -> int:
        """Of the rows of a batch, at most."""

    @property
    def nbytes_per_token(self) -> int:
        """Of all rows of a token, at most."""

    @property
    def max_len(self) -> int:
        """Tokens of a prompt and its answer."""

    def num_tokens(self, prompt: Prompt) -> int: ...

    def forward(self, prompts: Sequence[Prompt], tags: Sequence[dict[str, Any]]) -> None:
        """Returns when all of their rows are committed, in one commit; raises if any is lost."""


@dataclass(frozen=True)
class Step:
    """How far it is. Tokens are those of prompts, and of answers as long as they may be."""

    prompts: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """What is to be forwarded, in batches."""

    batches: tuple[tuple[Prompt, ...], ...]
    tokens: tuple[int, ...]  # of each batch

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.batches))


def plan(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> Plan:
    """ConfigError for the first prompt that is too long: before anything is forwarded."""
    batches: list[list[Prompt]] = []
    tokens: list[int] = []
    room = 0
    for prompt in prompts:
        length = _length(engine, prompt, max_tokens)
        nbytes = length * engine.nbytes_per_token
        if nbytes > room or len(batches[-1]) >= MAX_BATCH:
            batches.append([])
            tokens.append(0)
            room = engine.batch_nbytes
        batches[-1].append(prompt)
        tokens[-1] += length
        room -= nbytes
    return Plan(tuple(map(tuple, batches)), tuple(tokens))


def _length(engine: Engine, prompt: Prompt, max_tokens: int) -> int:
    num_tokens = engine.num_tokens(prompt)
    length = num_tokens + max_tokens
    if num_tokens < 1 or length > engine.max_len:
        raise ConfigError(
            f"line {prompt.number} has {num_tokens} tokens and its answer may have {max_tokens}; "
            f"give 1 to {engine.max_len} in all, or raise max_model_len with --engine"
        )
    nbytes = length * engine.nbytes_per_token
    if nbytes > engine.batch_nbytes:
        raise ConfigError(
            f"line {prompt.number} gives {nbytes >> 20} MiB of rows, and a batch holds "
            f"{engine.batch_nbytes >> 20}; raise --batch-mib, or name fewer points"
        )
    return length


def run(engine: Engine, planned: Plan, tags: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Step]:
    """How far it is, after each commit."""
    prompts = tokens = 0
    for batch, length, said in zip(planned.batches, planned.tokens, tags, strict=True):
        engine.forward(batch, said)
        prompts, tokens = prompts + len(batch), tokens + length
        yield Step(prompts, tokens)
