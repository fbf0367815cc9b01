"""Takes the command line of `clairai capture run`; gives rows of prompts, and how far it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clairai.batch.run_job import JobProgress


from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from clairai.cli.output import progress

if TYPE_CHECKING:
    from clairai.store.read import Store


import json
from typing import TYPE_CHECKING

from clairai.cli.probes import print_table

if TYPE_CHECKING:
    from clairai.store.read import Store, StoredRequest


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
    from clairai.batch.run_job import parse_job, run_job

    asked = parse_job(
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
        typer.echo(_show_progress(run_job(asked)) + f" in {to}")
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last commit", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _show_progress(steps: Iterable[JobProgress]) -> str:
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
                typer.echo(_progress_line(step, time.monotonic() - started_s), err=True)
            done, before = step.done, step.before
    more = f", {before} were done before" if before else ""
    return f"{done} prompts done{more}"


def _progress_line(step: JobProgress, elapsed_s: float) -> str:
    if not step.tokens:
        return f"{step.total} prompts, {step.total_tokens} tokens at most"
    left_s = elapsed_s * (step.total_tokens - step.tokens) / step.tokens
    return f"{step.done} of {step.total} prompts, {elapsed_s:.0f} s, about {left_s:.0f} s left"


# MERGED
# Takes the command line of `clairai capture export`; gives captured rows to others.


export = typer.Typer(help="Captured rows as files of other kinds.", no_args_is_help=True)

ExportFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of captures.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for what is made.")]


@export.command()
def npz(folder: ExportFolder, out: Out) -> None:
    """Write an .npz for each request, choice and point: decoded rows, positions, tokens."""
    from clairai.store.export_rows import export_files, export_npz
    from clairai.store.read import open as open_store

    store = open_store(folder)
    wanted = export_files(store)
    written = list(progress(export_npz(store, wanted, out), len(wanted), "exporting"))
    typer.echo(f"{len(written)} files in {out}")


@export.command()
def datasets(folder: ExportFolder, out: Out) -> None:
    """Write Hugging Face datasets, OUT/rows and OUT/requests. Needs `clairai[datasets]`."""
    from clairai.store.export_rows import export_datasets

    _export_table(export_datasets, folder, out)


@export.command()
def lance(folder: ExportFolder, out: Out) -> None:
    """Write Lance datasets, OUT/rows.lance and OUT/requests.lance. Needs `clairai[lance]`."""
    from clairai.store.export_rows import export_lance

    _export_table(export_lance, folder, out)


@export.command()
def zarr(folder: ExportFolder, out: Out) -> None:
    """Write a Zarr group with one array for each column. Needs `clairai[zarr]`."""
    from clairai.store.export_rows import export_zarr

    _export_table(export_zarr, folder, out)


def _export_table(made: Callable[[Store, Path], Iterator[int]], folder: Path, out: Path) -> None:
    from clairai.store.export_rows import num_batches, outline_store
    from clairai.store.read import open as open_store

    store = open_store(folder)
    total = num_batches(outline_store(store))
    num_rows = sum(progress(made(store, out), total, "exporting"))
    typer.echo(f"{num_rows} rows in {out}")


# MERGED
# Takes the `clairai capture` command line; gives what is in a folder of captures, in words.


capture = typer.Typer(help="Captured rows on disk.", no_args_is_help=True)
capture.add_typer(export, name="export")
capture.command()(run)

_TITLES: Final = ("stream", "rows", "choices", "positions", "points", "encoder", "model", "tags")
_MAX_TAGS: Final = 60

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of captures.")]


@capture.command("ls", hidden=True)
@capture.command("list")
def list_(folder: Folder) -> None:
    """List the requests, one line each."""
    from clairai.store.read import open as open_store

    store = open_store(folder)
    print_table(_TITLES, map(_row, store.requests()))
    entries = store.shards
    typer.echo(
        f"{sum(entry.rows for entry in entries)} rows in {len(entries)} shards, "
        f"{sum(entry.nbytes for entry in entries)} bytes"
    )


@capture.command()
def show(
    folder: Folder,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="As `ls` prints it.")],
) -> None:
    """Print everything that is stored of one request."""
    from clairai.store.read import open as open_store

    store = open_store(folder)
    request = store.request(_parse_stream(stream))
    said = dict(zip(_TITLES[:-1], _row(request)[:-1], strict=True)) | {
        "points": ", ".join(request.points),
        "weights": ", ".join(sorted({origin.weights for origin in request.origins})),
        "dtype": ", ".join(sorted({origin.dtype for origin in request.origins})),
        "parameters": ", ".join(sorted({origin.parameters for origin in request.origins})),
        "tags": json.dumps(request.tags),
        "steering": json.dumps(request.steering),
        "fidelity": json.dumps(_fidelity(store, request)),
    }
    for title, value in said.items():
        typer.echo(f"{title:<12}{value}")
    for name in request.shards:
        typer.echo(f"{'shard':<12}{name}")


@capture.command()
def verify(folder: Folder) -> None:
    """Read every byte and compare it with what was committed.

    The exit code is 1 if any differs.
    """
    from clairai.store import recover as checks
    from clairai.store.disk import LocalDisk
    from clairai.store.shard_manifest import parse_manifest

    disk = LocalDisk(folder)
    names = disk.names()
    num_files = len(parse_manifest(disk.read("manifest")).entries) + 1 if "manifest" in names else 1
    checked = list(progress(checks.verify(disk), num_files, "verifying"))
    faults = [one for one in checked if one.fault]
    for one in faults:
        typer.echo(f"bad   {one.name}: {one.fault}", err=True)
    for name in checks.uncommitted_shards(disk):
        typer.echo(f"note  {name} is in no line of the manifest, and is not shown", err=True)
    typer.echo(
        f"{len(checked) - len(faults)} of {len(checked)} files are good, "
        f"{sum(one.rows for one in checked if not one.fault)} rows, "
        f"{sum(one.nbytes for one in checked)} bytes"
    )
    if faults:
        raise typer.Exit(1)


@capture.command()
def index(folder: Folder) -> None:
    """Write an index of all requests for queries: Parquet with pyarrow, else JSON."""
    from clairai.store.disk import claim_folder
    from clairai.store.read import open as open_store
    from clairai.store.write_index import write_index

    store = open_store(folder)
    with claim_folder(folder) as disk:
        typer.echo(str(folder / write_index(store, disk)))


@capture.command()
def send(
    folder: Folder,
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as s3://bucket/captures.")],
) -> None:
    """Send what was committed, and not sent before, to an address. Needs `clairai[fsspec]`."""
    from clairai.store.disk import claim_folder
    from clairai.store.read import open as open_store
    from clairai.store.send_shards import ShardSender

    total = len(open_store(folder).shards)
    with claim_folder(folder) as disk:
        sent = list(progress(ShardSender(disk, url).send(), total, "sending"))
    typer.echo(f"{len(sent)} shards sent, {sum(entry.nbytes for entry in sent)} bytes")


def _row(request: StoredRequest) -> tuple[str, ...]:
    from clairai.store.shard import stream_hex

    tags = json.dumps(request.tags)
    points = request.points
    return (
        stream_hex(request.stream),
        str(request.rows),
        ",".join(map(str, request.choices)),
        "{}-{}".format(*request.positions),
        points[0] if len(points) == 1 else f"{points[0]} and {len(points) - 1} more",
        ",".join(sorted({origin.encoder for origin in request.origins})),
        ",".join(sorted({origin.model for origin in request.origins})),
        tags if len(tags) <= _MAX_TAGS else tags[: _MAX_TAGS - 3] + "...",
    )


def _fidelity(store: Store, request: StoredRequest) -> dict[str, dict[str, tuple[float, float]]]:
    entries = [entry for entry in store.shards if entry.name in request.shards]
    return {entry.name: store.shard(entry).head.fidelity for entry in entries}


def _parse_stream(text: str) -> int:
    try:
        stream = int(text, 16)
    except ValueError:
        stream = -1
    if not 0 <= stream < 1 << 64:
        raise typer.BadParameter("a stream is up to 16 hex digits, as `ls` prints it")
    return stream
