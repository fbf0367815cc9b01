"""Takes the `clairai capture` command line; gives what is in a folder of captures, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from clairai.cli_capture_run import run
from clairai.cli_export import export
from clairai.cli_probes import print_table
from clairai.cli_progress import progress

if TYPE_CHECKING:
    from clairai.store.reading import Request, Store

capture = typer.Typer(help="Captured rows on disk.", no_args_is_help=True)
capture.add_typer(export, name="export")
capture.command()(run)

_TITLES: Final = ("stream", "rows", "choices", "positions", "points", "encoder", "model", "tags")
_MAX_TAGS: Final = 60

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of captures.")]


@capture.command()
def ls(folder: Folder) -> None:
    """List the requests, one line each."""
    from clairai.store.reading import open as open_store

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
    from clairai.store.reading import open as open_store

    store = open_store(folder)
    request = store.request(_stream(stream))
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
    from clairai.store import verify as checks
    from clairai.store.disk import LocalDisk
    from clairai.store.manifest import parse

    disk = LocalDisk(folder)
    names = disk.names()
    num_files = len(parse(disk.read("manifest")).entries) + 1 if "manifest" in names else 1
    checked = list(progress(checks.verify(disk), num_files, "verifying"))
    faults = [one for one in checked if one.fault]
    for one in faults:
        typer.echo(f"bad   {one.name}: {one.fault}", err=True)
    for name in checks.beside(disk):
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
    from clairai.store.folder import claimed
    from clairai.store.index import write
    from clairai.store.reading import open as open_store

    store = open_store(folder)
    with claimed(folder) as disk:
        typer.echo(str(folder / write(store, disk)))


@capture.command()
def send(
    folder: Folder,
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as s3://bucket/captures.")],
) -> None:
    """Send what was committed, and not sent before, to an address. Needs `clairai[fsspec]`."""
    from clairai.store.folder import claimed
    from clairai.store.reading import open as open_store
    from clairai.store.sending import Sender

    total = len(open_store(folder).shards)
    with claimed(folder) as disk:
        sent = list(progress(Sender(disk, url).send(), total, "sending"))
    typer.echo(f"{len(sent)} shards sent, {sum(entry.nbytes for entry in sent)} bytes")


def _row(request: Request) -> tuple[str, ...]:
    from clairai.store.shard import named

    tags = json.dumps(request.tags)
    points = request.points
    return (
        named(request.stream),
        str(request.rows),
        ",".join(map(str, request.choices)),
        "{}-{}".format(*request.positions),
        points[0] if len(points) == 1 else f"{points[0]} and {len(points) - 1} more",
        ",".join(sorted({origin.encoder for origin in request.origins})),
        ",".join(sorted({origin.model for origin in request.origins})),
        tags if len(tags) <= _MAX_TAGS else tags[: _MAX_TAGS - 3] + "...",
    )


def _fidelity(store: Store, request: Request) -> dict[str, dict[str, tuple[float, float]]]:
    entries = [entry for entry in store.shards if entry.name in request.shards]
    return {entry.name: store.shard(entry).head.fidelity for entry in entries}


def _stream(text: str) -> int:
    try:
        stream = int(text, 16)
    except ValueError:
        stream = -1
    if not 0 <= stream < 1 << 64:
        raise typer.BadParameter("a stream is up to 16 hex digits, as `ls` prints it")
    return stream
