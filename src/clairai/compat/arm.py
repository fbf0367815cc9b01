"""Takes a vLLM process that will hold an engine with taps; gives it all the wraps there are.

WorkerBase.__init__                    v1/worker/worker_base.py   0.26:44    0.32:44
EngineCore.preprocess_add_request      v1/engine/core.py          0.26:954   0.32:1089
EngineCore.collective_rpc              v1/engine/core.py          0.26:945   0.32:1073
EngineCore.add_request                 v1/engine/core.py          0.26:431   0.32:508
generate_block_hash_extra_keys         v1/core/kv_cache_utils.py  0.26:558   0.32:625
KVCacheManager.get_computed_blocks     v1/core/kv_cache_manager.py 0.26:207  0.32:264
WeightTransferEngineFactory            distributed/weight_transfer/factory.py 0.26:41 0.32:41

The first three look for the key in their own engine's config, the others for a course, rules or an
order in the request, and pass straight through without. What is on the way of every token is
wrapped when the first request with rules comes (stops.py).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from clairai.compat.sight import KEY

METHOD: Final = "clairai_control"
BACKEND: Final = "clairai_ipc"  # of --weight-transfer-config


def arm() -> None:
    """Install the wraps; a second call, or a child that inherited them, changes nothing."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "clairai_control"):
        return
    from clairai.compat import stops, worker

    WorkerBase.clairai_control = worker.control
    WorkerBase.__init__ = _with_taps(WorkerBase.__init__)
    EngineCore.preprocess_add_request = _with_marks(EngineCore.preprocess_add_request)
    EngineCore.collective_rpc = _with_desk(EngineCore.collective_rpc)
    EngineCore.add_request = stops.with_watch(EngineCore.add_request)
    _wrap_functions()
    _register_backend()


def takes_weights(vllm_config: Any) -> bool:
    """Whether the engine was started with our backend of --weight-transfer-config."""
    asked = getattr(vllm_config, "weight_transfer_config", None)
    return getattr(asked, "backend", None) == BACKEND


def is_armed_for(vllm_config: Any) -> bool:
    given = vllm_config.additional_config
    return isinstance(given, dict) and KEY in given


def _with_taps(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_armed_for(self.vllm_config):
            from clairai.compat import worker

            worker.prepare(self)

    return init


def _with_marks(original: Any) -> Any:
    from clairai.compat.core import desk_of, resolver_of
    from clairai.compat.requests import Reception

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if request.sampling_params is None or not is_armed_for(self.vllm_config):
            return original(self, request)
        if not hasattr(self, "clairai_reception"):
            self.clairai_reception = Reception(desk_of(self), resolver_of(self))
        given = self.clairai_reception.mark(request)
        try:
            admitted = original(self, request)
        except BaseException:
            self.clairai_reception.turn_away(given)
            raise
        self.clairai_reception.admit(given, admitted[0])
        return admitted

    return preprocess_add_request


def _with_desk(original: Any) -> Any:
    from clairai.compat.core import desk_of

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method != METHOD or not is_armed_for(self.vllm_config):
            return original(self, method, *args, **kwargs)
        given = inspect.signature(original).bind(self, method, *args, **kwargs)

        def ask_workers(message: bytes) -> Any:
            given.arguments["args"] = (message,)
            return original(*given.args, **given.kwargs)

        (message,) = given.arguments["args"]
        return desk_of(self).control(message, ask_workers)

    return collective_rpc


def _register_backend() -> None:
    """The engine itself is imported when a config asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        module = "clairai.compat.weights"
        WeightTransferEngineFactory.register_engine(BACKEND, module, "ClairaiIpcEngine")


def _wrap_functions() -> None:
    """Their own modules look them up by name at every call; copies elsewhere are for events."""
    from vllm.v1.core import kv_cache_manager, kv_cache_utils

    from clairai.compat import captures, core

    original = kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.generate_block_hash_extra_keys = core.with_keys(original)
    cache = kv_cache_manager.KVCacheManager
    cache.get_computed_blocks = captures.with_wanted_rows(cache.get_computed_blocks)
