"""Reads what a client got from the proxy: chunks, events, and the scores of each choice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.http.fake import PROMPT, score

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def asking(**clairai: Any) -> dict[str, Any]:
    """A streamed chat that asks for scores."""
    return {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "clairai": clairai}


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of every frame; a stream must end as OpenAI's does."""
    datas = [frame.removeprefix(b"data: ") for frame in raw.split(b"\n\n") if frame]
    assert datas[-1] == b"[DONE]", datas[-1]
    return [json.loads(data) for data in datas[:-1]]


@dataclass
class CollectedScores:
    """What a client knows of one choice."""

    scores: list[dict[str, float | None]] = field(default_factory=list)
    lost: int = 0
    text: str = ""
    finish_reason: str | None = None
    prompt: dict[str, Any] | None = None


def collect_scores(chunks: list[dict[str, Any]]) -> dict[int, CollectedScores]:
    """By choice; no score comes twice, out of order, or after the choice has ended."""
    found: dict[int, CollectedScores] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found.setdefault(choice["index"], CollectedScores())
        assert one.finish_reason is None, "a chunk after the last of its choice"
        if scores := choice.get("probe_scores"):
            add_scores(one, scores)
        one.prompt = choice.get("prompt_scores", one.prompt)
        delta = choice.get("delta") or choice.get("message") or {}
        one.text += choice.get("text") or delta.get("content") or ""
        one.finish_reason = choice["finish_reason"]
    return found


def add_scores(one: CollectedScores, scores: dict[str, Any]) -> None:
    assert scores["start"] == len(one.scores), "a score twice, or out of order"
    assert scores["scores"], "an object that says nothing"
    for row in scores["scores"]:
        one.scores.append(dict(zip(scores["names"], row, strict=True)))
    one.lost += scores.get("lost", 0)


def expected(token_ids: list[int]) -> list[dict[str, float | None]]:
    """The scores of a whole answer: the last token sampled is never forwarded."""
    positions = range(len(PROMPT), len(PROMPT) + len(token_ids))
    rows = [score(*row) for row in zip(token_ids, positions, strict=True)]
    made: list[dict[str, float | None]] = [
        {"token": token, "position": position} for token, position in rows
    ]
    return [*made[:-1], {"token": None, "position": None}]


def without_ours(raw: bytes) -> bytes:
    """The stream with our fields cut out of it, as bytes."""
    return b"\n\n".join(map(_cut, raw.split(b"\n\n")))


def _cut(frame: bytes) -> bytes:
    if not frame.startswith(b"data: {"):
        return frame
    for name in (b"probe_scores", b"prompt_scores"):
        begin = frame.find(b',"%s":{' % name)
        while begin >= 0:
            end = frame.index(b"}", begin)  # our objects hold no other
            frame = frame[:begin] + frame[end + 1 :]
            begin = frame.find(b',"%s":{' % name)
    return frame


@dataclass(frozen=True)
class Event:
    number: int
    name: str
    data: dict[str, Any]


def events(raw: bytes) -> list[Event]:
    """Named events; comments are left out."""
    found = []
    for frame in raw.decode().split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        number, name, data = frame.split("\n")
        found.append(
            Event(
                int(number.removeprefix("id: ")),
                name.removeprefix("event: "),
                json.loads(data.removeprefix("data: ")),
            )
        )
    return found


def collect_event_scores(found: list[Event]) -> dict[int, CollectedScores]:
    """The same as `collect_scores`, from a named stream."""
    made: dict[int, CollectedScores] = {}
    for event in found:
        if event.data.get("part") != "answer":
            continue
        one = made.setdefault(event.data["choice"], CollectedScores())
        if event.name == "probe_update":
            add_scores(one, event.data)
        else:
            one.text += event.data["text"]
    return made
