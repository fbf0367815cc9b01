"""Makes sure of an engine whose ranks Ray starts: each has clairai, and readers can reach the ring.

EngineCore._initialize_kv_caches          v1/engine/core.py               0.26:243  0.32:261
Executor.collective_rpc                   v1/executor/abstract.py         0.32:177
RayExecutorV2                             v1/executor/ray_executor_v2.py  0.32:239
RayDistributedExecutor                    v1/executor/ray_executor.py     0.32:66
RayWorkerWrapper.execute_model_ray        v1/executor/ray_utils.py        0.32:124
get_env_vars_to_copy                      vllm/ray/ray_env.py             0.32:56

Ray starts each rank on a node of its cluster, in that node's environment. vLLM gives the first
ranks to the node of the engine core, if that has a device; a placement group or
VLLM_RAY_BUNDLE_INDICES may say otherwise. The rank with the ring has to be where its readers are,
and a node may lack clairai: so the engine core asks all ranks once, before it serves. Runs in: the
engine core, and the process that makes its config.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

import msgspec

from clairai.compat.check_engine import uses_ray
from clairai.compat.find_config import CONFIG_KEY, PROBE_VARIABLES
from clairai.compat.pipeline_stages import find_publisher_rank, put_publisher_first
from clairai.errors import HandshakeError, UnsupportedError, quote
from clairai.local.private_socket import connect, runtime_dir
from clairai.wire import control_messages

RUNTIME_VARIABLE: Final = "CLAIRAI_RUNTIME_DIR"
# What RayDistributedExecutor hands to its workers beside vLLM's own variables, with commas between;
# RayExecutorV2 hands all.
PREFIXES_VARIABLE: Final = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
NAMES_VARIABLE: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
ANSWER_TIMEOUT_S: Final = 60.0


def hand_on_environment(environ: MutableMapping[str, str]) -> None:
    """Have vLLM give ranks what clairai reads from the environment.

    And the folder of our sockets by name: Ray starts a rank with another XDG_RUNTIME_DIR, or none.
    """
    environ.setdefault(RUNTIME_VARIABLE, str(runtime_dir()))
    _add(environ, PREFIXES_VARIABLE, f"{CONFIG_KEY.upper()}_")
    for name in PROBE_VARIABLES:
        _add(environ, NAMES_VARIABLE, name)


def _add(environ: MutableMapping[str, str], variable: str, value: str) -> None:
    given = [one.strip() for one in environ.get(variable, "").split(",") if one.strip()]
    if value not in given:
        environ[variable] = ",".join([*given, value])


def wrap_initialize_kv_caches(original: Any) -> Any:
    """_initialize_kv_caches(vllm_config): the first forwards of all ranks.

    They have loaded the model before. When it returns they are ready to serve.
    """

    @functools.wraps(original)
    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        if not uses_ray(vllm_config) or CONFIG_KEY not in (vllm_config.additional_config or {}):
            return original(self, vllm_config)
        require_clairai(self.model_executor)
        result = original(self, vllm_config)
        require_ring(self.model_executor, vllm_config)
        return result

    return initialize_kv_caches


def require_clairai(executor: Any) -> None:
    """Refuse to go on unless every rank has clairai.

    One without would not take part in the forwards that prove taps, and the others would wait.
    """
    try:
        _ask(executor, control_messages.ListProbes())
    except Exception as error:
        raise UnsupportedError(
            f"not every rank of this engine answers clairai ({quote(str(error), 200)}): a rank "
            "without taps would neither be checked nor steered; install the same clairai on every "
            "node of the Ray cluster, and see that VLLM_PLUGINS and CLAIRAI_DISABLE of a node do "
            "not leave it out"
        ) from error


def require_ring(executor: Any, vllm_config: Any) -> None:
    """Refuse to serve unless the ring can be reached from here, where its readers are."""
    replies = _ask(executor, control_messages.Describe())
    first = put_publisher_first(vllm_config, replies)[0]
    described = msgspec.msgpack.decode(first, type=control_messages.ControlReply)
    if not isinstance(described, control_messages.Description):
        raise UnsupportedError(
            f"the rank with the ring does not describe it ({quote(str(described), 200)}); see the "
            "log of that rank, and install the same clairai on every node of the Ray cluster"
        )
    _require_reachable(Path(described.socket), find_publisher_rank(vllm_config))


def _ask(executor: Any, control: control_messages.Control) -> list[bytes]:
    """The replies of all ranks."""
    found: list[bytes] = executor.collective_rpc(
        control_messages.CONTROL_METHOD,
        timeout=ANSWER_TIMEOUT_S,
        args=(msgspec.msgpack.encode(control),),
    )
    return found


def _require_reachable(socket: Path, rank: int) -> None:
    """By a connection: a folder of the same name may be that of another machine."""
    try:
        connect(socket, timeout_s=0.0, error=HandshakeError).close()
    except (OSError, HandshakeError) as error:
        raise UnsupportedError(
            f"rank {rank}, which has the ring, is on another node than the engine core: nobody "
            f"here listens at {quote(str(socket))} ({error}), so no reader could attach; start "
            "vLLM on a node with a free device, to which vLLM then gives the first ranks, leave "
            f"VLLM_RAY_BUNDLE_INDICES out, and set the same {RUNTIME_VARIABLE} on both"
        ) from error
