"""Installs the hooks of clairai in a vLLM process whose engine asks for it.

WorkerBase.__init__                    v1/worker/worker_base.py   0.26:44    0.32:44
EngineArgs.create_engine_config        engine/arg_utils.py                   0.32:2205
EngineCore.preprocess_add_request      v1/engine/core.py          0.26:954   0.32:1089
EngineCore.collective_rpc              v1/engine/core.py          0.26:945   0.32:1073
EngineCore.add_request                 v1/engine/core.py          0.26:431   0.32:508
generate_block_hash_extra_keys         v1/core/kv_cache_utils.py  0.26:558   0.32:625
KVCacheManager.get_computed_blocks     v1/core/kv_cache_manager.py 0.26:207  0.32:264
WeightTransferEngineFactory            distributed/weight_transfer/factory.py 0.26:41 0.32:41
EngineCoreProc.run_busy_loop           v1/engine/core.py          0.26:1358  0.32:1547
EngineCore._initialize_kv_caches       v1/engine/core.py          0.26:243   0.32:261

The first four and the last look for the key in their own engine's config, the others for rules or a
plan in the request, and all pass straight through without. The busy loop is wrapped only under a
launcher that watches heartbeats. `check_stop`, which runs for every token, is wrapped
when the first request with rules comes (stop_rules.py). Runs in: every vLLM process of the engine.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, Final

from clairai.compat.find_config import CONFIG_KEY, is_asked_by
from clairai.local.heartbeat import VARIABLE
from clairai.wire.control_messages import CONTROL_METHOD

TRANSFER_BACKEND: Final = "clairai_ipc"  # of --weight-transfer-config
UPDATE_METHOD: Final = "update_weights"  # of vLLM's worker, and of our backend there
# usage/usage_lib.py UsageContext, 0.26 and 0.32: engines whose outputs Python code gets itself.
OFFLINE: Final = ("LLM_CLASS", "ENGINE_CONTEXT")


def install_hooks() -> None:
    """Wrap vLLM's classes; a second call, or one in a child that inherited them, does nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, CONTROL_METHOD):
        return
    from clairai.compat import remote_ranks, stop_rules, worker

    setattr(WorkerBase, CONTROL_METHOD, worker.handle_control)
    WorkerBase.__init__ = _wrap_worker_init(WorkerBase.__init__)
    EngineArgs.create_engine_config = wrap_create_engine_config(EngineArgs.create_engine_config)
    EngineCore.preprocess_add_request = _wrap_preprocess_add_request(
        EngineCore.preprocess_add_request
    )
    EngineCore.collective_rpc = _wrap_collective_rpc(EngineCore.collective_rpc)
    EngineCore.add_request = stop_rules.wrap_add_request(EngineCore.add_request)
    EngineCore._initialize_kv_caches = remote_ranks.wrap_initialize_kv_caches(
        EngineCore._initialize_kv_caches
    )
    if VARIABLE in os.environ:
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCoreProc

        from clairai.compat.loop_heartbeat import install_heartbeat

        install_heartbeat(EngineCoreProc, (EngineCoreRequestType.WAKEUP, None))
    _wrap_prefix_cache()
    register_backend()


def accepts_weights(vllm_config: Any) -> bool:
    """True if the engine was started with our backend of --weight-transfer-config."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == TRANSFER_BACKEND


def is_enabled_for(vllm_config: Any) -> bool:
    config = vllm_config.additional_config
    return isinstance(config, dict) and CONFIG_KEY in config


def _wrap_worker_init(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_enabled_for(self.vllm_config):
            from clairai.compat import loop_heartbeat, worker

            loop_heartbeat.register_worker()
            worker.prepare(self)

    return init


def wrap_create_engine_config(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_asked_by(os.environ):
            self.additional_config = {CONFIG_KEY: {}, **(self.additional_config or {})}
        config = original(self, *args, **kwargs)
        call = inspect.signature(original).bind(self, *args, **kwargs)
        if is_enabled_for(config):
            _check_core_settings(config)
            _tell_cores(config)
            _keep_scores_offline(config, call.arguments.get("usage_context"))
            _hand_on_environment(config)
        return config

    return create_engine_config


def _check_core_settings(config: Any) -> None:
    from clairai.compat.check_engine import check_core_settings
    from clairai.compat.engine_core import get_settings

    check_core_settings(config, get_settings(config).capture_settings)


def _tell_cores(config: Any) -> None:
    """Cores get this config, and vLLM tells those of a model without experts of no others.

    ParallelConfig.reconfigure_for_independent_dp_rank, 0.32:1172.
    """
    from clairai.compat.check_engine import CORES_KEY

    parallel = getattr(config, "parallel_config", None)
    num_cores = int(getattr(parallel, "data_parallel_size", 1))
    if num_cores > 1:
        config.additional_config = {**config.additional_config, CORES_KEY: num_cores}


def _hand_on_environment(config: Any) -> None:
    from clairai.compat.check_engine import uses_ray
    from clairai.compat.remote_ranks import hand_on_environment

    if uses_ray(config):
        hand_on_environment(os.environ)


def _keep_scores_offline(config: Any, usage: Any) -> None:
    """Without a word of the settings, an LLM keeps scores; a server has the proxy to read them."""
    from clairai.compat.check_engine import count_cores

    given = config.additional_config[CONFIG_KEY]
    is_asked = isinstance(given, dict) and given.get("scores") is None
    is_offline = getattr(usage, "name", "") in OFFLINE and count_cores(config) == 1
    # A reader of a ring in GPU memory takes memory of the GPU, which nobody asked it to.
    if is_asked and given.get("ring_home") != "device" and is_offline:
        config.additional_config = {
            **config.additional_config,
            CONFIG_KEY: {**given, "scores": True},
        }


def _wrap_preprocess_add_request(original: Any) -> Any:
    from clairai.compat import kv_connectors
    from clairai.compat.admission import Admission
    from clairai.compat.check_engine import find_core_number
    from clairai.compat.engine_core import (
        get_core_control,
        make_core_capture_resolver,
        make_used_streams,
    )

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if request.sampling_params is None or not is_enabled_for(self.vllm_config):
            return original(self, request)
        if not hasattr(self, "clairai_admission"):
            resolver = make_core_capture_resolver(self)
            used = make_used_streams(self)
            kv_connectors.connect(self.scheduler)
            self.clairai_admission = Admission(
                get_core_control(self),
                resolver,
                used,
                has_other_cores=find_core_number(self.vllm_config) is not None,
            )
        admission: Admission = self.clairai_admission
        prepared = admission.prepare(request)
        try:
            admitted = original(self, request)
        except BaseException:
            admission.reject(prepared)
            raise
        admission.accept(prepared, admitted[0])
        return admitted

    return preprocess_add_request


def _wrap_collective_rpc(original: Any) -> Any:
    from clairai.compat.engine_core import get_core_control, update_weights
    from clairai.compat.loop_heartbeat import expect_long_call
    from clairai.compat.pipeline_stages import put_publisher_first

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = is_enabled_for(self.vllm_config)
        is_update = is_ours and method == UPDATE_METHOD and accepts_weights(self.vllm_config)
        if not is_update and (method != CONTROL_METHOD or not is_ours):
            with expect_long_call(self, method, ()):
                return original(self, method, *args, **kwargs)
        call = inspect.signature(original).bind(self, method, *args, **kwargs)

        def ask_workers(message: bytes) -> Any:
            timeout_s = call.arguments.get("timeout")
            replies = original(self, CONTROL_METHOD, timeout_s, (message,))
            return put_publisher_first(self.vllm_config, replies)

        if is_update:
            with expect_long_call(self, method, ()):
                return update_weights(self, call.arguments, ask_workers)
        (message,) = call.arguments["args"]
        with expect_long_call(self, method, call.arguments["args"]):
            return get_core_control(self).control(message, ask_workers)

    return collective_rpc


def _wrap_prefix_cache() -> None:
    """vLLM looks these up by name in their own modules; copies elsewhere are for events."""
    from vllm.v1.core import kv_cache_manager, kv_cache_utils

    from clairai.compat import capture_setup, engine_core

    original = kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.generate_block_hash_extra_keys = engine_core.wrap_extra_keys(original)
    cache = kv_cache_manager.KVCacheManager
    cache.get_computed_blocks = capture_setup.wrap_get_computed_blocks(cache.get_computed_blocks)


def register_backend() -> None:
    """By name alone: vLLM imports the backend when a config asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        module = "clairai.compat.weight_transfer"
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, module, "ClairaiIpcEngine")
    register_trainer()


def register_trainer() -> None:
    """The trainer's side, by name alone too.

    WeightTransferTrainerFactory  distributed/weight_transfer/factory.py  0.28 to 0.32:113
    """
    from vllm.distributed.weight_transfer import factory

    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is not None and TRANSFER_BACKEND not in trainers._registry:
        module = "clairai.compat.weight_trainer"
        trainers.register_engine(TRANSFER_BACKEND, module, "ClairaiTrainerEngine")
