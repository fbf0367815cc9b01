"""Labelled texts: documents whose spans of text are labelled, read from lines or JSON lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from clairai.errors import ConfigError, printable, quote
from clairai.probe.file_format import read_at_most

MAX_NBYTES: Final = 256 << 20
MAX_DOCUMENTS: Final = 100_000
SEPARATOR: Final = "%%"  # alone on a line, where documents have lines of their own


@dataclass(frozen=True)
class TextSpan:
    """A span of text with its label: the concept is there, is not, or nothing is claimed (None)."""

    text: str
    label: bool | None


@dataclass(frozen=True)
class Turn:
    """One message of a chat; without a role, plain text as for /v1/completions."""

    role: str | None
    spans: tuple[TextSpan, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True)
class Document:
    """One prompt. Documents of the same fold are on the same side of every split."""

    turns: tuple[Turn, ...]
    fold: int | None = None

    @property
    def is_positive(self) -> bool:
        return any(span.label for turn in self.turns for span in turn.spans)

    @property
    def key(self) -> tuple[tuple[str | None, str], ...]:
        """Equal for documents of equal content, which must not be on both sides of a split."""
        return tuple((turn.role, turn.text) for turn in self.turns)


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat in a JSON line."""

    role: str
    content: str


class LabelledLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One JSON line: a text, or a chat whose last message the label is about."""

    label: bool
    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()


class ContrastPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One JSON line: two texts that differ in one respect; with a prompt, two answers to it."""

    positive: str
    negative: str
    prompt: str | None = None


def text_document(text: str, *, label: bool) -> Document:
    return Document((Turn(None, (TextSpan(text, label),)),))


def chat_document(messages: tuple[ChatMessage, ...], *, label: bool) -> Document:
    """Label the last message of a chat; nothing is claimed about the others."""
    labels = [None] * (len(messages) - 1) + [label]
    turns = [
        Turn(message.role, (TextSpan(message.content.strip(), mark),))
        for message, mark in zip(messages, labels, strict=True)
    ]
    return Document(tuple(turns))


def read_texts(file: Path, *, label: bool) -> list[Document]:
    """Read one document per line or, if the file has lines of just `%%`, one between those."""
    lines = _read_lines(file)
    units = "\n".join(lines).split(f"\n{SEPARATOR}\n") if SEPARATOR in lines else lines
    documents = [text_document(unit.strip("\n"), label=label) for unit in units if unit.strip()]
    return _check_count(documents, file)


def read_json_lines(file: Path) -> list[Document]:
    """Read `{"text": ..., "label": true}` or `{"messages": [...], "label": true}` per line."""
    numbered = [(number, line) for number, line in enumerate(_read_lines(file), 1) if line.strip()]
    return _check_count([_parse_document(file, number, line) for number, line in numbered], file)


def read_pairs(file: Path) -> tuple[list[Document], list[Document]]:
    """Read `{"positive": ..., "negative": ..., "prompt": ...}` per line; the prompt is optional.

    The texts of both sides are labelled true, to mark the tokens whose rows are read.
    """
    numbered = [(number, line) for number, line in enumerate(_read_lines(file), 1) if line.strip()]
    pairs = [_parse_pair(file, number, line) for number, line in numbered]
    positive = [_answer_document(pair.positive, pair.prompt) for pair in pairs]
    return _check_count(positive, file), [
        _answer_document(pair.negative, pair.prompt) for pair in pairs
    ]


def _parse_pair(file: Path, number: int, line: str) -> ContrastPair:
    try:
        pair = msgspec.json.decode(line, type=ContrastPair)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{_at(file, number)}: {printable(error)}; "
            'write {"positive": "...", "negative": "..."}, and prompt if both are answers to it'
        ) from None
    if not pair.positive.strip() or not pair.negative.strip() or pair.prompt == "":
        raise ConfigError(f"{_at(file, number)}: a text is empty; write it, or leave the line out")
    return pair


def _answer_document(text: str, prompt: str | None) -> Document:
    if prompt is None:
        return text_document(text, label=True)
    return chat_document((ChatMessage("user", prompt), ChatMessage("assistant", text)), label=True)


def _parse_document(file: Path, number: int, line: str) -> Document:
    try:
        given = msgspec.json.decode(line, type=LabelledLine)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{_at(file, number)}: {printable(error)}; "
            'write {"text": "...", "label": true}, or messages (role, content) in place of text'
        ) from None
    texts = [message.content for message in given.messages[-1:]]
    texts += [] if given.text is None else [given.text]
    if len(texts) != 1 or not texts[0].strip():
        raise ConfigError(f"{_at(file, number)}: give text or messages, not both, and not empty")
    if given.text is not None:
        return text_document(given.text, label=given.label)
    return chat_document(given.messages, label=given.label)


def _check_count(documents: list[Document], file: Path) -> list[Document]:
    if 1 <= len(documents) <= MAX_DOCUMENTS:
        return documents
    raise ConfigError(
        f"{quote(str(file), limit=200)} has {len(documents)} documents; give 1 to {MAX_DOCUMENTS}"
    )


def _read_lines(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            raw = read_at_most(opened, MAX_NBYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{quote(str(file), limit=200)} cannot be read, {cause}; check it"
        ) from None
    if len(raw) > MAX_NBYTES:
        raise ConfigError(
            f"{quote(str(file), limit=200)} is over {MAX_NBYTES} bytes; give a smaller set"
        )
    return text.split("\n")


def _at(file: Path, number: int) -> str:
    return f"{quote(str(file), limit=200)}, line {number}"
