"""What clairai's routes need of vLLM's API server: its engine client and its tokenizer.

AsyncLLM.collective_rpc   v1/engine/async_llm.py   0.26:964   0.32:1205

Runs in: the API server.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from clairai.errors import UnsupportedError
from clairai.wire.control_messages import CONTROL_METHOD


def is_one_of_several_servers(client: Any) -> bool:
    """`--api-server-count` (config/parallel.py, `_api_process_count`, 0.32:443)."""
    config = getattr(client, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    return int(getattr(parallel, "_api_process_count", 1)) > 1


def watch_other_calls(client: Any, during: Callable[[], AbstractContextManager[None]]) -> None:
    """Run every call of the workers that is not ours within `during()`.

    vLLM's own routes for weights, and those of its development mode, call the workers this way.
    """
    original = client.collective_rpc

    @functools.wraps(original)
    async def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == CONTROL_METHOD:
            return await original(method, *args, **kwargs)
        with during():
            return await original(method, *args, **kwargs)

    client.collective_rpc = collective_rpc


def keep_environment() -> None:
    """Have vLLM read its environment variables once, as it does in its other processes.

    envs.enable_envs_cache, called by EngineCore.__init__ (v1/engine/core.py, 0.32:258). Statistics
    look two of them up for every token (v1/metrics/stats.py, 0.32:530).
    """
    enable = getattr(sys.modules.get("vllm.envs"), "enable_envs_cache", None)
    if enable is not None:
        enable()


async def fetch_tokenizer(engine_client: Any) -> Any:
    """EngineClient.get_tokenizer: a coroutine in some releases, a plain method in 0.32
    (v1/engine/async_llm.py:1079).
    """
    found = engine_client.get_tokenizer()
    return await found if inspect.isawaitable(found) else found


def list_token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token, by its id; UnsupportedError if xgrammar cannot read the tokenizer.

    xgrammar knows how the kinds of tokenizers write bytes (GPT-2's alphabet, SentencePiece's
    <0xE4>); vLLM brings it and builds its grammars on the same table
    (v1/structured_output/backend_xgrammar.py, 0.32:46).
    """
    import xgrammar

    stop = [0]  # grammars need a stop token; the bytes do not depend on it
    try:
        if type(tokenizer).__name__ == "MistralTokenizer":  # vLLM's own, not Hugging Face's
            kinds = xgrammar.VocabType
            kind = kinds.RAW if tokenizer.is_tekken else kinds.BYTE_FALLBACK
            info = xgrammar.TokenizerInfo(tokenizer.vocab, vocab_type=kind, stop_token_ids=stop)
        else:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=stop)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"the bytes of {type(tokenizer).__name__}'s tokens are not known ({error}); "
            f"ask without prompt_scores and named events"
        ) from error
    return [bytes(piece) for piece in info.decoded_vocab]
