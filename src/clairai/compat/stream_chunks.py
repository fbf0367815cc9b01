"""Writes the ordinary chunks of vLLM's streams from a template, without building models of them.

OpenAIServingChat.chat_completion_stream_generator   entrypoints/openai/chat_completion/serving.py
                                                     0.27:422   0.32:466
OpenAIServingCompletion.completion_stream_generator  entrypoints/openai/completion/serving.py
                                                     0.27:282   0.32:279

For each token vLLM validates three pydantic models and serialises them, although they differ in
nothing but a text and its token ids. The names of these models in vLLM's modules are replaced by
functions that keep what they are given; the text of a chunk is then put between the parts of one
that pydantic has written. Whatever is not an ordinary token is made by vLLM's own models, as
before. Runs in: the API server.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec

MAX_TEMPLATES: Final = 4096  # of streams; those used least recently are made again
# Every character that JSON escapes, and some that only other writers do.
_TRICKY: Final = "".join(map(chr, range(0x180))) + "\u2028\u2029\ufeff\ufffd\U0001f600"
_JSON: Final = msgspec.json.Encoder()
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkKind:
    """One API's chunks: where vLLM makes them, and what an ordinary one is given."""

    module: str
    chunk: str  # name of the model of a chunk
    choice: str
    empty: frozenset[str]  # fields of a choice that are None in an ordinary chunk
    text: str  # field of a choice that holds the text, or the delta
    delta: str | None = None  # name of the model of a delta, which holds the text

    @property
    def choice_fields(self) -> frozenset[str]:
        return self.empty | {"index", self.text, "token_ids"}


CHUNK_FIELDS: Final = frozenset(("id", "object", "created", "model", "choices"))
KINDS: Final = (
    ChunkKind(
        "vllm.entrypoints.openai.chat_completion.serving",
        "ChatCompletionStreamResponse",
        "ChatCompletionResponseStreamChoice",
        frozenset(("logprobs", "finish_reason")),
        "delta",
        "DeltaMessage",
    ),
    ChunkKind(
        "vllm.entrypoints.openai.completion.serving",
        "CompletionStreamResponse",
        "CompletionResponseStreamChoice",
        frozenset(("logprobs", "finish_reason", "stop_reason", "prompt_token_ids")),
        "text",
    ),
)


class ChunkKey(NamedTuple):
    """What all ordinary chunks of one choice have in common."""

    id: str
    object: str
    created: int
    model: str
    choice: int
    has_token_ids: bool


class Template(NamedTuple):
    """A chunk as pydantic writes it, around its text and its token ids."""

    before_text: str
    before_ids: str
    end: str

    def write(self, text: str, token_ids: list[int] | None) -> str:
        ids = "" if token_ids is None else ",".join(map(str, token_ids))
        return f"{self.before_text}{_JSON.encode(text).decode()}{self.before_ids}{ids}{self.end}"


class LazyModel:
    """What a model of vLLM's is given; it is made when more is asked of it than its JSON."""

    __slots__ = ("given", "made", "model")
    model: Callable[..., Any]
    given: dict[str, Any]
    made: Any

    def __init__(self, model: Callable[..., Any], given: dict[str, Any]) -> None:
        _SET_MODEL(self, model)
        _SET_GIVEN(self, given)
        _SET_MADE(self, None)

    def make(self) -> Any:
        if self.made is None:
            _SET_MADE(self, self.model(**_make_all(self.given)))
        return self.made

    def __getattr__(self, name: str) -> Any:
        return self.given[name] if name in self.given else getattr(self.make(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.make(), name, value)


# Past `__setattr__`, which is for what vLLM sets.
_SET_MODEL, _SET_GIVEN, _SET_MADE = (
    vars(LazyModel)[name].__set__ for name in ("model", "given", "made")
)


class PlainDelta(LazyModel):
    """The delta of an ordinary token: a text, and nothing else."""

    __slots__ = ()
    tool_calls: Final = None


class PlainChoice(LazyModel):
    """The choice of an ordinary token.

    vLLM asks whatever is not one of its own choices for its tool calls, as it would ask a delta
    (entrypoints/serve/utils/tool_calls_utils.py, 0.32:38).
    """

    __slots__ = ()
    tool_calls: Final = None


class PlainChunk(LazyModel):
    """The chunk of an ordinary token; vLLM may still set its usage."""

    __slots__ = ("plain", "text")
    plain: PlainChunks
    text: str

    def __init__(
        self, model: Callable[..., Any], given: dict[str, Any], plain: PlainChunks, text: str
    ) -> None:
        super().__init__(model, given)
        _SET_PLAIN(self, plain)
        _SET_TEXT(self, text)

    def model_dump_json(self, **how: Any) -> str:
        if self.made is None and how == _HOW:
            return self.plain.write(self.given, self.text)
        made: str = self.make().model_dump_json(**how)
        return made


_HOW: Final = {"exclude_unset": True}  # how vLLM writes a chunk
_SET_PLAIN, _SET_TEXT = (vars(PlainChunk)[name].__set__ for name in ("plain", "text"))


def _make_all(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [_make(one) for one in value] if name == "choices" else _make(value)
        for name, value in given.items()
    }


def _make(value: Any) -> Any:
    return value.make() if isinstance(value, LazyModel) else value


def _is_plain(value: Any, kind: type[LazyModel]) -> bool:
    """False also if vLLM has looked into it, or changed it."""
    return type(value) is kind and value.made is None


class PlainChunks:
    """Stands in for the models of one kind of chunks."""

    def __init__(
        self, kind: ChunkKind, chunk: type[Any], choice: type[Any], delta: type[Any] | None
    ) -> None:
        self._kind = kind
        self._chunk, self._choice, self._delta = chunk, choice, delta
        self._choice_fields, self._empty = kind.choice_fields, tuple(kind.empty)
        self._text_field = kind.text
        self._template = functools.lru_cache(MAX_TEMPLATES)(self._make_template)

    def delta(self, **given: Any) -> Any:
        assert self._delta is not None
        if len(given) == 1 and type(given.get("content")) is str:
            return PlainDelta(self._delta, given)
        return self._delta(**given)

    def choice(self, **given: Any) -> Any:
        if given.keys() == self._choice_fields:
            for name in self._empty:
                if given[name] is not None:
                    break
            else:
                return PlainChoice(self._choice, given)
        return self._choice(**_make_all(given))

    def chunk(self, **given: Any) -> Any:
        choices: Sequence[Any] = given.get("choices") or ()
        if (
            len(choices) == 1
            and _is_plain(choices[0], PlainChoice)
            and given.keys() == CHUNK_FIELDS
        ):
            text = choices[0].given[self._text_field]
            if _is_plain(text, PlainDelta):
                text = text.given["content"]
            if type(text) is str:
                return PlainChunk(self._chunk, given, self, text)
        return self._chunk(**_make_all(given))

    def write(self, given: Mapping[str, Any], text: str) -> str:
        """A chunk that was given this, with an ordinary choice."""
        choice = given["choices"][0].given
        token_ids = choice["token_ids"]
        key = ChunkKey(
            given["id"],
            given["object"],
            given["created"],
            given["model"],
            choice["index"],
            token_ids is not None,
        )
        return self._template(key).write(text, token_ids)

    def _make_template(self, key: ChunkKey) -> Template:
        """Of a chunk with a text and ids that no other field holds, as pydantic writes it."""
        text, token_id = secrets.token_hex(16), secrets.randbits(62) | 1 << 62
        token_ids = [token_id] if key.has_token_ids else None
        written = self.make_real(key, text, token_ids).model_dump_json(exclude_unset=True)
        before_text, rest = written.split(f'"{text}"')
        before_ids, end = rest.split(str(token_id)) if key.has_token_ids else (rest, "")
        return Template(before_text, before_ids, end)

    def make_real(self, key: ChunkKey, text: str, token_ids: list[int] | None) -> Any:
        """The same chunk by vLLM's models alone."""
        kind = self._kind
        delta = text if self._delta is None else self._delta(content=text)
        fields = {kind.text: delta, "index": key.choice, "token_ids": token_ids}
        choice = self._choice(**dict.fromkeys(kind.empty), **fields)
        return self._chunk(
            id=key.id, object=key.object, created=key.created, model=key.model, choices=[choice]
        )

    def is_exact(self) -> bool:
        """True if chunks come out byte for byte as vLLM writes them."""
        object_name = self._chunk.model_fields["object"].default
        for token_ids in (None, [], [0, 2**31 - 1]):
            key = ChunkKey(f'"{_TRICKY}', object_name, 1, f"{_TRICKY}\\", 3, token_ids is not None)
            for text in ("", "a", _TRICKY, '"}]}'):
                real = self.make_real(key, text, token_ids).model_dump_json(exclude_unset=True)
                if self._template(key).write(text, token_ids) != real:
                    return False
        self._template.cache_clear()
        return True


def write_chunks_plainly() -> None:
    """Of each kind that this server serves, if chunks then come out as vLLM's own do."""
    for kind in KINDS:
        module = sys.modules.get(kind.module)
        if module is None:
            continue
        try:
            replace_models(module, kind)
        except (AttributeError, TypeError, ValueError, KeyError, OSError) as error:
            # A release that makes them otherwise: it goes on as it would without clairai.
            _log.warning("%s writes every chunk of a stream with pydantic: %s", kind.module, error)


def replace_models(module: ModuleType, kind: ChunkKind) -> None:
    """ValueError or OSError if they must stay vLLM's; a second call does nothing."""
    names = [kind.chunk, kind.choice, *((kind.delta,) if kind.delta else ())]
    chunk, choice, *delta = (getattr(module, name) for name in names)
    if not isinstance(chunk, type):
        return
    source = Path(str(module.__file__)).read_text()
    if re.search(rf"isinstance\([^)]*\b({'|'.join(names)})\b", source):
        raise ValueError("it uses isinstance on one of its models")
    plain = PlainChunks(kind, chunk, choice, delta[0] if delta else None)
    if not plain.is_exact():
        raise ValueError("a template does not give the same bytes")
    setattr(module, kind.chunk, plain.chunk)
    setattr(module, kind.choice, plain.choice)
    if kind.delta is not None:
        setattr(module, kind.delta, plain.delta)
