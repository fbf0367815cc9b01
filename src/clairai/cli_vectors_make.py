"""Takes the command line of `clairai vectors make`; gives a vector's file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
Points = Annotated[
    list[str] | None,
    typer.Option(metavar="POINT", help="Where to steer; a spread if not given."),
]
Scale = Annotated[float, typer.Option(metavar="S", help="Scale to suggest.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="NAME.safetensors if not given.")]
Description = Annotated[str | None, typer.Option(help="What it does, for people.")]
Engine = Annotated[str, typer.Option(metavar="JSON", help="More arguments for vLLM's LLM.")]


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
    points: Points = None,
    scale: Scale = 1.0,
    out: Out = None,
    description: Description = None,
    engine: Engine = "{}",
) -> None:
    """Make a vector of contrasting texts, with rows read through the taps, or of a probe.

    Texts need vLLM; a probe's file needs nothing.
    """
    from clairai.train.vectors import Reading, Texts, Wish, make_file, make_from_probe

    target = out or Path(f"{name.replace('/', '_')}.safetensors")
    wish, texts = Wish(name, target, description, scale), Texts(pairs, positive, negative)
    reading = Reading(method.value, tokens.value, points or [])
    if probe is not None and (texts != Texts() or points):
        raise typer.BadParameter("a probe has its own point and needs no texts; leave those out")
    lines = (
        make_file(wish, texts, reading, model, engine)
        if probe is None
        else make_from_probe(wish, probe, step)
    )
    for line in lines:
        typer.echo(line)
