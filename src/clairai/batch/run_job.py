"""Takes prompts and an engine; gives their rows to a folder, batch by batch, from where it was.

A batch is what one commit holds: after it, all of its prompts are done, or none is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from clairai.batch.capture_engine import BatchCapture, describe_model, start_engine
from clairai.batch.prompts import Prompt, read_prompts
from clairai.batch.resume import RunIdentity, find_unfinished
from clairai.errors import ConfigError, RequestError
from clairai.fields.capture import parse_encoder
from clairai.fields.positions import Positions, parse_positions, positions_to_json
from clairai.points import expand, quote
from clairai.train.start_engine import model_name

MAX_BATCH_PROMPTS: Final = 4096  # prompts


class BatchEngine(Protocol):
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
class BatchesDone:
    """How far it is. Tokens are those of prompts, and of answers as long as they may be."""

    prompts: int
    tokens: int


@dataclass(frozen=True)
class BatchPlan:
    """What is to be forwarded, in batches."""

    batches: tuple[tuple[Prompt, ...], ...]
    tokens: tuple[int, ...]  # of each batch

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.batches))


def plan_batches(engine: BatchEngine, prompts: Sequence[Prompt], max_tokens: int) -> BatchPlan:
    """ConfigError for the first prompt that is too long: before anything is forwarded."""
    batches: list[list[Prompt]] = []
    tokens: list[int] = []
    room = 0
    for prompt in prompts:
        length = _check_length(engine, prompt, max_tokens)
        nbytes = length * engine.nbytes_per_token
        if nbytes > room or len(batches[-1]) >= MAX_BATCH_PROMPTS:
            batches.append([])
            tokens.append(0)
            room = engine.batch_nbytes
        batches[-1].append(prompt)
        tokens[-1] += length
        room -= nbytes
    return BatchPlan(tuple(map(tuple, batches)), tuple(tokens))


def _check_length(engine: BatchEngine, prompt: Prompt, max_tokens: int) -> int:
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


def run_batches(
    engine: BatchEngine, planned: BatchPlan, tags: Sequence[Sequence[dict[str, Any]]]
) -> Iterator[BatchesDone]:
    """How far it is, after each commit."""
    prompts = tokens = 0
    for batch, length, said in zip(planned.batches, planned.tokens, tags, strict=True):
        engine.forward(batch, said)
        prompts, tokens = prompts + len(batch), tokens + length
        yield BatchesDone(prompts, tokens)


# MERGED
# Takes what `clairai capture run` was asked; gives how far it is, after each commit.


MAX_TOKENS: Final = 1 << 20
MAX_BATCH_MIB: Final = 1 << 16


@dataclass(frozen=True)
class CaptureJob:
    """The command line, checked as far as it can be without the model."""

    model: str
    prompts: Path
    folder: Path
    points: tuple[str, ...]
    positions: Positions
    encoder: Mapping[str, Any]
    max_tokens: int
    batch_mib: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class JobProgress:
    """Of this run; `before` are prompts that were done by an earlier one."""

    done: int
    total: int
    before: int
    tokens: int
    total_tokens: int


def parse_job(
    model: str,
    *,
    prompts: Path,
    folder: Path,
    points: Sequence[str],
    positions: str,
    encoder: str,
    max_tokens: int,
    batch_mib: int,
    engine: str,
) -> CaptureJob:
    """ConfigError for an option that is wrong; those that may be JSON are, if they look so."""
    if not points:
        raise ConfigError('no points are named; give --points, such as --points "post_block.*"')
    where, chosen = _parse_selection(positions, encoder)
    return CaptureJob(
        model,
        prompts,
        folder.absolute(),
        tuple(points),
        where,
        chosen,
        _check_bound("--max-tokens", max_tokens, MAX_TOKENS),
        _check_bound("--batch-mib", batch_mib, MAX_BATCH_MIB),
        _parse_engine_arguments(engine),
    )


def _parse_selection(positions: str, encoder: str) -> tuple[Positions, Mapping[str, Any]]:
    try:
        where = parse_positions(_parse_json("--positions", positions), what="--positions")
        chosen = parse_encoder(_parse_json("--encoder", encoder), what="--encoder")
    except RequestError as error:
        raise ConfigError(error.reason) from None
    return where, chosen.written()


def _check_bound(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}; give 1 to {most}")
    return value


def _parse_engine_arguments(engine: str) -> Mapping[str, Any]:
    found = _parse_json("--engine", engine)
    if not isinstance(found, dict):
        raise ConfigError(f"--engine is {quote(engine)}; give a JSON object")
    return found


def _parse_json(name: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{name} is {quote(text)}; that is no JSON") from None


def run_job(asked: CaptureJob) -> Iterator[JobProgress]:
    """Before the first batch, and after each commit; nothing if there is nothing to do."""
    prompts = read_prompts(asked.prompts)
    about = describe_model(asked.model, asked.arguments)
    points = expand(asked.points, about.num_layers)
    made = RunIdentity(
        model_name(asked.model),
        tuple(map(str, points)),
        json.dumps(positions_to_json(asked.positions)),
        json.dumps(dict(asked.encoder), sort_keys=True),
        asked.max_tokens,
    )
    wanted = find_unfinished(asked.folder, prompts, made)
    if not wanted:
        yield JobProgress(0, 0, len(prompts), 0, 0)
        return
    tags = {prompt.number: made.tags(prompt) for prompt in wanted}
    wish = BatchCapture(points, asked.positions, asked.encoder, asked.max_tokens, asked.batch_mib)
    with start_engine(asked.model, asked.folder, wish, asked.arguments) as engine:
        planned = plan_batches(engine, wanted, asked.max_tokens)
        said = [[tags[prompt.number] for prompt in batch] for batch in planned.batches]
        total, before = planned.num_prompts, len(prompts) - len(wanted)
        yield JobProgress(0, total, before, 0, sum(planned.tokens))
        for step in run_batches(engine, planned, said):
            yield _job_progress(step, total, before, sum(planned.tokens))


def _job_progress(step: BatchesDone, total: int, before: int, total_tokens: int) -> JobProgress:
    return JobProgress(step.prompts, total, before, step.tokens, total_tokens)
