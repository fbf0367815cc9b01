"""The labelled texts in scripts/demo_texts, as documents labelled for any of the concepts.

All concepts look at the same documents, so that each is forwarded once. Texts are put into folds
before documents are made of them, so no sentence is in two folds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from clairai.train.documents import Document, TextSpan, Turn

Frame = Literal["answer", "dialogue", "request", "bare"]

TEXTS: Final = Path(__file__).resolve().parent / "demo_texts"
NUM_FOLDS: Final = 4
FRAMES: Final[tuple[Frame, ...]] = ("answer", "answer", "dialogue", "request", "bare")


@dataclass(frozen=True)
class Concept:
    """What a probe is to find: which file has it, and how people are told of it."""

    name: str
    file: str
    description: str


CONCEPTS: Final = (
    Concept("code", "code", "Source code in any language, markup and configuration included."),
    Concept("french", "french", "Text in French."),
    Concept("question", "questions", "A sentence that asks something."),
    Concept(
        "negative_sentiment",
        "negative",
        "Complaint, disgust, misery: text that speaks badly of what it is about.",
    ),
    Concept("maths", "maths", "Calculation: arithmetic, algebra, numbers that are worked with."),
    Concept("refusal", "refusals", "The speaker declines: sorry, cannot, will not, is unable to."),
)
OTHERS: Final = ("prose", "answers", "foreign", "positive", "requests")

# The kind of a chat in chats.jsonl, and the concept its answer has.
_NAMES: Final = {
    "negative": "negative_sentiment",
    "grim": "negative_sentiment",  # sad things said without complaint: nothing is claimed
    "to_french": "french",  # asked in English
    "apology": "refusal",  # sorry, without declining: nothing is claimed where it says so
}
_SENTENCE: Final = re.compile(r"[^.!?\n]*[.!?\n]+\s*|[^.!?\n]+$")
_FENCE: Final = re.compile(r"(```.*?(?:```|$))", re.DOTALL)
_INLINE: Final = re.compile(r"(`[^`\n]+`)")
_DECLINES: Final = re.compile(
    r"sorry|n't |unable|cannot|not (?:able|equipped|capable)", re.IGNORECASE
)


@dataclass(frozen=True)
class Piece:
    """A run of text, the concepts it has, and those of which nothing is claimed."""

    text: str
    has: frozenset[str] = frozenset()
    unsaid: frozenset[str] = frozenset()

    def labelled(self, concept: Concept) -> TextSpan:
        if concept.name in self.unsaid:
            return TextSpan(self.text, None)
        return TextSpan(self.text, concept.name in self.has)


@dataclass(frozen=True)
class Sheet:
    """A document before it is labelled for one concept."""

    turns: tuple[tuple[str | None, tuple[Piece, ...]], ...]
    fold: int

    def labelled(self, concept: Concept) -> Document:
        turns = [
            Turn(role, tuple(piece.labelled(concept) for piece in pieces))
            for role, pieces in self.turns
        ]
        return Document(tuple(turns), self.fold)


def documents(concept: Concept) -> list[Document]:
    """The same texts in the same order, whatever the concept."""
    return [sheet.labelled(concept) for sheet in sheets()]


def sheets() -> Iterator[Sheet]:
    for fold in range(NUM_FOLDS):
        yield from _written(fold)
        yield from _chats(fold)


def texts(name: str, fold: int) -> list[str]:
    """The texts of one file that belong to `fold`; the same ones each time."""
    whole = (TEXTS / f"{name}.txt").read_text()
    units = whole.split("\n%%\n") if "\n%%\n" in whole else whole.splitlines()
    return _share([unit.strip("\n") for unit in units], name, fold)


def _share(units: list[str], name: str, fold: int) -> list[str]:
    random.Random(name).shuffle(units)  # noqa: S311 - to be repeatable is the point
    return units[fold::NUM_FOLDS]


def _written(fold: int) -> Iterator[Sheet]:
    """Each text once as the first of a document, alone or in the company of another."""
    chance = random.Random(f"documents {fold}")  # noqa: S311
    pieces = [
        Piece(text, frozenset([concept.name]))
        for concept in CONCEPTS
        for text in texts(concept.file, fold)
    ]
    pieces += [Piece(text) for name in OTHERS for text in texts(name, fold)]
    for piece in pieces:
        company = [chance.choice(pieces)] if chance.random() < 0.5 else []
        yield _framed(_joined([piece, *company], chance), chance, fold)


def _joined(pieces: list[Piece], chance: random.Random) -> tuple[Piece, ...]:
    chance.shuffle(pieces)
    joined = pieces[:1]
    for piece in pieces[1:]:
        has_lines = "\n" in piece.text or "\n" in joined[-1].text
        gap = "\n\n" if has_lines else chance.choice((" ", " ", "\n\n"))
        joined += [Piece(gap, unsaid=frozenset(concept.name for concept in CONCEPTS)), piece]
    return tuple(joined)


def _framed(pieces: tuple[Piece, ...], chance: random.Random, fold: int) -> Sheet:
    """As plain text, as a request, as an answer, or as the last answer of a longer chat."""

    def one_of(name: str) -> tuple[Piece, ...]:
        return (Piece(chance.choice(texts(name, fold))),)

    frame = chance.choice(FRAMES)
    if frame == "bare":
        return Sheet(((None, pieces),), fold)
    if frame == "request":
        return Sheet((("user", pieces),), fold)
    turns = (("user", one_of("requests")), ("assistant", pieces))
    if frame == "answer":
        return Sheet(turns, fold)
    before = (("user", one_of("requests")), ("assistant", one_of("answers")))
    return Sheet((("system", one_of("systems")), *before, *turns), fold)


def _chats(fold: int) -> Iterator[Sheet]:
    """What the demo model itself answered, sorted by hand into what the answer is."""
    for line in _share((TEXTS / "chats.jsonl").read_text().splitlines(), "chats", fold):
        chat = json.loads(line)
        asked = tuple(_asked(chat["user"], chat["kind"]))
        answered = tuple(_answered(chat["assistant"], chat["kind"]))
        yield Sheet((("user", asked), ("assistant", answered)), fold)


def _asked(text: str, kind: str) -> Iterator[Piece]:
    """To ask for something is not yet to have it, except that numbers and French are there."""
    name = _NAMES.get(kind, kind)
    has = {name} & {"maths", "french"} if kind != "to_french" else set()
    for sentence in _SENTENCE.findall(text):
        asks = {"question"} if "?" in sentence else set()
        yield Piece(sentence, frozenset(has | asks), frozenset({name} - has - asks))


def _answered(text: str, kind: str) -> Iterator[Piece]:
    if kind == "code":
        yield from _with_code(text)
        return
    for sentence in _SENTENCE.findall(text):
        asks = {"question"} if "?" in sentence else set()
        has, unsaid = _said(kind, declines=_DECLINES.search(sentence) is not None)
        yield Piece(sentence, frozenset(has | asks), frozenset(unsaid))


def _said(kind: str, *, declines: bool) -> tuple[set[str], set[str]]:
    """What a sentence of such an answer has, and of what nothing is claimed."""
    name = {_NAMES.get(kind, kind)}
    if kind in ("neutral", "question"):
        return set(), set()
    if kind == "grim":
        return set(), name
    if kind == "apology":
        return set(), name if declines else set()
    if kind == "refusal" and not declines:
        return set(), name
    return name, set()


def _with_code(text: str) -> Iterator[Piece]:
    """Code between fences is code; of a name in backticks nothing is claimed."""
    for part in _FENCE.split(text):
        if part.startswith("```"):
            yield Piece(part, frozenset(["code"]))
            continue
        for run in _INLINE.split(part):
            unsaid = frozenset(["code", "maths"]) if run.startswith("`") else frozenset[str]()
            yield Piece(run, unsaid=unsaid)
