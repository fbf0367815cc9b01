"""Reads the prompts of a batch run from a file.

A `.jsonl` file has one object a line: `prompt` (a text), `messages` (a chat) or `prompt_token_ids`,
and optionally `tags`. Any other file is text, one prompt a line. Empty lines are skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from clairai.errors import ConfigError, RequestError, printable, quote

MAX_NBYTES: Final = 4 << 30
MAX_LINE_NBYTES: Final = 16 << 20
RESERVED: Final = ("prompt", "run")  # tags that the run sets
_BAD_LINE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RequestError)
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PromptMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a `.jsonl` file; one of prompt, messages, prompt_token_ids is given."""

    prompt: str | None = None
    messages: tuple[PromptMessage, ...] = ()
    prompt_token_ids: tuple[_Token, ...] = ()
    tags: dict[str, Any] = {}


@dataclass(frozen=True)
class Prompt:
    """One prompt, with the number of its line, from 1, and a digest of its content."""

    number: int
    content: PromptLine
    digest: str
    tags: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """ConfigError for a line that is no prompt, with its number, and for a file without prompts."""
    try:
        if (nbytes := path.stat().st_size) > MAX_NBYTES:
            raise ConfigError(
                f"{path} has {nbytes} bytes, may have {MAX_NBYTES}; give a part of it"
            )
        found = list(_read_lines(path))
    except OSError as error:
        raise ConfigError(f"{quote(str(path), 200)} cannot be read, {error.strerror}") from None
    if not found:
        raise ConfigError(f"{quote(str(path), 200)} has no prompts; give one a line")
    return found


def _read_lines(path: Path) -> Iterator[Prompt]:
    is_json = path.suffix == ".jsonl"
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if len(raw) > MAX_LINE_NBYTES:
                raise _bad_line(path, number, f"over {MAX_LINE_NBYTES} bytes; shorten it")
            try:
                yield _make_prompt(
                    number, _decode_object(raw) if is_json else PromptLine(prompt=_decode_text(raw))
                )
            except _BAD_LINE_ERRORS as error:
                raise _bad_line(path, number, printable(error)) from None


def _decode_text(raw: bytes) -> str:
    return raw.decode().rstrip("\r\n")


def _decode_object(raw: bytes) -> PromptLine:
    line = msgspec.json.decode(raw, type=PromptLine)
    given = [line.prompt is not None, bool(line.messages), bool(line.prompt_token_ids)]
    if sum(given) != 1 or line.prompt == "":
        raise RequestError(
            "give one of prompt, messages and prompt_token_ids, and not an empty one"
        )
    reserved = next((name for name in RESERVED if name in line.tags), None)
    if reserved is not None:
        raise RequestError(f"the tag {reserved} is set by the run; give yours another name")
    return line


def _make_prompt(number: int, line: PromptLine) -> Prompt:
    content = msgspec.json.encode([line.prompt, line.messages, line.prompt_token_ids])
    return Prompt(number, line, hashlib.sha256(content).hexdigest()[:32], line.tags)


def _bad_line(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"line {number} of {quote(str(path), 200)} is no prompt: {why}")
