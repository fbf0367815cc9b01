"""The commands `clairai probes`: probe files, training, and the probes of a running server."""

from __future__ import annotations

from collections.abc import Mapping
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
    from clairai.probe.model import Probe

probes = typer.Typer(help="Probe files, and the probes of a running server.", no_args_is_help=True)

_TITLES: Final = ("name", "point", "width", "activation", "threshold", "auroc", "model", "digest")
_BARS: Final = "▁▂▃▄▅▆▇█"
Files = Annotated[list[str], typer.Argument(metavar="FILE", help="Probe files.")]
Layer = Annotated[
    int | None, typer.Option(metavar="N", help="For a JSON file whose name has no layer.", min=0)
]


@probes.command("ls", hidden=True)
@probes.command("list")
def list_(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Files, folders or globs.")
    ] = None,
    url: MaybeUrl = None,
    api_key: Key = None,
    layer: Layer = None,
) -> None:
    """List the probes of a running server, or those in files."""
    if paths and url is not None:
        raise typer.BadParameter("give files or folders, or --url, and not both")
    if not paths:
        _print_bank(open_client(url or DEFAULT_URL, api_key).probes())
        return
    from clairai.probe.files import load_many

    found = [probe for path in paths for probe in load_many(path, target_layer=layer)]
    print_table(_TITLES, (_row(probe) for probe in found))


@probes.command()
def check(files: Files, layer: Layer = None) -> None:
    """Say which files hold a good probe.

    The exit code is 1 if any does not.
    """
    from clairai.errors import ClairaiError
    from clairai.probe.files import load

    num_bad = 0
    for file in files:
        try:
            probe = load(file, target_layer=layer)
        except ClairaiError as error:
            num_bad += 1
            typer.echo(f"bad   {error}", err=True)
        else:
            typer.echo(f"good  {file}: {_summary(probe)}")
    if num_bad:
        raise typer.Exit(1)


@probes.command()
def show(file: Annotated[str, typer.Argument(metavar="FILE")], layer: Layer = None) -> None:
    """Print everything one probe file says."""
    import numpy as np

    from clairai.probe.files import load

    probe = load(file, target_layer=layer)
    ends = probe.calibration
    values = dict(zip(_TITLES, _row(probe), strict=True)) | {
        "bias": f"{probe.bias:g}",
        "calibration": "none" if ends is None else f"{ends[0]:g} to {ends[1]:g}",
        "norm": f"{np.linalg.norm(probe.direction_D.astype(np.float64)):g}",
        "histogram": _draw_histogram(probe),
        "description": probe.description or "none",
        "digest": probe.digest,
    }
    print_values(values)


@probes.command()
def convert(
    files: Annotated[list[str], typer.Argument(metavar="JSON", help="Files with a `vector`.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; beside each file if not given."),
    ] = None,
    layer: Layer = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model the probes were made for.")
    ] = None,
) -> None:
    """Turn the first clairai's JSON probes into safetensors.

    A file of that name is replaced, whole or not at all.
    """
    from dataclasses import replace

    from clairai.probe.files import load, save

    loaded = [(Path(file), load(file, target_layer=layer)) for file in files]
    for file, probe in loaded:
        target = (out or file.parent) / f"{file.stem}.safetensors"
        save(target, replace(probe, model=model or probe.model))
        typer.echo(f"{target}: {probe.name} at {probe.point}")


@probes.command()
def train(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the probe is called.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON lines: "text" or "messages", and "label".'),
    ] = None,
    positive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts with the concept, one a line.")
    ] = None,
    negative: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts without it, one a line.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What `vllm serve` would take; the demo's if not given.")
    ] = None,
    points: Annotated[
        list[str] | None,
        typer.Option(metavar="POINT", help="Where to look; a spread if not given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="NAME.safetensors if not given.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="What it finds, for people.")] = None,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help="More arguments for vLLM's LLM.")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Deals documents into folds.", min=0)] = 0,
) -> None:
    """Train a linear probe on labelled texts, with rows read through the taps.

    Point and penalty are chosen by cross-validation; a quarter of the documents is held out and
    only scored. Needs vLLM, and scikit-learn: pip install 'clairai[train]'.
    """
    try:
        from clairai.train.train_probe import LabelledTexts, TrainOptions, train_probe_file
    except ModuleNotFoundError as error:
        from clairai.errors import ConfigError

        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        raise ConfigError(
            "training needs scikit-learn; run `pip install 'clairai[train]'`"
        ) from error
    target = out or Path(f"{name.replace('/', '_')}.safetensors")
    options = TrainOptions(name, description, target, points or [], seed)
    for line in train_probe_file(options, LabelledTexts(data, positive, negative), model, engine):
        typer.echo(line)


@probes.command()
def add(files: Files, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Add probes to a running server, without a restart."""
    _put(files, open_client(url, api_key), only_if=ONLY_NEW, done="added")


@probes.command()
def replace(files: Files, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Put probes in the place of their namesakes in a running server."""
    _put(files, open_client(url, api_key), only_if=ONLY_KNOWN, done="replaced")


@probes.command()
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Take probes out of a running server."""
    client = open_client(url, api_key)
    for name in names:
        client.remove_probe(name)
        typer.echo(f"removed {name}")


def _put(files: list[str], client: ServerClient, *, only_if: Mapping[str, str], done: str) -> None:
    from clairai.probe.files import dumps, load

    loaded = [load(file) for file in files]  # all are read before the first is sent
    for probe in loaded:
        client.put_probe(probe.name, dumps(probe), only_if=only_if)
        typer.echo(f"{done} {probe.name}")


def _summary(probe: Probe) -> str:
    area = "" if probe.auroc is None else f", AUROC {probe.auroc:g}"
    described = "" if probe.description is None else f": {probe.description}"
    return f"{probe.name} at {probe.point}, width {probe.width}{area}{described}"


def _draw_histogram(probe: Probe) -> str:
    """A row of bars; the lowest bar stands for no score."""
    shape = probe.histogram
    if shape is None:
        return "none"
    tallest = max(shape.counts)
    rest = len(_BARS) - 2
    bars = "".join(_BARS[bool(count) + rest * count // tallest] for count in shape.counts)
    return f"{shape.low:g} {bars} {shape.high:g}, {sum(shape.counts)} scores"


def _row(probe: Probe) -> tuple[str, ...]:
    return (
        probe.name,
        str(probe.point),
        str(probe.width),
        probe.activation,
        _number(probe.threshold),
        _number(probe.auroc),
        probe.model or "any",
        probe.digest[:SHORT_DIGEST],
    )


def _print_bank(bank: Mapping[str, Any]) -> None:
    titles = ("name", "point", "activation", "threshold", "auroc", "digest")
    print_table(
        titles,
        (
            (
                p["name"],
                p["point"],
                p["activation"],
                _number(p["threshold"]),
                _number(p.get("auroc")),  # a server of an older clairai has none
                p["digest"][:SHORT_DIGEST],
            )
            for p in bank["data"]
        ),
    )
    typer.echo(f"{len(bank['data'])} probes, room for {bank['capacity']} at each site")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
