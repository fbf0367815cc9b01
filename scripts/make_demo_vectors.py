"""Make the demo vectors that the package ships, from the contrast pairs.

Run: python -m scripts.make_demo_vectors. Then: python -m scripts.demo_vector_effect.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clairai.demo.model import NAME, smollm2
from clairai.train.documents import read_pairs
from clairai.train.make_vector import ReadingOptions, make_vector
from clairai.train.start_engine import demo_arguments, run_engine
from clairai.vector.files import save

PAIRS: Final = Path(__file__).resolve().parent / "demo_pairs"
FOLDER: Final = Path(__file__).resolve().parent.parent / "src" / "clairai" / "demo" / "vectors"
POINTS: Final = ("post_block.12", "post_block.14", "post_block.16")


@dataclass(frozen=True)
class Kind:
    """A vector to make: which pairs, how people are told of it, and a scale that suits it."""

    name: str
    description: str
    scale: float


KINDS: Final = (
    Kind("positive_sentiment", "Praise and good cheer; below zero, complaint and misery.", 0.4),
    Kind("formal", "Stiff, official prose; below zero, loose and personal talk.", 0.3),
)


def main() -> None:
    """Make every vector, write the files, and say what is in them."""
    FOLDER.mkdir(exist_ok=True)
    with run_engine(str(smollm2()), POINTS, demo_arguments()) as source:
        for kind in KINDS:
            texts = read_pairs(PAIRS / f"{kind.name}.jsonl")
            made = make_vector(source, kind.name, texts, ReadingOptions(), model=NAME)
            told = replace(made.vector, description=kind.description, scale=kind.scale)
            save(told, FOLDER / f"{kind.name}.safetensors")
            norms = zip(told.listed().points, told.listed().norms, made.separation, strict=True)
            lines = [
                f"{point} norm {norm:.3g}, told apart {apart:.3f}" for point, norm, apart in norms
            ]
            sys.stdout.write(f"{kind.name}: {'; '.join(lines)}\n")


if __name__ == "__main__":
    main()
