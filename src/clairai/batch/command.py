"""Takes what `clairai capture run` was asked; gives how far it is, after each commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clairai.batch.done import Run, left
from clairai.batch.engine import Wish, capturing, prepared
from clairai.batch.prompts import read_prompts
from clairai.batch.run import Step, plan, run
from clairai.capture.positions import Positions, parse_positions, written
from clairai.capture.spec import parse_encoder
from clairai.errors import ConfigError, RequestError
from clairai.points import expand, quote
from clairai.train.engine import short_name

MAX_TOKENS: Final = 1 << 20
MAX_BATCH_MIB: Final = 1 << 16


@dataclass(frozen=True)
class Job:
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
class Progress:
    """Of this run; `before` are prompts that were done by an earlier one."""

    done: int
    total: int
    before: int
    tokens: int
    total_tokens: int


def job(
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
) -> Job:
    """ConfigError for an option that is wrong; those that may be JSON are, if they look so."""
    if not points:
        raise ConfigError('no points are named; give --points, such as --points "post_block.*"')
    where, chosen = _selected(positions, encoder)
    return Job(
        model,
        prompts,
        folder.absolute(),
        tuple(points),
        where,
        chosen,
        _within("--max-tokens", max_tokens, MAX_TOKENS),
        _within("--batch-mib", batch_mib, MAX_BATCH_MIB),
        _arguments(engine),
    )


def _selected(positions: str, encoder: str) -> tuple[Positions, Mapping[str, Any]]:
    try:
        where = parse_positions(_json("--positions", positions), what="--positions")
        chosen = parse_encoder(_json("--encoder", encoder), what="--encoder")
    except RequestError as error:
        raise ConfigError(error.reason) from None
    return where, chosen.written()


def _within(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}; give 1 to {most}")
    return value


def _arguments(engine: str) -> Mapping[str, Any]:
    found = _json("--engine", engine)
    if not isinstance(found, dict):
        raise ConfigError(f"--engine is {quote(engine)}; give a JSON object")
    return found


def _json(name: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{name} is {quote(text)}; that is no JSON") from None


def carried_out(asked: Job) -> Iterator[Progress]:
    """Before the first batch, and after each commit; nothing if there is nothing to do."""
    prompts = read_prompts(asked.prompts)
    about = prepared(asked.model, asked.arguments)
    points = expand(asked.points, about.num_layers)
    made = Run(
        short_name(asked.model),
        tuple(map(str, points)),
        json.dumps(written(asked.positions)),
        json.dumps(dict(asked.encoder), sort_keys=True),
        asked.max_tokens,
    )
    wanted = left(asked.folder, prompts, made)
    if not wanted:
        yield Progress(0, 0, len(prompts), 0, 0)
        return
    tags = {prompt.number: made.tags(prompt) for prompt in wanted}
    wish = Wish(points, asked.positions, asked.encoder, asked.max_tokens, asked.batch_mib)
    with capturing(asked.model, asked.folder, wish, asked.arguments) as engine:
        planned = plan(engine, wanted, asked.max_tokens)
        said = [[tags[prompt.number] for prompt in batch] for batch in planned.batches]
        total, before = planned.num_prompts, len(prompts) - len(wanted)
        yield Progress(0, total, before, 0, sum(planned.tokens))
        for step in run(engine, planned, said):
            yield _progress(step, total, before, sum(planned.tokens))


def _progress(step: Step, total: int, before: int, total_tokens: int) -> Progress:
    return Progress(step.prompts, total, before, step.tokens, total_tokens)
