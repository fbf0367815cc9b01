"""The two forms in which a client gets a scored stream: OpenAI's own, or named events.

Both are `StreamWriter`s of `merger.py`. Runs in: the proxy, on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET

from clairai.proxy.completions.chunk import ChoiceView, Chunk, TokenFrame, edit_chunk, read_echo
from clairai.proxy.completions.request_scores import RequestScores, ScoreSlice
from clairai.proxy.completions.sse import DONE, data_frame
from clairai.proxy.completions.token_text import TokenTextDecoder, TokenTexts
from clairai.proxy.error_reasons import explain_frame
from clairai.proxy.observe.observer import ChoiceResult
from clairai.proxy.schema import (
    DoneEvent,
    ProbeFinalEvent,
    ProbeScores,
    ProbeUpdateEvent,
    PromptScores,
    TokenEvent,
)

EventName = Literal["steering", "token", "probe_update", "probe_final", "done", "error"]
# A prompt is split over several events, so that none is long.
_TOKENS_PER_EVENT: Final = 512


@lru_cache(maxsize=64)
def _encode_names(names: tuple[str, ...]) -> bytes:
    """Most slices have the same names."""
    return msgspec.json.encode(names)


def encode_scores(scores: ScoreSlice) -> bytes:
    """The JSON of these ProbeScores; written out, as it is made for every token."""
    if scores.lost or len(scores.weights) > 1:
        return msgspec.json.encode(ProbeScores(**scores.fields()))
    rows = msgspec.json.encode(scores.scores)
    weights = b',"weights":%d' % scores.weights[0] if scores.weights else b""
    names = _encode_names(scores.names)
    return b'{"names":%b,"start":%d,"scores":%b%b}' % (names, scores.start, rows, weights)


class OpenAIStreamWriter:
    """OpenAI's stream as upstream sends it, with scores in its chunks.

    `texts` is needed if the request asks for the scores of its prompt.
    """

    def __init__(
        self, scores: RequestScores, *, keeps_token_ids: bool, texts: TokenTexts | None
    ) -> None:
        self._scores = scores
        self.keeps_token_ids = keeps_token_ids
        self._texts = texts

    def write_token(self, frame: bytes) -> list[bytes] | None:
        scores = self._scores
        token = TokenFrame.match(frame) if scores.is_streaming else None
        if token is None:
            return None
        scores.add_tokens(token.choice, token.token_ids)
        taken = scores.take(token.choice)
        added = None if taken is None else self._encode(taken)
        return [token.with_scores(added, keeps_token_ids=self.keeps_token_ids)]

    def _encode(self, scores: ScoreSlice) -> bytes | None:
        """The `probe_scores` of a token's frame; None: it has none."""
        return encode_scores(scores)

    def write_chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[bytes]:
        del starts
        if chunk.is_empty and not self.keeps_token_ids:
            return []  # the next chunk carries the scores of its tokens
        data = self.edit(chunk)
        return [chunk.frame if data is None else data_frame(data)]

    def write_other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[bytes]:
        del data, chunk
        return [explain_frame(frame)]

    @property
    def wants_rows(self) -> bool:
        return False  # scores travel in chunks, and there are none without tokens

    def write_scores(self) -> list[bytes]:
        return []

    def edit(self, chunk: Chunk) -> bytes | None:
        """The chunk's JSON with the scores of its choices; None if nothing changes."""
        found = {choice.index: self.take_fields(choice) for choice in chunk.view.choices}
        added = {index: fields for index, fields in found.items() if fields}
        return edit_chunk(chunk, added, keeps_token_ids=self.keeps_token_ids)

    def take_fields(self, choice: ChoiceView) -> dict[str, Any]:
        """The fields of ours that a choice gets now."""
        fields: dict[str, Any] = {}
        if choice.index == 0:
            is_final = choice.finish_reason is not None
            prompt = self._scores.take_prompt(is_final=is_final)
            if prompt is not None:
                fields["prompt_scores"] = self._prompt_scores(prompt)
        scores = self._scores.take(choice.index)
        if scores is not None:
            fields["probe_scores"] = ProbeScores(**scores.fields())
        return fields

    def _prompt_scores(self, prompt: ScoreSlice) -> PromptScores:
        assert self._texts is not None
        token_ids = self._scores.prompt_ids or []
        texts = self._texts.decode(token_ids)
        return PromptScores(token_ids=token_ids, tokens=texts, **prompt.fields())


class QuietStreamWriter(OpenAIStreamWriter):
    """OpenAI's stream as upstream sends it; its scores are only kept (`kept_scores.py`)."""

    def _encode(self, scores: ScoreSlice) -> None:
        del scores

    def take_fields(self, choice: ChoiceView) -> dict[str, Any]:
        super().take_fields(choice)
        return {}


@dataclass(frozen=True)
class NamedEvent:
    """An event that has no number yet; `data` is one line of JSON."""

    name: EventName
    data: bytes


def make_event(name: EventName, data: object) -> NamedEvent:
    return NamedEvent(name, msgspec.json.encode(data))


class NamedEventWriter:
    """Named events: steering, token, probe_update, probe_final, done, error."""

    def __init__(self, scores: RequestScores, texts: TokenTexts) -> None:
        self.has_failed = False
        self._finish_reasons: dict[int, str] = {}
        self._scores = scores
        self._texts = texts
        self._decoders: dict[int, TokenTextDecoder] = {}
        self._usage = msgspec.Raw(b"null")
        self._is_prompt_written = False
        self._is_echo_written = False
        self._capture: dict[str, Any] | None = None  # what became of captured rows

    def write_token(self, frame: bytes) -> None:
        """Events say more of a token than its frame does as bytes."""

    def write_chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[NamedEvent]:
        self._read(chunk)
        events: list[NamedEvent] = []
        if self.has_failed:
            return events  # an error is the last event
        events += self._echo_events()
        for choice in chunk.view.choices:
            if choice.index == 0:
                events += self._prompt_events(is_final=choice.finish_reason is not None)
            events += self._token_events(choice, starts[choice.index])
            events += self._score_events(choice.index)
            if choice.finish_reason is not None:
                self._finish_reasons[choice.index] = choice.finish_reason
                events.append(_final_event(self._scores.result(choice.index)))
        return events

    def write_other(
        self, frame: bytes, data: bytes | None, chunk: Chunk | None
    ) -> list[NamedEvent]:
        del frame
        if self.has_failed:
            return []
        if data == DONE:
            return [self._done_event()]
        if chunk is None:
            return []
        self._read(chunk)
        if not chunk.view.is_error:
            return []
        self.has_failed = True
        return [make_event("error", {"error": chunk.view.error})]

    @property
    def wants_rows(self) -> bool:
        return self._scores.is_expecting_rows and not self.has_failed

    def write_scores(self) -> list[NamedEvent]:
        """Scores between chunks; the last scores of a choice go with the chunk that ends it."""
        if self.has_failed:
            return []
        running = self._scores.running
        events = self._prompt_events(is_final=False) if 0 in running else []
        return [*events, *(event for choice in running for event in self._score_events(choice))]

    def write_cancelled(self) -> list[NamedEvent]:
        """The end of a run that was stopped: all that is known of its running choices."""
        events: list[NamedEvent] = []
        for choice in self._scores.choices:
            if choice not in self._finish_reasons:
                self._scores.finish(choice, "cancelled")
                self._finish_reasons[choice] = "cancelled"
                events += self._score_events(choice)
                events.append(_final_event(self._scores.result(choice)))
        return [*events, self._done_event()]

    def _read(self, chunk: Chunk) -> None:
        view = chunk.view
        if bytes(view.usage) != b"null":
            self._usage = view.usage.copy()
        if not view.choices and view.echo is not None:
            self._capture = read_echo(view.echo).capture

    def _done_event(self) -> NamedEvent:
        scores, weights = self._scores, self._scores.echo.weights
        done = DoneEvent(
            id=scores.response_id,
            model=scores.model,
            finish_reasons=[self._finish_reasons.get(choice) for choice in scores.choices],
            stop_reasons=[scores.result(choice).stop_reason for choice in scores.choices],
            usage=self._usage,  # type: ignore[arg-type]  # encoded already
            capture=UNSET if self._capture is None else self._capture,  # type: ignore[arg-type]
            weights=UNSET if weights is None else weights,
        )
        return make_event("done", done)

    def _echo_events(self) -> list[NamedEvent]:
        """Once and first: what the engine says it does to this request."""
        if self._is_echo_written or self._scores.raw_echo is None:
            return []
        self._is_echo_written = True
        if self._scores.echo.steering is None:
            return []  # captures and weights are in the last event
        return [make_event("steering", {"clairai": self._scores.raw_echo})]

    def _token_events(self, choice: ChoiceView, start: int) -> list[NamedEvent]:
        text, token_ids = choice.new_text(), choice.token_ids or []
        if not token_ids and not text:
            return []
        if choice.index not in self._decoders:
            self._decoders[choice.index] = TokenTextDecoder(self._texts)
        is_end = choice.finish_reason is not None
        tokens = self._decoders[choice.index].decode(token_ids, is_end=is_end)
        return [
            make_event("token", TokenEvent("answer", choice.index, start, token_ids, tokens, text))
        ]

    def _score_events(self, choice: int) -> list[NamedEvent]:
        scores = self._scores.take(choice)
        return [] if scores is None else [_update_event("answer", choice, scores)]

    def _prompt_events(self, *, is_final: bool) -> list[NamedEvent]:
        prompt_ids = self._scores.prompt_ids
        if not self._scores.options.prompt_scores or prompt_ids is None:
            return []
        events: list[NamedEvent] = []
        if not self._is_prompt_written:
            self._is_prompt_written = True
            events += self._prompt_token_events(prompt_ids)
        scores = self._scores.take_prompt(is_final=is_final)
        if scores is not None:
            events += [_update_event("prompt", 0, part) for part in scores.split(_TOKENS_PER_EVENT)]
        return events

    def _prompt_token_events(self, token_ids: list[int]) -> list[NamedEvent]:
        texts = self._texts.decode(token_ids)
        events = []
        for start in range(0, len(token_ids), _TOKENS_PER_EVENT):
            part = slice(start, start + _TOKENS_PER_EVENT)
            token = TokenEvent("prompt", 0, start, token_ids[part], texts[part], "")
            events.append(make_event("token", token))
        return events


def _final_event(result: ChoiceResult) -> NamedEvent:
    probes = result.probes
    final = ProbeFinalEvent(
        choice=result.choice,
        names=[probe.name for probe in probes],
        count=result.count,
        mean=[probe.mean for probe in probes],
        max=[probe.max for probe in probes],
        argmax=[probe.argmax for probe in probes],
        above=[probe.above for probe in probes],
        lost=result.lost,
    )
    return make_event("probe_final", final)


def _update_event(part: Literal["prompt", "answer"], choice: int, scores: ScoreSlice) -> NamedEvent:
    update = ProbeUpdateEvent(part=part, choice=choice, **scores.fields())
    return make_event("probe_update", update)
