"""What an ordinary chunk of a chat costs vLLM's API server: with its models, and from a template.

Run: python -m bench.stream_chunks [--chunks 20000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from clairai.compat.stream_chunks import KINDS, write_chunks_plainly

CHAT: Final = KINDS[0]
Make = Callable[..., Any]


def write(chunk: Make, choice: Make, delta: Make, token_id: int) -> str:
    """As vLLM's generator of chats does it (chat_completion/serving.py, 0.32:754)."""
    one = choice(
        index=0,
        delta=delta(content=" token"),
        logprobs=None,
        finish_reason=None,
        token_ids=[token_id],
    )
    about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    written: str = chunk(choices=[one], **about).model_dump_json(exclude_unset=True)
    return written


def measure(makes: tuple[Make, Make, Make], num_chunks: int) -> float:
    """Microseconds a chunk."""
    begun_s = time.perf_counter()
    for token_id in range(num_chunks):
        write(*makes, token_id)
    return (time.perf_counter() - begun_s) / num_chunks * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000)
    num_chunks = parser.parse_args().chunks
    from vllm.entrypoints.openai.chat_completion import serving

    names = (CHAT.chunk, CHAT.choice, str(CHAT.delta))
    models = [getattr(serving, name) for name in names]
    write_chunks_plainly()
    ways = {
        "models": tuple(models),
        "models without validation": tuple(model.model_construct for model in models),
        "template": tuple(getattr(serving, name) for name in names),
    }
    for way, makes in ways.items():
        sys.stdout.write(f"{way}: {measure(makes, num_chunks):.1f} us\n")


if __name__ == "__main__":
    main()
