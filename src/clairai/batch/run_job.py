"""`clairai capture run`: forwards a file of prompts and captures their rows into a folder.

Prompts go batch by batch. A batch is one commit: afterwards all of its prompts are done, or none.
A run that was stopped continues where it was.

Runs in: the process of the command, with an engine of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from clairai.batch.capture_engine import BatchCapture, describe_model, start_engine
from clairai.batch.prompts import Prompt, read_prompts
from clairai.batch.resume import RunIdentity, find_unfinished
from clairai.errors import ConfigError, RequestError, quote
from clairai.fields.capture import parse_encoder
from clairai.fields.positions import Positions, parse_positions, positions_to_json
from clairai.points import Point, expand
from clairai.store.remote_disk import is_address
from clairai.train.start_engine import model_name

MAX_BATCH_PROMPTS: Final = 4096
MAX_TOKENS: Final = 1 << 20
MAX_BATCH_MIB: Final = 1 << 16


@dataclass(frozen=True)
class CaptureJob:
    """The options of the command, checked as far as possible without the model."""

    model: str
    prompts: Path
    folder: str  # a path from the root on, or an address
    points: tuple[str, ...]
    positions: Positions
    encoder: Mapping[str, Any]
    max_tokens: int
    batch_mib: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class JobProgress:
    """Prompts and tokens of this run, answers counted at their full length.

    `before` are prompts that an earlier run has done. `total_tokens` is 0 where nobody knows.
    """

    done: int
    total: int
    before: int
    tokens: int
    total_tokens: int


def parse_job(
    model: str,
    *,
    prompts: Path,
    folder: str,
    points: Sequence[str],
    positions: str,
    encoder: str,
    max_tokens: int,
    batch_mib: int,
    engine: str,
) -> CaptureJob:
    """ConfigError for a wrong option. An option that can be JSON is JSON if it starts like it."""
    if not points:
        raise ConfigError('no points are named; give --points, such as --points "post_block.*"')
    parsed_positions, parsed_encoder = _parse_selection(positions, encoder)
    return CaptureJob(
        model,
        prompts,
        folder if is_address(folder) else str(Path(folder).absolute()),
        tuple(points),
        parsed_positions,
        parsed_encoder,
        _check_bound("--max-tokens", max_tokens, MAX_TOKENS),
        _check_bound("--batch-mib", batch_mib, MAX_BATCH_MIB),
        _parse_engine_arguments(engine),
    )


def _parse_selection(positions: str, encoder: str) -> tuple[Positions, Mapping[str, Any]]:
    try:
        return (
            parse_positions(_parse_json("--positions", positions), what="--positions"),
            parse_encoder(_parse_json("--encoder", encoder), what="--encoder").to_json(),
        )
    except RequestError as error:
        raise ConfigError(error.reason) from None


def _check_bound(name: str, value: int, limit: int) -> int:
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} is {value}; give 1 to {limit}")
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


class BatchEngine(Protocol):
    """A running engine that captures into the folder."""

    @property
    def batch_nbytes(self) -> int:
        """Upper bound of the rows of a batch."""

    @property
    def nbytes_per_token(self) -> int:
        """Upper bound of the rows of a token."""

    @property
    def max_len(self) -> int:
        """Tokens of a prompt and its answer."""

    def num_tokens(self, prompt: Prompt) -> int: ...

    def forward(self, prompts: Sequence[Prompt], tags: Sequence[dict[str, Any]]) -> None:
        """Returns when all of their rows are committed, in one commit; raises if any is lost."""


@dataclass
class Batch:
    """Prompts that are forwarded and committed together."""

    prompts: list[Prompt] = field(default_factory=list)
    num_tokens: int = 0


def plan_batches(engine: BatchEngine, prompts: Sequence[Prompt], max_tokens: int) -> list[Batch]:
    """ConfigError for the first prompt that is too long, before anything is forwarded."""
    batches: list[Batch] = []
    room = 0
    for prompt in prompts:
        length = _check_length(engine, prompt, max_tokens)
        nbytes = length * engine.nbytes_per_token
        if nbytes > room or len(batches[-1].prompts) >= MAX_BATCH_PROMPTS:
            batches.append(Batch())
            room = engine.batch_nbytes
        batches[-1].prompts.append(prompt)
        batches[-1].num_tokens += length
        room -= nbytes
    return batches


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


def run_job(job: CaptureJob) -> Iterator[JobProgress]:
    """Progress before the first batch and after each commit."""
    if is_address(job.folder):
        raise ConfigError(
            f"{quote(job.folder, 200)} is an address, and one engine captures into a folder; add "
            "--ray, or give a folder and use `clairai capture send`"
        )
    prompts = read_prompts(job.prompts)
    points, identity = identify_run(job)
    folder = Path(job.folder)
    unfinished = find_unfinished(folder, prompts, identity)
    if not unfinished:
        yield JobProgress(0, 0, len(prompts), 0, 0)
        return
    for prompt in unfinished:
        identity.tags(prompt)  # refuses tags that are too long, before the engine starts
    capture = BatchCapture(points, job.positions, job.encoder, job.max_tokens, job.batch_mib)
    with start_engine(job.model, folder, capture, job.arguments) as engine:
        batches = plan_batches(engine, unfinished, job.max_tokens)
        for done, tokens in run_batches(engine, batches, identity):
            yield JobProgress(
                done,
                len(unfinished),
                len(prompts) - len(unfinished),
                tokens,
                sum(batch.num_tokens for batch in batches),
            )


def identify_run(job: CaptureJob) -> tuple[tuple[Point, ...], RunIdentity]:
    """The points, which depend on the model, and what determines the rows."""
    points = expand(job.points, describe_model(job.model, job.arguments).num_layers)
    return points, RunIdentity(
        model_name(job.model),
        tuple(map(str, points)),
        json.dumps(positions_to_json(job.positions)),
        json.dumps(dict(job.encoder), sort_keys=True),
        job.max_tokens,
    )


def run_batches(
    engine: BatchEngine, batches: Sequence[Batch], identity: RunIdentity
) -> Iterator[tuple[int, int]]:
    """Prompts and tokens done: before the first batch and after each commit."""
    prompts = tokens = 0
    yield prompts, tokens
    for batch in batches:
        engine.forward(batch.prompts, [identity.tags(prompt) for prompt in batch.prompts])
        prompts, tokens = prompts + len(batch.prompts), tokens + batch.num_tokens
        yield prompts, tokens
