"""The commands `clairai vectors`: vector files, and the vectors of a running server."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clairai.cli.output import print_table, print_values
from clairai.cli.running_server import (
    DEFAULT_URL,
    ONLY_KNOWN,
    ONLY_NEW,
    SHORT_DIGEST,
    Key,
    MaybeUrl,
    Url,
    open_client,
)

if TYPE_CHECKING:
    from clairai.library.http_client import ServerClient
    from clairai.vector.model import Vector


vectors = typer.Typer(
    help="Steering vectors: files, and those of a running server.", no_args_is_help=True
)

_TITLES: Final = ("name", "points", "width", "scale", "method", "digest")
_MAX_SHOWN: Final = 4  # points in one cell

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="Safetensors, GGUF or JSON.")]
One = Annotated[str, typer.Argument(metavar="FILE", help="Safetensors, GGUF or JSON.")]
Points = Annotated[
    list[str] | None, typer.Option("--points", metavar="POINT", help="Of its points, only these.")
]


class Method(StrEnum):
    """How contrasting rows become a direction."""

    MEAN = "mean"
    PCA = "pca"


class Tokens(StrEnum):
    """Which tokens of a text count."""

    ALL = "all"
    LAST = "last"


Pairs = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='JSON lines: "positive", "negative", maybe "prompt".'),
]
Positive = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Texts to lead to, one a line.")
]
Negative = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Texts to lead away from, one a line.")
]
FromProbe = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A probe, whose direction is taken.")
]
Step = Annotated[
    float, typer.Option(metavar="X", help="Raw score that scale 1 adds to the probe's.")
]
ByMethod = Annotated[
    Method, typer.Option(help="Difference of means, or PCA of the pairs' differences.")
]
OfTokens = Annotated[Tokens, typer.Option(help="Mean of a text's tokens, or its last one.")]
Model = Annotated[
    str | None, typer.Option(help="What `vllm serve` would take; the demo's if not given.")
]
SteerPoints = Annotated[
    list[str] | None,
    typer.Option(metavar="POINT", help="Where to steer; a spread if not given."),
]
Scale = Annotated[float, typer.Option(metavar="S", help="Scale to suggest.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="NAME.safetensors if not given.")]
Description = Annotated[str | None, typer.Option(help="What it does, for people.")]
Engine = Annotated[str, typer.Option(metavar="JSON", help="More arguments for vLLM's LLM.")]


@vectors.command()
def make(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the vector is called.")],
    pairs: Pairs = None,
    positive: Positive = None,
    negative: Negative = None,
    probe: FromProbe = None,
    step: Step = 1.0,
    method: ByMethod = Method.MEAN,
    tokens: OfTokens = Tokens.ALL,
    model: Model = None,
    points: SteerPoints = None,
    scale: Scale = 1.0,
    out: Out = None,
    description: Description = None,
    engine: Engine = "{}",
) -> None:
    """Make a vector of contrasting texts, with rows read through the taps, or of a probe.

    Texts need vLLM; a probe's file needs nothing.
    """
    from clairai.train.make_vector import (
        ContrastTexts,
        ReadingOptions,
        VectorOptions,
        make_vector_file,
        make_vector_from_probe,
    )

    target = out or Path(f"{name.replace('/', '_')}.safetensors")
    options = VectorOptions(name, target, description, scale)
    texts = ContrastTexts(pairs, positive, negative)
    reading = ReadingOptions(method.value, tokens.value, points or [])
    if probe is not None and (texts != ContrastTexts() or points):
        raise typer.BadParameter("a probe has its own point and needs no texts; leave those out")
    lines = (
        make_vector_file(options, texts, reading, model, engine)
        if probe is None
        else make_vector_from_probe(options, probe, step)
    )
    for line in lines:
        typer.echo(line)


@vectors.command("ls", hidden=True)
@vectors.command("list")
def list_(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Files, folders or globs.")
    ] = None,
    url: MaybeUrl = None,
    api_key: Key = None,
) -> None:
    """List the vectors of a running server, or those in files."""
    if paths and url is not None:
        raise typer.BadParameter("give files or folders, or --url, and not both")
    if not paths:
        _print_vectors(open_client(url or DEFAULT_URL, api_key).vectors())
        return
    from clairai.vector.files import load_many

    found = [vector for path in paths for vector in load_many(path)]
    print_table(_TITLES, (_row(_listed(vector)) for vector in found))


@vectors.command()
def check(files: Files) -> None:
    """Say which files hold a good vector.

    The exit code is 1 if any does not.
    """
    from clairai.errors import ClairaiError
    from clairai.vector.files import load

    num_bad = 0
    for file in files:
        try:
            vector = load(file)
        except ClairaiError as error:
            num_bad += 1
            typer.echo(f"bad   {error}", err=True)
        else:
            points = _points([str(point) for point in vector.points])
            typer.echo(f"good  {file}: {vector.name} at {points}, width {vector.width}")
    if num_bad:
        raise typer.Exit(1)


@vectors.command()
def show(file: One) -> None:
    """Print everything one vector's file says; of each row its length."""
    from clairai.vector.files import load

    vector = load(file)
    listed = vector.listed()
    values = {
        "name": vector.name,
        "width": str(vector.width),
        "scale": f"{vector.scale:g}",
        "method": vector.method or "none",
        "model": vector.model or "any",
        "description": vector.description or "none",
        "digest": vector.digest,
    }
    lengths = (f"{length:g}" for length in listed.norms)
    print_values(values | dict(zip(listed.points, lengths, strict=True)), title_width=16)


@vectors.command("import")
def import_(
    files: Files,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; beside each file if not given."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model the vectors were made for.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(metavar="S", help="Scale to suggest; neither format has one.")
    ] = None,
) -> None:
    """Turn GGUF control vectors and JSON into safetensors, named as their files are.

    A file of that name is replaced, whole or not at all.
    """
    from dataclasses import replace

    from clairai.vector.files import load, save

    loaded = [(Path(file), load(file)) for file in files]  # all are read before one is written
    for file, read in loaded:
        suggested = read.scale if scale is None else scale
        vector = replace(read, model=model or read.model, scale=suggested)
        target = (out or file.parent) / f"{file.stem}.safetensors"
        save(vector, target)
        points = _points([str(point) for point in vector.points])
        typer.echo(f"{target}: {vector.name} at {points}")


@vectors.command()
def export(
    file: One,
    out: Annotated[Path, typer.Argument(metavar="GGUF", help="What to write.")],
    points: Points = None,
) -> None:
    """Turn a vector into a GGUF control vector, for llama.cpp and repeng.

    Those steer outputs of blocks from block 1 on; --points leaves other points out.
    """
    from dataclasses import replace

    from clairai.vector.files import load, save

    if out.suffix != ".gguf":
        raise typer.BadParameter("the file to write must end in .gguf")
    vector = load(file)
    if points:
        vector = replace(vector, rows=_choose_rows(vector, points))
    save(vector, out)
    typer.echo(
        f"{out}: {vector.name}; --control-vector-scaled is to be given its scale, {vector.scale:g}"
    )


@vectors.command()
def add(files: Files, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Add vectors to a running server, without a restart."""
    _put(files, open_client(url, api_key), only_if=ONLY_NEW, done="added")


@vectors.command()
def replace(files: Files, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Put vectors in the place of their namesakes; running requests keep what they have."""
    _put(files, open_client(url, api_key), only_if=ONLY_KNOWN, done="replaced")


@vectors.command()
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Take vectors out of a running server; running requests keep what they have."""
    client = open_client(url, api_key)
    for name in names:
        client.remove_vector(name)
        typer.echo(f"removed {name}")


def _put(files: list[str], client: ServerClient, *, only_if: Mapping[str, str], done: str) -> None:
    from clairai.vector.files import load
    from clairai.vector.safetensors_format import dumps

    loaded = [load(file) for file in files]  # all are read before the first is sent
    for vector in loaded:
        client.put_vector(vector.name, dumps(vector), only_if=only_if)
        typer.echo(f"{done} {vector.name}")


def _choose_rows(vector: Vector, patterns: list[str]) -> dict[Any, Any]:
    from clairai.errors import VectorError
    from clairai.points import expand

    named = expand(patterns, vector.points[-1].layer + 1)
    rows = {point: vector.rows[point] for point in named if point in vector.rows}
    if rows:
        return rows
    raise VectorError(
        f"vector {vector.name} has none of {', '.join(patterns)}; it has "
        f"{_points([str(point) for point in vector.points])}"
    )


def _listed(vector: Vector) -> Mapping[str, Any]:
    import msgspec

    return msgspec.structs.asdict(vector.listed())


def _row(listed: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        listed["name"],
        _points(listed["points"]),
        str(listed["width"]),
        f"{listed['scale']:g}",
        listed["method"] or "none",
        listed["digest"][:SHORT_DIGEST],
    )


def _print_vectors(state: Mapping[str, Any]) -> None:
    print_table(_TITLES, map(_row, state["data"]))
    capacity = state["capacity"]
    typer.echo(
        f"{len(state['data'])} vectors; unfinished requests share {capacity['rows']} rows "
        f"and {capacity['programs']} programs; steered at {_points(state['points'])}"
    )


def _points(names: list[str]) -> str:
    rest = len(names) - _MAX_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
