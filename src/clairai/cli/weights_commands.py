"""The commands `clairai weights`: send new weights to a running server, and show which serve."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from clairai.cli.output import print_values
from clairai.cli.running_server import DEFAULT_URL, Key, Url, open_client

weights = typer.Typer(
    help="New weights for a running server, without a restart.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A model's safetensors.")]
Runtime = Annotated[
    str | None, typer.Option(metavar="DIR", help="Where the server's socket is; as it was told.")
]


class Drain(StrEnum):
    """What happens to requests that run when the weights change."""

    WAIT = "wait"
    ABORT = "abort"


class Through(StrEnum):
    """How weights travel: in shared memory on the server's machine, by HTTP from others."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"
    HTTP = "http"


_ROUTES: Final = {
    "device": "by the GPU's own memory",
    "host": "through shared memory",
    "http": "over HTTP",
}


def _print_route(route: str, why: str) -> None:
    typer.echo(f"sending {_ROUTES[route]}: {why}")


@weights.command()
def push(
    folder: Folder,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    runtime_dir: Runtime = None,
    drain: Annotated[
        Drain, typer.Option(help="Running requests: wait until they end, or end them.")
    ] = Drain.WAIT,
    label: Annotated[str, typer.Option(metavar="TEXT", help="What to call these weights.")] = "",
    through: Annotated[
        Through, typer.Option(help="Which way; by itself it takes the shortest there is.")
    ] = Through.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say whether they would be taken.")
    ] = False,
) -> None:
    """Send a folder's weights to a running server; they take effect at once, or not."""
    from clairai.weights.sender import Sender

    sender = Sender(
        url,
        api_key=api_key,
        runtime_dir=runtime_dir,
        drain=drain.value,
        through=through.value,
        chosen=_print_route,
    )
    if dry_run:
        typer.echo(f"they would be taken: {sender.check(folder, label=label)} bytes")
        return
    sent = sender.send(folder, label=label)
    typer.echo(
        f"version {sent.version} serves: {sent.num_tensors} tensors, {sent.nbytes} bytes in "
        f"{sent.seconds:.2f} s ({sent.bytes_per_s / 1e9:.2f} GB/s), checksum {sent.digest}"
    )


@weights.command()
def show(url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Print which weights a server serves with."""
    print_values(open_client(url, api_key).weights(), title_width=16)
