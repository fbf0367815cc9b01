"""Takes what `clairai probes train` was given; gives a probe file, and in words how good it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clairai.demo.console import say
from clairai.errors import ConfigError
from clairai.points import Point, quote
from clairai.probe.files import save
from clairai.probe.model import Probe
from clairai.train.documents import Document, read_json_lines, read_texts
from clairai.train.engine import chosen, running, short_name
from clairai.train.run import Job, Trained, train


@dataclass(frozen=True)
class Texts:
    """Where the labelled texts are: one file of JSON lines, or one file for each label."""

    data: Path | None
    positive: Path | None
    negative: Path | None

    def read(self) -> list[Document]:
        if self.data is not None and self.positive is None and self.negative is None:
            return read_json_lines(self.data)
        if self.data is None and self.positive is not None and self.negative is not None:
            with_it = read_texts(self.positive, label=True)
            return with_it + read_texts(self.negative, label=False)
        raise ConfigError("give --data, or both --positive and --negative")


@dataclass(frozen=True)
class Wish:
    """What is wanted: a name, and where the probe goes."""

    name: str
    description: str | None
    out: Path
    points: Sequence[str]
    seed: int

    def check(self) -> None:
        """Now, and not after minutes of training."""
        Probe(
            self.name, Point("post_block", 0), np.ones(1, np.float32), description=self.description
        )
        if self.out.suffix != ".safetensors" or not self.out.parent.is_dir():
            raise ConfigError(
                f"--out is {quote(str(self.out), limit=200)}; give a name ending in .safetensors, "
                "in a folder that is there"
            )


def train_file(wish: Wish, texts: Texts, model: str | None, arguments: str) -> Iterator[str]:
    """Lines to print, the last of them after the file is there."""
    wish.check()
    job = Job(wish.name, texts.read(), wish.description)
    source, settings = chosen(model, arguments)
    say(f"starting vLLM for {source}")
    with running(source, wish.points, settings) as tapped:
        (made,) = train(tapped, [job], model=short_name(source), seed=wish.seed)
    yield from lines(made)
    save(wish.out, made.probe)
    yield f"{wish.out}: {made.probe.name} at {made.probe.point}"


def lines(made: Trained) -> Iterator[str]:
    """What was tried, what was chosen, and how it does on documents that chose nothing."""
    yield "point           penalty  AUROC, cross-validated"
    for tried in made.tried:
        mark = "  <- chosen" if tried.point == made.probe.point else ""
        choice = tried.choice
        yield f"{tried.point!s:<15} {choice.penalty:<8g} {choice.auroc:.4f}{mark}"
    judged, probe = made.judged, made.probe
    low, high = probe.calibration or (0.0, 1.0)
    yield f"held out: {judged.num_documents} documents, {judged.num_tokens} tokens"
    yield f"  AUROC of tokens      {judged.auroc:.4f}  ({judged.auroc_all:.4f} with first tokens)"
    yield f"  AUROC of documents   {judged.auroc_documents:.4f}"
    yield f"  balanced accuracy    {judged.accuracy:.4f}  at the threshold, {probe.threshold:.3f}"
    yield f"  usual scores         {low:.3g} to {high:.3g}"
