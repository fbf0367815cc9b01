"""Frames and bodies as vLLM 0.32 writes them, field by field.

entrypoints/openai/chat_completion/serving.py and completion/serving.py; the engine tests compare
the proxy with the real one.
"""

from __future__ import annotations

import json
from typing import Any

MODEL = "toy"
CREATED = 1_700_000_000


def frame(data: dict[str, Any]) -> bytes:
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def head(*, is_chat: bool, is_stream: bool) -> dict[str, Any]:
    kind = ("chat.completion" if is_chat else "text_completion") + (
        ".chunk" if is_chat and is_stream else ""
    )
    name = "chatcmpl-1" if is_chat else "cmpl-1"
    return {"id": name, "object": kind, "created": CREATED, "model": MODEL}


def response(
    prompt_ids: list[int], token_ids: list[int], text: str, *, status: str, shows_ids: bool
) -> dict[str, Any]:
    """Of /v1/responses; entrypoints/openai/responses/protocol.py, ResponsesResponse."""
    content: list[dict[str, Any]] = [
        {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    ]
    message = {"id": "msg_1", "content": content, "role": "assistant", "type": "message"}
    raw = [(prompt_ids, "Hi"), (token_ids, text)]
    messages = [
        [{"message": words, "tokens": ids, "type": "raw_message_tokens"}] if shows_ids else None
        for ids, words in raw
    ]
    return {
        "id": "resp_1",
        "created_at": CREATED,
        "model": MODEL,
        "object": "response",
        "output": [message] if status != "in_progress" else [],
        "status": status,
        "input_messages": messages[0] if status != "in_progress" else None,
        "output_messages": messages[1] if status != "in_progress" else None,
    }


def response_event(name: str, number: int, fields: dict[str, Any]) -> bytes:
    data = {**fields, "sequence_number": number, "type": name}
    return b"event: " + name.encode() + b"\ndata: " + dumps(data) + b"\n\n"


def role_chunk(choice: int, prompt_ids: list[int] | None) -> dict[str, Any]:
    """The first chunk of a chat, one for each choice."""
    delta = {"role": "assistant", "content": ""}
    made = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
    return {
        **head(is_chat=True, is_stream=True),
        "choices": [made],
        "prompt_token_ids": prompt_ids,
        "prompt_text": None,
    }


def chat_chunk(
    choice: int,
    token_ids: list[int] | None,
    delta: dict[str, Any],
    *,
    finish: str | None = None,
    stop_reason: str | int | None = None,
    logprobs: Any = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "index": choice,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish,
    }
    if finish is not None:
        made["stop_reason"] = stop_reason
    made["token_ids"] = token_ids
    return {**head(is_chat=True, is_stream=True), "choices": [made]}


def text_chunk(
    choice: int,
    token_ids: list[int] | None,
    text: str,
    *,
    prompt_ids: list[int] | None = None,
    finish: str | None = None,
    stop_reason: str | int | None = None,
) -> dict[str, Any]:
    made = {
        "index": choice,
        "text": text,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": stop_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": token_ids,
    }
    return {**head(is_chat=False, is_stream=True), "choices": [made]}


def usage(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_generated,
        "completion_tokens": num_generated,
    }


def usage_chunk(num_prompt: int, num_generated: int, *, is_chat: bool) -> dict[str, Any]:
    made = head(is_chat=is_chat, is_stream=True)
    return {**made, "choices": [], "usage": usage(num_prompt, num_generated)}


def whole(
    answers: list[list[int]],
    texts: list[str],
    prompt_ids: list[int],
    *,
    is_chat: bool,
    shows_ids: bool,
) -> dict[str, Any]:
    """An answer that is not streamed."""
    choices = []
    for index, (token_ids, text) in enumerate(zip(answers, texts, strict=True)):
        said: dict[str, Any] = {"text": text}
        if is_chat:
            said = {"message": {"role": "assistant", "content": text, "tool_calls": []}}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": "length"}
        shown = {"stop_reason": None, "token_ids": token_ids if shows_ids else None}
        if not is_chat:
            shown["prompt_token_ids"] = prompt_ids if shows_ids else None
        choices.append({**choice, **shown})
    count = sum(map(len, answers))
    made = {**head(is_chat=is_chat, is_stream=False), "choices": choices}
    made["usage"] = usage(len(prompt_ids), count)
    if is_chat:
        made["prompt_token_ids"] = prompt_ids if shows_ids else None
    return made
