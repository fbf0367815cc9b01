"""The commands `clairai capture`: capture rows of many prompts, and work with captured rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from clairai.cli.output import print_table, print_values, show_progress

if TYPE_CHECKING:
    from clairai.batch.run_job import CaptureJob, JobProgress
    from clairai.store.disk import LocalDisk
    from clairai.store.read import Store, StoredRequest
    from clairai.store.repair import RepairPlan
    from clairai.store.shard_manifest import ShardEntry

capture = typer.Typer(help="Captured rows on disk.", no_args_is_help=True)
export = typer.Typer(help="Captured rows as files of other kinds.", no_args_is_help=True)
capture.add_typer(export, name="export")

INTERRUPTED: Final = 130  # a shell's exit code for SIGINT
_TITLES: Final = ("stream", "rows", "choices", "positions", "points", "encoder", "model", "tags")
_MAX_TAGS: Final = 60

Model = Annotated[str, typer.Argument(metavar="MODEL", help="What `vllm serve` would take.")]
Prompts = Annotated[
    Path, typer.Option(metavar="FILE", help="A prompt a line; .jsonl: an object a line.")
]
To = Annotated[
    str, typer.Option(metavar="FOLDER", help="Where rows go; with --ray also s3://bucket/folder.")
]
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
RayAddress = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Engines on this Ray cluster.")
]
Engines = Annotated[
    int | None, typer.Option(metavar="N", help="With --ray: engines; else one for each GPU.")
]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of captures.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for what is made.")]


@capture.command()
def run(
    model: Model,
    prompts: Prompts,
    points: Points,
    to: To = "captures",
    encoder: Encoder = "raw",
    positions: Positions = "all",
    max_tokens: MaxTokens = 1,
    batch_mib: BatchMib = 256,
    engine: Engine = "{}",
    ray: RayAddress = None,
    engines: Engines = None,
) -> None:
    """Forward many prompts and keep their rows; the same command goes on where it was stopped.

    Needs vLLM. Prompts are done in batches, each of which is there whole or not at all.
    """
    from clairai.batch.run_job import parse_job

    job = parse_job(
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
        typer.echo(_report(_run_job(job, ray, engines)) + f" in {to}")
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last commit", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _run_job(job: CaptureJob, address: str | None, engines: int | None) -> Iterator[JobProgress]:
    if address is not None:
        from clairai.batch.ray_job import RayOptions, run_ray_job

        return run_ray_job(job, RayOptions(address, engines))
    if engines is not None:
        raise typer.BadParameter("--engines is for --ray; without it there is one engine")
    from clairai.batch.run_job import run_job

    return run_job(job)


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
    values = dict(zip(_TITLES[:-1], _row(request)[:-1], strict=True)) | {
        "points": ", ".join(request.points),
        "weights": ", ".join(sorted({origin.weights for origin in request.origins})),
        "dtype": ", ".join(sorted({origin.dtype for origin in request.origins})),
        "parameters": ", ".join(sorted({origin.parameters for origin in request.origins})),
        "tags": json.dumps(request.tags),
        "steering": json.dumps(request.steering),
        "fidelity": json.dumps(_fidelity(store, request)),
    }
    print_values(values)
    for name in request.shards:
        typer.echo(f"{'shard':<12}{name}")


@capture.command()
def verify(folder: Folder) -> None:
    """Read every byte and compare it with what was committed.

    The exit code is 1 if any differs.
    """
    from clairai.store.disk import LocalDisk
    from clairai.store.recover import uncommitted_shards
    from clairai.store.recover import verify as verify_files

    disks = [LocalDisk(part) for part in _written_folders(folder)]
    files = (one for disk in disks for one in verify_files(disk))
    checked = list(show_progress(files, sum(map(_count_files, disks)), "verifying"))
    faults = [one for one in checked if one.fault]
    for one in faults:
        typer.echo(f"bad   {one.name}: {one.fault}", err=True)
    for name in (name for disk in disks for name in uncommitted_shards(disk)):
        typer.echo(f"note  {name} is in no line of the manifest, and is not shown", err=True)
    typer.echo(
        f"{len(checked) - len(faults)} of {len(checked)} files are good, "
        f"{sum(one.rows for one in checked if not one.fault)} rows, "
        f"{sum(one.nbytes for one in checked)} bytes"
    )
    if faults:
        raise typer.Exit(1)


def _count_files(disk: LocalDisk) -> int:
    from clairai.store.disk import MANIFEST
    from clairai.store.shard_manifest import parse_manifest

    return 1 + len(parse_manifest(disk.read(MANIFEST)).entries) if MANIFEST in disk.names() else 1


def _written_folders(folder: Path) -> list[Path]:
    """The folder itself, and those of engine cores below it; each has a writer of its own."""
    from clairai.store.disk import MANIFEST, LocalDisk, is_shard

    disk = LocalDisk(folder)
    cores = [folder / name for name in disk.core_names()]
    is_written = any(name == MANIFEST or is_shard(name) for name in disk.names())
    return [folder, *cores] if is_written or not cores else cores


@capture.command()
def repair(
    folder: Folder,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it; without, only say what would be done.")
    ] = False,
) -> None:
    """Rebuild a damaged or missing manifest from the shards themselves.

    Nothing is deleted: what is damaged is set aside. Without --apply nothing is changed, and the
    exit code is 1 if there is something to repair.
    """
    from clairai.store.disk import UnmappedDisk, claim_folder
    from clairai.store.repair import apply_repair, plan_repair

    if folder not in (parts := _written_folders(folder)):
        names = ", ".join(part.name for part in parts)
        raise typer.BadParameter(f"{folder} has a folder for each engine core; name one: {names}")
    if not apply:
        plan = plan_repair(UnmappedDisk(folder))
        _print_repair(plan)
        raise typer.Exit(1 if plan.is_needed else 0)
    UnmappedDisk(folder).close()  # claiming would make a folder that is not there
    with claim_folder(folder) as disk:
        plan = plan_repair(disk)
        _print_repair(plan)
        if plan.is_needed:
            apply_repair(disk, plan)
            typer.echo("repaired")


def _print_repair(plan: RepairPlan) -> None:
    for step in plan.steps():
        typer.echo(step)
    if not plan.is_needed:
        typer.echo("nothing to repair")


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
    from clairai.store.read import open as open_store

    total = len(open_store(folder).shards)
    shards = (
        entry for part in _written_folders(folder) for entry in _send_folder(part, folder, url)
    )
    sent = list(show_progress(shards, total, "sending"))
    typer.echo(f"{len(sent)} shards sent, {sum(entry.nbytes for entry in sent)} bytes")


def _send_folder(part: Path, folder: Path, url: str) -> Iterator[ShardEntry]:
    """That of an engine core goes to a place of the same name below the address."""
    from clairai.store.disk import claim_folder
    from clairai.store.send_shards import ShardSender

    to = url if part == folder else f"{url.rstrip('/')}/{part.name}"
    with claim_folder(part) as disk:
        yield from ShardSender(disk, to).send()


@export.command()
def npz(folder: Folder, out: Out) -> None:
    """Write an .npz for each request, choice and point: decoded rows, positions, tokens."""
    from clairai.store.export_rows import export_files, export_npz
    from clairai.store.read import open as open_store

    store = open_store(folder)
    files = export_files(store)
    written = list(show_progress(export_npz(store, files, out), len(files), "exporting"))
    typer.echo(f"{len(written)} files in {out}")


@export.command()
def datasets(folder: Folder, out: Out) -> None:
    """Write Hugging Face datasets, OUT/rows and OUT/requests. Needs `clairai[datasets]`."""
    from clairai.store.export_rows import export_datasets

    _export_table(export_datasets, folder, out)


@export.command()
def lance(folder: Folder, out: Out) -> None:
    """Write Lance datasets, OUT/rows.lance and OUT/requests.lance. Needs `clairai[lance]`."""
    from clairai.store.export_rows import export_lance

    _export_table(export_lance, folder, out)


@export.command()
def zarr(folder: Folder, out: Out) -> None:
    """Write a Zarr group with one array for each column. Needs `clairai[zarr]`."""
    from clairai.store.export_rows import export_zarr

    _export_table(export_zarr, folder, out)


def _export_table(
    export_rows: Callable[[Store, Path], Iterator[int]], folder: Path, out: Path
) -> None:
    from clairai.store.export_rows import num_batches, outline_store
    from clairai.store.read import open as open_store

    store = open_store(folder)
    total = num_batches(outline_store(store))
    num_rows = sum(show_progress(export_rows(store, out), total, "exporting"))
    typer.echo(f"{num_rows} rows in {out}")


def _report(steps: Iterable[JobProgress]) -> str:
    """Show a bar on a terminal, or print lines; return what was done."""
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
                started_s = time.monotonic()  # the engine's start does not predict the rest
            bar.update(task, total=step.total, completed=step.done)
            if not console.is_terminal:
                typer.echo(_progress_line(step, time.monotonic() - started_s), err=True)
            done, before = step.done, step.before
    more = f", {before} were done before" if before else ""
    return f"{done} prompts done{more}"


def _progress_line(step: JobProgress, elapsed_s: float) -> str:
    if not step.done:
        tokens = f", {step.total_tokens} tokens at most" if step.total_tokens else ""
        return f"{step.total} prompts{tokens}"
    if step.total_tokens:
        left_s = elapsed_s * (step.total_tokens - step.tokens) / step.tokens
    else:
        left_s = elapsed_s * (step.total - step.done) / step.done
    return f"{step.done} of {step.total} prompts, {elapsed_s:.0f} s, about {left_s:.0f} s left"


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
