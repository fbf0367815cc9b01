"""The engine cores behind vLLM's AsyncLLM: one, or with data parallelism several.

MPClient.core_engines               v1/engine/core_client.py   0.32:731
AsyncMPClient._call_utility_async   v1/engine/core_client.py   0.32:1279

Runs in: the API server, or the user's process with an AsyncLLM.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

from clairai.compat.install import UPDATE_METHOD
from clairai.local.private_socket import runtime_dir
from clairai.weights.trainer_session import write_state
from clairai.wire.control_messages import CONTROL_METHOD
from clairai.wire.weights_messages import WeightsState

INIT_METHOD: Final = "init_weight_transfer_engine"  # of vLLM's worker, as UPDATE_METHOD


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


def is_core_group(client: Any) -> bool:
    """True if its cores are asked as a group: there are several, or might be on other machines.

    config/parallel.py data_parallel_hybrid_lb, 0.26 and 0.32
    """
    config = getattr(client, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    is_hybrid = bool(getattr(parallel, "data_parallel_hybrid_lb", False))
    return is_hybrid or len(find_core_calls(client)) > 1


class WeightTaker(Protocol):
    """Takes new weights for all cores."""

    folder: Path  # of their sockets

    async def describe_weights(self) -> WeightsState: ...

    async def plan_begun(self, manifest: bytes) -> None: ...

    async def commit_begun(self, manifest: bytes) -> None: ...


def share_weight_calls(client: Any, cores: WeightTaker) -> None:
    """Let the calls of vLLM's trainers reach all cores or none; they come by `collective_rpc`.

    AsyncLLM.init_weight_transfer_engine, update_weights   v1/engine/async_llm.py   0.32:1315, 1340
    vLLM would ask the cores one by one, and drop the replies of all but the first.
    """
    original = client.collective_rpc

    @functools.wraps(original)
    async def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in (INIT_METHOD, UPDATE_METHOD):
            return await original(method, *args, **kwargs)
        call = inspect.signature(original).bind(method, *args, **kwargs).arguments
        if method == UPDATE_METHOD:
            from clairai.compat.engine_core import read_update_info

            plan, manifest = read_update_info(call)
            if plan is not None:
                await cores.plan_begun(plan)
            if manifest is not None:
                await cores.commit_begun(manifest)
            return [None]
        info = dict((call.get("kwargs") or {}).get("init_info") or {})
        session = info.pop("session", "")
        if session:  # of all cores: each would name its own ranks alone
            write_state(cores.folder, session, await cores.describe_weights())
        return await original(method, kwargs={"init_info": info})

    client.collective_rpc = collective_rpc


def find_runtime_dir(client: Any) -> Path:
    """The folder of the sockets of this engine's cores."""
    from clairai.compat.engine_core import get_settings

    return runtime_dir(get_settings(client.vllm_config).runtime_dir)
