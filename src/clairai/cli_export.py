"""Takes the command line of `clairai capture export`; gives captured rows to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clairai.cli_progress import progress

if TYPE_CHECKING:
    from clairai.store.reading import Store

export = typer.Typer(help="Captured rows as files of other kinds.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of captures.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for what is made.")]


@export.command()
def npz(folder: Folder, out: Out) -> None:
    """Write an .npz for each request, choice and point: decoded rows, positions, tokens."""
    from clairai.store.export import export_npz, files
    from clairai.store.reading import open as open_store

    store = open_store(folder)
    wanted = files(store)
    written = list(progress(export_npz(store, wanted, out), len(wanted), "exporting"))
    typer.echo(f"{len(written)} files in {out}")


@export.command()
def datasets(folder: Folder, out: Out) -> None:
    """Write Hugging Face datasets, OUT/rows and OUT/requests. Needs `clairai[datasets]`."""
    from clairai.store.export_arrow import export_datasets

    _table(export_datasets, folder, out)


@export.command()
def lance(folder: Folder, out: Out) -> None:
    """Write Lance datasets, OUT/rows.lance and OUT/requests.lance. Needs `clairai[lance]`."""
    from clairai.store.export_arrow import export_lance

    _table(export_lance, folder, out)


@export.command()
def zarr(folder: Folder, out: Out) -> None:
    """Write a Zarr group with one array for each column. Needs `clairai[zarr]`."""
    from clairai.store.export_zarr import export_zarr

    _table(export_zarr, folder, out)


def _table(made: Callable[[Store, Path], Iterator[int]], folder: Path, out: Path) -> None:
    from clairai.store.export_rows import num_batches, outline
    from clairai.store.reading import open as open_store

    store = open_store(folder)
    total = num_batches(outline(store))
    num_rows = sum(progress(made(store, out), total, "exporting"))
    typer.echo(f"{num_rows} rows in {out}")
