"""Sends many requests of every kind at once to a proxy with a real engine."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.http.answers import (
    CHAT,
    TEXT,
    CollectedScores,
    chunks,
    collect_event_scores,
    collect_scores,
    events,
)

WORDS = ["the", "sea", "a", "lighthouse", "wrote", "🙂", "über", "naïve", "code", "for", "return"]


@dataclass
class Sent:
    """One request and what came of it."""

    path: str
    body: dict[str, Any]
    status: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)  # generated, by choice
    prompt_ids: list[int] = field(default_factory=list)
    told: dict[int, CollectedScores] = field(default_factory=dict)

    @property
    def is_named(self) -> bool:
        return bool(self.body["clairai"].get("events") == "named")


def plan(count: int, seed: int, model: str) -> list[Sent]:
    """Requests of every kind; half share a beginning, so that the prefix cache has work."""
    rng = random.Random(seed)  # noqa: S311  # a load, not a secret
    shared = [rng.randrange(5, 30_000) for _ in range(80)]
    return [_next(rng, shared, model) for _ in range(count)]


def _next(rng: random.Random, shared: list[int], model: str) -> Sent:
    clairai: dict[str, Any] = {"prompt_scores": rng.random() < 0.3}
    common = {
        "model": model,
        "max_tokens": rng.randrange(1, 25),
        "temperature": 1.0,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "ignore_eos": True,
        "return_token_ids": True,
        "clairai": clairai,
    }
    kind = rng.random()
    common["stream"] = kind < 0.6
    if kind < 0.2:
        clairai["events"] = "named"
        clairai["prompt_scores"] = True
    if rng.random() < 0.5:
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 30)))
        return Sent(CHAT, {**common, "messages": [{"role": "user", "content": text}]})
    own = [rng.randrange(5, 30_000) for _ in range(rng.randrange(1, 40))]
    return Sent(TEXT, {**common, "prompt": shared[: rng.randrange(0, 60)] + own})


async def send_all(url: str, requests: list[Sent], *, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession() as session:

        async def send(request: Sent) -> None:
            async with places, session.post(url + request.path, json=request.body) as answer:
                request.status = answer.status
                read(request, await answer.read())

        await asyncio.gather(*map(send, requests))


def read(request: Sent, raw: bytes) -> None:
    """Take the answer apart; token ids are the engine's own."""
    assert request.status == 200, raw[:500]
    if request.is_named:
        _read_named(request, raw)
        return
    parts = chunks(raw) if request.body["stream"] else [json.loads(raw)]
    request.told = collect_scores(parts)
    for part in parts:
        request.prompt_ids = part.get("prompt_token_ids") or request.prompt_ids
        for choice in part["choices"]:
            request.prompt_ids = choice.get("prompt_token_ids") or request.prompt_ids
            request.ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])


def _read_named(request: Sent, raw: bytes) -> None:
    found = events(raw)
    assert found[-1].name == "done", found[-1]
    request.told = collect_event_scores(found)
    prompt: dict[str, Any] = {"scores": [], "tokens": []}
    for event in found:
        if event.name == "token" and event.data["part"] == "prompt":
            request.prompt_ids += event.data["token_ids"]
            prompt["tokens"] += event.data["tokens"]
        elif event.name == "token":
            request.ids.setdefault(event.data["choice"], []).extend(event.data["token_ids"])
        elif event.data.get("part") == "prompt":
            prompt["scores"] += event.data["scores"]
    request.told[0].prompt = prompt
