"""Takes chunks; gives OpenAI's stream as upstream sent it, each choice with its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from clairai.proxy.completions.chunk import ChoiceView, Chunk, edit_chunk, read_echo
from clairai.proxy.completions.request_scores import RequestScores, ScoreSlice
from clairai.proxy.completions.sse import DONE, data_frame
from clairai.proxy.completions.token_text import TokenTextDecoder, TokenTexts
from clairai.proxy.observe.observer import ChoiceResult


class OpenAIStreamWriter:
    """OpenAI's stream; `texts` is there if prompt tokens were asked for."""

    def __init__(
        self, sheet: RequestScores, *, keeps_token_ids: bool, texts: TokenTexts | None
    ) -> None:
        self._sheet = sheet
        self._keeps_ids = keeps_token_ids
        self._texts = texts

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[bytes]:
        del starts
        if chunk.is_empty and not self._keeps_ids:
            return []  # its tokens are told with the next one
        data = self.edited(chunk)
        return [chunk.frame if data is None else data_frame(data)]

    def other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[bytes]:
        del data, chunk
        return [frame]

    @property
    def is_listening(self) -> bool:
        return False  # scores ride in chunks, and there is none without tokens

    def late(self) -> list[bytes]:
        return []

    def edited(self, chunk: Chunk) -> bytes | None:
        """The JSON with what can be told of its choices; None if that is nothing."""
        found = {choice.index: self._fields(choice) for choice in chunk.view.choices}
        added = {index: fields for index, fields in found.items() if fields}
        return edit_chunk(chunk, added, keeps_token_ids=self._keeps_ids)

    def _fields(self, choice: ChoiceView) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if choice.index == 0:
            fields = self._prompt_fields(is_final=choice.finish_reason is not None)
        scores = self._sheet.take(choice.index)
        return fields if scores is None else {**fields, "probe_scores": scores.fields()}

    def _prompt_fields(self, *, is_final: bool) -> dict[str, Any]:
        told = self._sheet.take_prompt(is_final=is_final)
        if told is None:
            return {}
        assert self._texts is not None
        ids = self._sheet.prompt_ids or []
        tokens = {"token_ids": ids, "tokens": self._texts.all_of(ids)}
        made = told.fields()
        return {"prompt_scores": {"names": made.pop("names"), "start": 0, **tokens, **made}}


# MERGED
# Takes chunks; gives named events: steering, token, probe_update, probe_final, done, error.


EventName = Literal["steering", "token", "probe_update", "probe_final", "done", "error"]
# A prompt is told in parts, so that no event is long.
_TOKENS_PER_EVENT: Final = 512


@dataclass(frozen=True)
class NamedEvent:
    """Not numbered yet; `data` is one line of JSON."""

    name: EventName
    data: bytes


def make_event(name: EventName, **fields: Any) -> NamedEvent:
    return NamedEvent(name, msgspec.json.encode(fields))


class NamedEventWriter:
    """The stream of one run."""

    def __init__(self, sheet: RequestScores, texts: TokenTexts) -> None:
        self.finish_reasons: dict[int, str] = {}
        self._sheet = sheet
        self._texts = texts
        self._pieces: dict[int, TokenTextDecoder] = {}
        self._usage = msgspec.Raw(b"null")
        self._is_prompt_shown = False
        self._is_echo_told = False
        self._capture: dict[str, Any] | None = None  # what became of its rows
        self.has_failed = False

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[NamedEvent]:
        self._note(chunk)
        said: list[NamedEvent] = []
        if self.has_failed:
            return said  # an error is the last event
        said += self._echo()
        for choice in chunk.view.choices:
            if choice.index == 0:
                said += self._prompt(is_final=choice.finish_reason is not None)
            said += self._tokens(choice, starts[choice.index])
            said += self._scores(choice.index)
            if choice.finish_reason is not None:
                self.finish_reasons[choice.index] = choice.finish_reason
                said.append(probe_final_event(self._sheet.result(choice.index)))
        return said

    def other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[NamedEvent]:
        del frame
        if self.has_failed:
            return []
        if data == DONE:
            return [self.done()]
        if chunk is None:
            return []
        self._note(chunk)
        if not chunk.view.is_error:
            return []
        self.has_failed = True
        return [make_event("error", error=chunk.view.error)]

    @property
    def is_listening(self) -> bool:
        return self._sheet.is_expecting_rows and not self.has_failed

    def late(self) -> list[NamedEvent]:
        """A choice that has ended says its last scores itself."""
        if self.has_failed:
            return []
        going = self._sheet.running
        said = self._prompt(is_final=False) if 0 in going else []
        return [*said, *(event for choice in going for event in self._scores(choice))]

    def done(self) -> NamedEvent:
        reasons = [self.finish_reasons.get(choice) for choice in self._sheet.choices]
        stops = [self._sheet.result(choice).stop_reason for choice in self._sheet.choices]
        about = {"id": self._sheet.response_id, "model": self._sheet.model}
        ends = {"finish_reasons": reasons, "stop_reasons": stops}
        kept: dict[str, Any] = {} if self._capture is None else {"capture": self._capture}
        weights = self._sheet.echo.weights
        kept |= {} if weights is None else {"weights": weights}
        return make_event("done", **about, **ends, usage=self._usage, **kept)

    def cancelled(self) -> list[NamedEvent]:
        """The end of a run that was stopped: what is known of each choice that had not ended."""
        said: list[NamedEvent] = []
        for choice in self._sheet.choices:
            if choice not in self.finish_reasons:
                self._sheet.finish(choice, "cancelled")
                self.finish_reasons[choice] = "cancelled"
                said += self._scores(choice)
                said.append(probe_final_event(self._sheet.result(choice)))
        return [*said, self.done()]

    def _note(self, chunk: Chunk) -> None:
        view = chunk.view
        if bytes(view.usage) != b"null":
            self._usage = view.usage.copy()
        if not view.choices and view.echo is not None:
            self._capture = read_echo(view.echo).capture

    def _echo(self) -> list[NamedEvent]:
        """Once, and before anything else: what the engine says it does to this request."""
        if self._is_echo_told or self._sheet.raw_echo is None:
            return []
        self._is_echo_told = True
        if self._sheet.echo.steering is None:
            return []  # of a capture, and of weights, the end tells
        return [make_event("steering", clairai=self._sheet.raw_echo)]

    def _tokens(self, choice: ChoiceView, start: int) -> list[NamedEvent]:
        text, token_ids = choice.shown(), choice.token_ids or []
        if not token_ids and not text:
            return []
        if choice.index not in self._pieces:
            self._pieces[choice.index] = TokenTextDecoder(self._texts)
        is_end = choice.finish_reason is not None
        tokens = self._pieces[choice.index].of(token_ids, is_end=is_end)
        return [_token_event("answer", choice.index, start, token_ids, tokens, text)]

    def _scores(self, choice: int) -> list[NamedEvent]:
        told = self._sheet.take(choice)
        return [] if told is None else [_probe_update_event("answer", choice, told)]

    def _prompt(self, *, is_final: bool) -> list[NamedEvent]:
        if not self._sheet.options.prompt_scores or self._sheet.prompt_ids is None:
            return []
        said: list[NamedEvent] = []
        if not self._is_prompt_shown:
            self._is_prompt_shown = True
            said += self._prompt_tokens(self._sheet.prompt_ids)
        told = self._sheet.take_prompt(is_final=is_final)
        if told is None:
            return said
        return [
            *said,
            *(_probe_update_event("prompt", 0, part) for part in told.split(_TOKENS_PER_EVENT)),
        ]

    def _prompt_tokens(self, token_ids: list[int]) -> list[NamedEvent]:
        texts = self._texts.all_of(token_ids)
        starts = range(0, len(token_ids), _TOKENS_PER_EVENT)
        parts = [(at, slice(at, at + _TOKENS_PER_EVENT)) for at in starts]
        return [
            _token_event("prompt", 0, at, token_ids[part], texts[part], "") for at, part in parts
        ]


def probe_final_event(result: ChoiceResult) -> NamedEvent:
    """The event `probe_final` of one choice."""
    probes = result.probes
    return make_event(
        "probe_final",
        choice=result.choice,
        names=[probe.name for probe in probes],
        count=result.count,
        mean=[probe.mean for probe in probes],
        max=[probe.max for probe in probes],
        argmax=[probe.argmax for probe in probes],
        above=[probe.above for probe in probes],
        lost=result.lost,
    )


def _token_event(
    part: str, choice: int, start: int, token_ids: list[int], tokens: list[str], text: str
) -> NamedEvent:
    where = {"part": part, "choice": choice, "start": start}
    return make_event("token", **where, token_ids=token_ids, tokens=tokens, text=text)


def _probe_update_event(part: str, choice: int, told: ScoreSlice) -> NamedEvent:
    return make_event("probe_update", part=part, choice=choice, **told.fields())
