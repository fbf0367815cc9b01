"""Takes the command line of `clairai capture run`; gives rows of prompts, and how far it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clairai.batch.command import Progress

INTERRUPTED: Final = 130  # as a shell says it of SIGINT

Model = Annotated[str, typer.Argument(metavar="MODEL", help="What `vllm serve` would take.")]
Prompts = Annotated[
    Path, typer.Option(metavar="FILE", help="A prompt a line; .jsonl: an object a line.")
]
To = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the rows go; made if not there.")]
Points = Annotated[
    list[str], typer.Option(metavar="POINT", help='Where rows are taken, such as "post_block.*".')
]
Encoder = Annotated[
    str, typer.Option(metavar="NAME|JSON", help='Such as full8, or {"name": "rp8", "k": 256}.')
]
Positions = Annotated[
    str, typer.Option(metavar="NAME|JSON", help="all, prompt, generated, last_prompt, or JSON.")
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Tokens of an answer, at most.")]
BatchMib = Annotated[int, typer.Option(metavar="N", help="MiB of rows that are one commit.")]
Engine = Annotated[str, typer.Option(metavar="JSON", help="More arguments for vLLM's LLM.")]


def run(
    model: Model,
    prompts: Prompts,
    points: Points,
    to: To = Path("captures"),
    encoder: Encoder = "raw",
    positions: Positions = "all",
    max_tokens: MaxTokens = 1,
    batch_mib: BatchMib = 256,
    engine: Engine = "{}",
) -> None:
    """Forward many prompts and keep their rows; the same command goes on where it was stopped.

    Needs vLLM. Prompts are done in batches, each of which is there whole or not at all.
    """
    from clairai.batch.command import carried_out, job

    asked = job(
        model,
        prompts=prompts,
        folder=to,
        points=points,
        positions=positions,
        encoder=encoder,
        max_tokens=max_tokens,
        batch_mib=batch_mib,
        engine=engine,
    )
    try:
        typer.echo(_shown(carried_out(asked)) + f" in {to}")
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last commit", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _shown(steps: Iterable[Progress]) -> str:
    """A bar on a terminal, else lines; what was done, in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    done = before = 0
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task, started_s = bar.add_task("prompts", total=None), time.monotonic()
        for step in steps:
            if not step.done:
                started_s = time.monotonic()  # an engine's start says nothing of the rest
            bar.update(task, total=step.total, completed=step.done)
            if not console.is_terminal:
                typer.echo(_line(step, time.monotonic() - started_s), err=True)
            done, before = step.done, step.before
    more = f", {before} were done before" if before else ""
    return f"{done} prompts done{more}"


def _line(step: Progress, elapsed_s: float) -> str:
    if not step.tokens:
        return f"{step.total} prompts, {step.total_tokens} tokens at most"
    left_s = elapsed_s * (step.total_tokens - step.tokens) / step.tokens
    return f"{step.done} of {step.total} prompts, {elapsed_s:.0f} s, about {left_s:.0f} s left"
