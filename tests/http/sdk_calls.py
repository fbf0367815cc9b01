"""Calls the proxy with the official `openai` package and prints what it returns, as JSON.

Run as a script, in a process of its own: the package is whichever comes first on the path.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

MODEL = "toy"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SCORED: dict[str, Any] = {"clairai": {"probes": "all", "prompt_scores": True}}
ENTRY = {"vector": "calm", "scale": 2.0, "when": "generation", "gate": {"probe": "token"}}
STEERED: dict[str, Any] = {"clairai": {"steer": [ENTRY], "stop": [{"probe": "token"}]}}


def gathered(chunks: list[Any]) -> dict[str, Any]:
    """Text and scores by choice, as a user of the SDK would put them together."""
    texts: dict[int, str] = {}
    scores: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        delta = getattr(choice, "delta", None)
        said = choice.text if delta is None else delta.content
        texts[choice.index] = texts.get(choice.index, "") + (said or "")
        extra = (choice.model_extra or {}).get("probe_scores")
        if extra is not None:
            scores.setdefault(choice.index, []).extend(extra["scores"])
    return {"texts": texts, "scores": scores}


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **more)


def calls(client: openai.OpenAI) -> dict[str, Any]:
    plain, scored = chat(client), chat(client, extra_body=SCORED)
    found: dict[str, Any] = {
        "version": openai.__version__,
        "models": [model.id for model in client.models.list()],
        "whole": plain.choices[0].message.content,
        "whole_extra": sorted(plain.choices[0].model_extra or {}),
        "scored": scored.choices[0].message.content,
        "scored_extra": sorted(scored.choices[0].model_extra or {}),
        "stream": gathered(list(chat(client, stream=True))),
        "stream_scored": gathered(list(chat(client, stream=True, n=2, extra_body=SCORED))),
    }
    options = {"include_usage": True}
    last = list(chat(client, stream=True, stream_options=options, extra_body=SCORED))[-1]
    found["usage"] = last.usage.completion_tokens
    text = client.completions.create(model=MODEL, prompt="Hi", stream=True, extra_body=SCORED)
    found["completion"] = gathered(list(text))
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=SCORED) as it:
        found["assembled"] = it.until_done().get_final_completion().choices[0].message.content
    found["error"] = _error(client)
    return found | steered(client)


def steered(client: openai.OpenAI) -> dict[str, Any]:
    """What was applied: of an answer, and of each chunk of a stream."""
    answer = chat(client, extra_body=STEERED)
    every = list(chat(client, stream=True, extra_body=STEERED))
    return {
        "steered": (answer.model_extra or {}).get("clairai"),
        "stop_reason": (answer.choices[0].model_extra or {}).get("stop_reason"),
        "stream_steered": [(chunk.model_extra or {}).get("clairai") for chunk in every],
    }


def _error(client: openai.OpenAI) -> list[Any]:
    try:
        chat(client, extra_body={"clairai": {"bogus": 1}})
    except openai.BadRequestError as error:
        return [error.status_code, error.code, error.param]
    return []


async def async_call(url: str) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body=SCORED
        )
        return gathered([chunk async for chunk in stream])


def main() -> None:
    url = sys.argv[1]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=20) as client:
        found = calls(client)
    found["asynchronous"] = asyncio.run(async_call(url))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
