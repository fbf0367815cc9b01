"""Takes the command line; gives each command what it needs, and says errors in words.

Nothing heavy is imported up here: a command imports its own part, so that `--help` is instant.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated, Final

import typer

from clairai import __version__
from clairai.cli_probes import probes
from clairai.errors import ClairaiError

app = typer.Typer(
    name="clairai",
    help="See inside a language model while stock vLLM serves it at full speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(probes, name="probes")

KEY_VARIABLES: Final = ["CLAIRAI_API_KEY", "VLLM_API_KEY"]


class Begin(StrEnum):
    """Where to begin in the ring of an engine that runs already."""

    OLDEST = "oldest"
    NEWEST = "newest"


Host = Annotated[str, typer.Option(help="Address to bind; any but loopback needs --api-key.")]
Port = Annotated[int, typer.Option(help="Port to bind.", min=1, max=65535)]
Key = Annotated[
    str | None, typer.Option(envvar=KEY_VARIABLES, help="Key that requests under /v1 must carry.")
]


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def sidecar(
    runtime_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where engines and readers meet.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per scored row.")
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help="With --json: also what happens beside the rows.")
    ] = False,
    start: Annotated[
        Begin,
        typer.Option("--from", help="Of an engine that runs already: its oldest or next row."),
    ] = Begin.OLDEST,
) -> None:
    """Show scores live, as a table or as JSON lines; start it before or after vLLM."""
    if events and not as_json:
        raise typer.BadParameter("--events adds lines to --json; give both")
    from clairai.sidecar.run import sidecar as run

    run(runtime_dir, as_json=as_json, with_events=events, start=start.value)


@app.command()
def demo(
    host: Host = "127.0.0.1",
    port: Port = 6969,
    api_key: Key = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this, print its scores, and exit.")
    ] = None,
) -> None:
    """Serve SmolLM2 with its probes and watch the scores.

    Needs no GPU and downloads nothing.
    """
    from clairai.demo.run import demo as run

    run(host=host, port=port, api_key=api_key, prompt=prompt)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="What `vllm serve` would take.")],
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- VLLM_ARGUMENT", help="Handed to vLLM.")
    ] = None,
    probes: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Probe file, folder or glob.")
    ] = None,
    points: Annotated[
        list[str] | None, typer.Option(metavar="POINT", help="Tap point, such as post_block.15.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 6969,
    api_key: Key = None,
) -> None:
    """Serve MODEL with vLLM and clairai's taps on one port."""
    from clairai.serve.command import serve as run
    from clairai.serve.launch import Bind

    bind = Bind(host, port, api_key)
    run(model, bind, points=points or [], probes=probes or [], arguments=vllm_arguments or [])


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="What `vllm serve` would take.")],
) -> None:
    """Say which tap points of MODEL can be served."""
    from rich.console import Console
    from rich.table import Table

    from clairai.doctor import diagnose

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    report = diagnose(model)
    table = Table("point", "verdict", "reason", box=None)
    for row in report.lines():
        table.add_row(*row)
    typer.echo(report.title)
    Console(highlight=False).print(table)
    typer.echo(report.summary)
    for problem in report.problems:
        typer.echo(problem, err=True)
    if report.problems:
        raise typer.Exit(1)


def main() -> None:
    try:
        app()
    except ClairaiError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
