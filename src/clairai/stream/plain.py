"""Takes chunks; gives OpenAI's stream as upstream sent it, each choice with its scores."""

from __future__ import annotations

from typing import Any

from clairai.stream.chunk import ChoiceView, Chunk, edited
from clairai.stream.sheet import Sheet
from clairai.stream.sse import frame_of
from clairai.stream.vocabulary import Texts


class PlainVoice:
    """OpenAI's stream; `texts` is there if prompt tokens were asked for."""

    def __init__(self, sheet: Sheet, *, keeps_ids: bool, texts: Texts | None) -> None:
        self._sheet = sheet
        self._keeps_ids = keeps_ids
        self._texts = texts

    def chunk(self, chunk: Chunk, starts: dict[int, int]) -> list[bytes]:
        del starts
        if chunk.is_empty and not self._keeps_ids:
            return []  # its tokens are told with the next one
        data = self.edited(chunk)
        return [chunk.frame if data is None else frame_of(data)]

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
        return edited(chunk, added, keeps_ids=self._keeps_ids)

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
