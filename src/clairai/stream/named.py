"""Takes chunks; gives named events: steering, token, probe_update, probe_final, done, error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from clairai.stream.chunk import ChoiceView, Chunk, read_echo
from clairai.stream.lane import Slice
from clairai.stream.observe import ChoiceResult
from clairai.stream.sheet import Sheet
from clairai.stream.sse import DONE
from clairai.stream.vocabulary import Pieces, Texts

Name = Literal["steering", "token", "probe_update", "probe_final", "done", "error"]
# A prompt is told in parts, so that no event is long.
_TOKENS_PER_EVENT: Final = 512


@dataclass(frozen=True)
class Event:
    """Not numbered yet; `data` is one line of JSON."""

    name: Name
    data: bytes


def event(name: Name, **fields: Any) -> Event:
    return Event(name, msgspec.json.encode(fields))


class NamedVoice:
    """The stream of one run."""

    def __init__(self, sheet: Sheet, texts: Texts) -> None:
        self.finish_reasons: dict[int, str] = {}
        self._sheet = sheet
        self._texts = texts
        self._pieces: dict[int, Pieces] = {}
        self._usage = msgspec.Raw(b"null")
        self._is_prompt_shown = False
        self._is_echo_told = False
        self._capture: dict[str, Any] | None = None  # what became of its rows
        self.has_failed = False

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[Event]:
        self._note(chunk)
        said: list[Event] = []
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
                said.append(final(self._sheet.result(choice.index)))
        return said

    def other(self, frame: bytes, data: bytes | None, chunk: Chunk | None) -> list[Event]:
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
        return [event("error", error=chunk.view.error)]

    @property
    def is_listening(self) -> bool:
        return self._sheet.is_expecting and not self.has_failed

    def late(self) -> list[Event]:
        """A choice that has ended says its last scores itself."""
        if self.has_failed:
            return []
        going = [choice for choice in self._sheet.choices if choice not in self._sheet.ended]
        said = self._prompt(is_final=False) if 0 in going else []
        return [*said, *(event for choice in going for event in self._scores(choice))]

    def done(self) -> Event:
        reasons = [self.finish_reasons.get(choice) for choice in self._sheet.choices]
        stops = [self._sheet.result(choice).stop_reason for choice in self._sheet.choices]
        about = {"id": self._sheet.response_id, "model": self._sheet.model}
        ends = {"finish_reasons": reasons, "stop_reasons": stops}
        kept: dict[str, Any] = {} if self._capture is None else {"capture": self._capture}
        weights = self._sheet.told.weights
        kept |= {} if weights is None else {"weights": weights}
        return event("done", **about, **ends, usage=self._usage, **kept)

    def cancelled(self) -> list[Event]:
        """The end of a run that was stopped: what is known of each choice that had not ended."""
        said: list[Event] = []
        for choice in self._sheet.choices:
            if choice not in self.finish_reasons:
                self._sheet.finish(choice, "cancelled")
                self.finish_reasons[choice] = "cancelled"
                said += self._scores(choice)
                said.append(final(self._sheet.result(choice)))
        return [*said, self.done()]

    def _note(self, chunk: Chunk) -> None:
        view = chunk.view
        if bytes(view.usage) != b"null":
            self._usage = view.usage.copy()
        if not view.choices and view.echo is not None:
            self._capture = read_echo(view.echo).capture

    def _echo(self) -> list[Event]:
        """Once, and before anything else: what the engine says it does to this request."""
        if self._is_echo_told or self._sheet.echo is None:
            return []
        self._is_echo_told = True
        if self._sheet.told.steering is None:
            return []  # of a capture, and of weights, the end tells
        return [event("steering", clairai=self._sheet.echo)]

    def _tokens(self, choice: ChoiceView, start: int) -> list[Event]:
        text, token_ids = choice.shown(), choice.token_ids or []
        if not token_ids and not text:
            return []
        if choice.index not in self._pieces:
            self._pieces[choice.index] = Pieces(self._texts)
        is_end = choice.finish_reason is not None
        tokens = self._pieces[choice.index].of(token_ids, is_end=is_end)
        return [_token("answer", choice.index, start, token_ids, tokens, text)]

    def _scores(self, choice: int) -> list[Event]:
        told = self._sheet.take(choice)
        return [] if told is None else [_update("answer", choice, told)]

    def _prompt(self, *, is_final: bool) -> list[Event]:
        if not self._sheet.asked.prompt_scores or self._sheet.prompt_ids is None:
            return []
        said: list[Event] = []
        if not self._is_prompt_shown:
            self._is_prompt_shown = True
            said += self._prompt_tokens(self._sheet.prompt_ids)
        told = self._sheet.take_prompt(is_final=is_final)
        if told is None:
            return said
        return [*said, *(_update("prompt", 0, part) for part in told.parts(_TOKENS_PER_EVENT))]

    def _prompt_tokens(self, token_ids: list[int]) -> list[Event]:
        texts = self._texts.all_of(token_ids)
        starts = range(0, len(token_ids), _TOKENS_PER_EVENT)
        parts = [(at, slice(at, at + _TOKENS_PER_EVENT)) for at in starts]
        return [_token("prompt", 0, at, token_ids[part], texts[part], "") for at, part in parts]


def final(result: ChoiceResult) -> Event:
    """The event `probe_final` of one choice."""
    probes = result.probes
    return event(
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


def _token(
    part: str, choice: int, start: int, token_ids: list[int], tokens: list[str], text: str
) -> Event:
    where = {"part": part, "choice": choice, "start": start}
    return event("token", **where, token_ids=token_ids, tokens=tokens, text=text)


def _update(part: str, choice: int, told: Slice) -> Event:
    return event("probe_update", part=part, choice=choice, **told.fields())
