"""Takes the labelled texts in scripts/demo_texts; gives documents labelled to the character.

Texts are put into folds before documents are made of them, so no sentence is in two folds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Frame = Literal["answer", "request", "bare"]

TEXTS: Final = Path(__file__).resolve().parent / "demo_texts"
NUM_FOLDS: Final = 4
HELD_OUT: Final = NUM_FOLDS - 1  # the last fold chooses nothing: it is only scored, at the end
FRAMES: Final[tuple[Frame, ...]] = ("answer", "answer", "answer", "request", "bare")


@dataclass(frozen=True)
class Concept:
    """What a probe is to find: the texts that have it, and those that have not."""

    name: str
    present: str
    absent: tuple[str, ...]


# Besides the plain contrast each concept has neighbours it must not be taken for.
CONCEPTS: Final = (
    Concept("code", "code", ("prose", "answers", "maths", "french", "questions")),
    Concept("french", "french", ("prose", "answers", "foreign", "code")),
    Concept("question", "questions", ("prose", "answers", "negative", "refusals")),
    Concept("negative_sentiment", "negative", ("positive", "prose", "answers", "questions")),
    Concept("maths", "maths", ("prose", "answers", "code", "questions", "french")),
    Concept("refusal", "refusals", ("answers", "prose", "negative", "questions")),
)


@dataclass(frozen=True)
class Span:
    """A run of text: the concept is in it, is not, or nothing is claimed (None)."""

    text: str
    label: bool | None


@dataclass(frozen=True)
class Document:
    """Spans in order, and where in a conversation they stand."""

    spans: tuple[Span, ...]
    frame: Frame
    fold: int


def texts(name: str, fold: int) -> list[str]:
    """The texts of one file that belong to `fold`; the same ones each time."""
    whole = (TEXTS / f"{name}.txt").read_text()
    units = whole.split("\n%%\n") if "\n%%\n" in whole else whole.splitlines()
    units = [unit.rstrip("\n") for unit in units]
    random.Random(name).shuffle(units)  # noqa: S311 - to be repeatable is the point
    return units[fold::NUM_FOLDS]


def documents(concept: Concept, fold: int) -> Iterator[Document]:
    """Each text with the concept twice, each without it once, in varied company."""
    chance = random.Random(f"{concept.name} {fold}")  # noqa: S311
    absent = [text for name in concept.absent for text in texts(name, fold)]
    for text in texts(concept.present, fold) * 2:
        before, after = (_neighbours(chance, absent) for _ in range(2))
        yield _document([*before, Span(text, True), *after], chance, fold)
    for text in absent:
        yield _document([Span(text, False), *_neighbours(chance, absent)], chance, fold)


def neutral_documents(fold: int) -> Iterator[Document]:
    """Plain statements, as answers: what a score looks like when there is nothing to find."""
    for text in texts("prose", fold):
        yield Document((Span(text, False),), "answer", fold)


def _neighbours(chance: random.Random, absent: list[str]) -> list[Span]:
    return [Span(chance.choice(absent), False)] if chance.random() < 0.5 else []


def _document(spans: list[Span], chance: random.Random, fold: int) -> Document:
    joined = [spans[0]]
    for span in spans[1:]:
        has_lines = "\n" in span.text or "\n" in joined[-1].text
        gap = "\n\n" if has_lines else chance.choice((" ", " ", "\n\n"))
        joined += [Span(gap, None), span]
    return Document(tuple(joined), chance.choice(FRAMES), fold)
