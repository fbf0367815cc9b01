"""Takes vLLM's engine client; gives what its engine shares, and word of what others ask it.

AsyncLLM.collective_rpc   v1/engine/async_llm.py   0.26:964   0.32:1205
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from clairai.compat.arm import METHOD


def is_one_of_many(client: Any) -> bool:
    """`--api-server-count` (config/parallel.py, `_api_process_count`, 0.32:443)."""
    config = getattr(client, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    return int(getattr(parallel, "_api_process_count", 1)) > 1


def watch_others(client: Any, elsewhere: Callable[[], AbstractContextManager[None]]) -> None:
    """vLLM's own routes for weights, and its development mode's, call the workers this way."""
    original = client.collective_rpc

    @functools.wraps(original)
    async def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == METHOD:
            return await original(method, *args, **kwargs)
        with elsewhere():
            return await original(method, *args, **kwargs)

    client.collective_rpc = collective_rpc
