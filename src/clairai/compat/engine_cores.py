"""The engine cores behind vLLM's AsyncLLM: one, or with data parallelism several.

MPClient.core_engines               v1/engine/core_client.py   0.32:731
AsyncMPClient._call_utility_async   v1/engine/core_client.py   0.32:1279

Runs in: the API server, or the user's process with an AsyncLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from clairai.local.private_socket import runtime_dir
from clairai.wire.control_messages import CONTROL_METHOD


def find_core_calls(client: Any) -> list[Callable[[bytes], Awaitable[list[bytes]]]]:
    """For each engine core behind vLLM's AsyncLLM, in the order of their numbers, how to ask it.

    `AsyncLLM.collective_rpc` asks all of them and gives the first one's replies alone.
    """
    core_client = getattr(client, "engine_core", None)
    return [
        functools.partial(_call_core, core_client, core)
        for core in getattr(core_client, "core_engines", ())
    ]


async def _call_core(core_client: Any, core: bytes, message: bytes) -> list[bytes]:
    replies: list[bytes] = await core_client._call_utility_async(
        "collective_rpc", CONTROL_METHOD, None, (message,), None, engine=core
    )
    return replies


def find_runtime_dir(client: Any) -> Path:
    """The folder of the sockets of this engine's cores."""
    from clairai.compat.engine_core import get_settings

    return runtime_dir(get_settings(client.vllm_config).runtime_dir)
