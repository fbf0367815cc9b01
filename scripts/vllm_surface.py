"""Stores the part of a vLLM release that clairai wraps, calls or reads, from its source.

Nothing is imported: the release need not run on this machine. The tests compare with what is
stored, so that a release that moves, renames or reorders something is noticed by name.
Run: python -m scripts.vllm_surface FOLDER...   (each with a vllm package in it)
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parent.parent
STORE: Final = ROOT / "tests" / "unit" / "compat" / "vllm_surface.json"

Surface = dict[str, str]  # "file: name" to its parameters, or to "attribute"


@dataclass(frozen=True)
class Need:
    """A name of vLLM that clairai relies on."""

    file: str
    name: str  # Class.method, Class.attribute, function or constant
    use: Literal["call", "wrap", "read"]
    first: tuple[str, ...] = ()  # the first parameters, in this order
    named: tuple[str, ...] = ()  # parameters that are given by name

    @property
    def key(self) -> str:
        return f"{self.file}: {self.name}"


def _calls(file: str, name: str, *first: str, named: tuple[str, ...] = ()) -> Need:
    """We call it: with these first, these by name, and nothing else."""
    return Need(file, name, "call", first, named)


def _wraps(file: str, name: str, *first: str, named: tuple[str, ...] = ()) -> Need:
    """vLLM calls it, with whatever else it takes; we look at these."""
    return Need(file, name, "wrap", first, named)


def _reads(file: str, owner: str, *names: str) -> tuple[Need, ...]:
    return tuple(Need(file, f"{owner}.{name}", "read") for name in names)


_CORE, _WORKER = "v1/engine/core.py", "v1/worker/worker_base.py"
_V1, _V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
_V1_BATCH, _V2_BATCH = "v1/worker/gpu_input_batch.py", "v1/worker/gpu/input_batch.py"
_SCHEDULED, _TORCH = "v1/core/sched/output.py", "utils/torch_utils.py"
_MEDIA = "multimodal/inputs.py"
_GROUPS, _MODEL = "distributed/parallel_state.py", "config/model.py"
_ARGUMENTS, _REQUEST = "engine/arg_utils.py", "v1/engine/__init__.py"
_NORMS = "model_executor/layers/layernorm.py"
_CACHE = "v1/core/kv_cache_utils.py"
_SCHEDULER, _KV_BLOCKS = "v1/core/sched/scheduler.py", "v1/core/kv_cache_manager.py"
_CLIENT = "v1/engine/core_client.py"
_PLUGIN = "plugins/endpoint_plugins/interface.py"
_PROGRESS = ("num_computed_tokens", "num_output_tokens", "num_preemptions")
_FACTORY = "distributed/weight_transfer/factory.py"
_TRANSFER, _ENGINE = "distributed/weight_transfer/base.py", "WeightTransferEngine"
_REGISTERED = ("cls", "name", "module_path_or_cls", "class_name")
_BUILT = ("self", "config", "vllm_config", "device", "model")
_GPU_WORKER, _ASYNC = "v1/worker/gpu_worker.py", "v1/engine/async_llm.py"
_RELOAD = "model_executor/model_loader/reload/layerwise.py"
_PARALLEL, _EXECUTORS = "config/parallel.py", "v1/executor"
_MULTIPROC = f"{_EXECUTORS}/multiproc_executor.py"
_EXAMPLE = "distributed/kv_transfer/kv_connector/v1/example_connector.py"
_RUNNER: Final = "GPUModelRunner"

NEEDS: Final[tuple[Need, ...]] = (
    # compat/install.py, compat/find_config.py
    _wraps(_CORE, "EngineCore.preprocess_add_request", "self", "request"),
    _wraps(_CORE, "EngineCore.__init__", "self", "vllm_config"),
    _wraps(_CORE, "EngineCore.collective_rpc", "self", "method", "timeout", "args"),
    _wraps(_CORE, "EngineCore.add_request", "self", "request"),
    _wraps(_CACHE, "generate_block_hash_extra_keys", "request", "start_token_idx", "end_token_idx"),
    _wraps("v1/core/sched/utils.py", "check_stop", "request", "max_model_len"),
    _wraps("v1/core/kv_cache_manager.py", "KVCacheManager.get_computed_blocks", "self", "request"),
    *_reads("v1/core/sched/scheduler.py", "Scheduler", "requests"),
    _wraps(_WORKER, "WorkerBase.__init__", "self", "vllm_config"),
    _wraps(_WORKER, "WorkerWrapperBase.init_worker", "self"),
    _wraps(_ARGUMENTS, "EngineArgs.__post_init__", "self"),
    _wraps(_ARGUMENTS, "AsyncEngineArgs.add_cli_args"),
    *_reads(_ARGUMENTS, "EngineArgs", "additional_config"),
    # compat/kv_connectors.py
    *_reads("v1/core/sched/scheduler.py", "Scheduler", "connector"),
    _wraps(
        *(_EXAMPLE, "ExampleConnector.get_num_new_matched_tokens"),
        *("self", "request", "num_computed_tokens"),
    ),
    _wraps(_EXAMPLE, "ExampleConnector.update_state_after_alloc", "self", "request"),
    _wraps(_EXAMPLE, "ExampleConnector.build_connector_meta", "self", "scheduler_output"),
    _calls(
        *(_EXAMPLE, "ExampleConnector._generate_foldername_debug"),
        *("self", "token_ids", "mm_hashes"),
    ),
    *_reads(_EXAMPLE, "ExampleConnector", "_block_size"),
    *_reads("config/kv_transfer.py", "KVTransferConfig", "kv_connector"),
    *_reads("config/kv_transfer.py", "KVTransferConfig", "kv_connector_module_path"),
    # compat/ranks.py
    _calls(_GROUPS, "get_tp_group"),
    *_reads(_GROUPS, "GroupCoordinator", "cpu_group"),
    *(need for runner in (_V1, _V2) for need in _reads(runner, _RUNNER, "execute_model_state")),
    *(
        need
        for runner in (_V1, _V2)
        for need in _reads(runner, "ExecuteModelState", "hidden_states")
    ),
    # compat/loop_heartbeat.py
    _wraps(_CORE, "EngineCoreProc.run_busy_loop", "self"),
    _wraps(_CORE, "EngineCoreProc._invoke_utility_method", "name", "get_result"),
    *_reads(_CORE, "EngineCoreProc", "input_queue"),
    *_reads(_REQUEST, "EngineCoreRequestType", "WAKEUP"),
    # compat/core_link.py
    *_reads(_ASYNC, "AsyncLLM", "engine_core"),
    *_reads(_CLIENT, "MPClient", "input_socket", "resources"),
    *_reads(_CLIENT, "BackgroundResources", "output_socket"),
    *_reads(_PARALLEL, "ParallelConfig", "enable_elastic_ep"),
    # compat/engine_cores.py, compat/check_engine.py: data parallelism
    *_reads(_CLIENT, "MPClient", "core_engines"),
    _calls(
        *(_CLIENT, "AsyncMPClient._call_utility_async", "self", "method", "*args"),
        named=("engine",),
    ),
    *_reads(_PARALLEL, "ParallelConfig", "data_parallel_size", "data_parallel_size_local"),
    *_reads(_PARALLEL, "ParallelConfig", "data_parallel_external_lb", "data_parallel_hybrid_lb"),
    *_reads(_PARALLEL, "ParallelConfig", "data_parallel_backend", "data_parallel_rank_local"),
    *_reads("config/vllm.py", "VllmConfig", "instance_id"),
    *_reads(_MODEL, "ModelConfig", "is_moe"),
    # compat/pipeline_stages.py
    *_reads(_PARALLEL, "ParallelConfig", "pipeline_parallel_size", "tensor_parallel_size"),
    *_reads(_PARALLEL, "ParallelConfig", "world_size"),
    _calls(_GROUPS, "get_pp_group"),
    _calls(_GROUPS, "get_world_group"),
    _wraps(_GROUPS, "initialize_model_parallel", "tensor_model_parallel_size"),
    *_reads("sequence.py", "IntermediateTensors", "tensors"),
    _wraps(
        *(_V1, f"{_RUNNER}.execute_model"),
        *("self", "scheduler_output", "intermediate_tensors"),
    ),
    *_reads(_WORKER, "WorkerBase", "rank", "model_runner"),
    _wraps(_GPU_WORKER, "Worker.execute_model", "self", "scheduler_output"),
    _wraps(_MULTIPROC, "MultiprocExecutor._get_output_rank", "self"),
    # compat/remote_ranks.py, compat/worker.py: what vLLM does with the answers of ranks
    _wraps(_CORE, "EngineCore._initialize_kv_caches", "self", "vllm_config"),
    _calls(
        *(f"{_EXECUTORS}/abstract.py", "Executor.collective_rpc", "self", "method"),
        named=("timeout", "args"),
    ),
    *_reads(_PARALLEL, "ParallelConfig", "use_ray", "distributed_executor_backend"),
    Need("envs.py", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "read"),
    _wraps(f"{_EXECUTORS}/ray_utils.py", "RayWorkerWrapper.execute_model_ray", "self"),
    _wraps(f"{_EXECUTORS}/ray_utils.py", "get_bundles_sorted_by_node", "placement_group"),
    _wraps(f"{_EXECUTORS}/ray_executor.py", "RayDistributedExecutor._execute_dag", "self"),
    _wraps(f"{_EXECUTORS}/ray_executor_v2.py", "RayExecutorV2._init_executor", "self"),
    _wraps(f"{_EXECUTORS}/ray_executor_v2.py", "RayWorkerProc.initialize_worker", "self"),
    _wraps("ray/ray_env.py", "get_env_vars_to_copy", "exclude_vars"),
    # compat/failed_requests.py
    *(_wraps(runner, f"{_RUNNER}.sample_tokens", "self") for runner in (_V1, _V2)),
    _wraps("v1/outputs.py", "AsyncModelRunnerOutput.get_output", "self"),
    _wraps(
        *(_SCHEDULER, "Scheduler.update_from_output"),
        *("self", "scheduler_output", "model_runner_output"),
    ),
    _calls(_SCHEDULER, "Scheduler.finish_requests", "self", "request_ids", "finished_status"),
    *_reads(_SCHEDULER, "Scheduler", "kv_cache_manager", "kv_cache_config"),
    _calls(_KV_BLOCKS, "KVCacheManager.get_block_ids", "self", "request_id"),
    _calls(_KV_BLOCKS, "KVCacheManager.evict_blocks", "self", "block_ids"),
    *_reads(_KV_BLOCKS, "KVCacheManager", "block_pool"),
    *_reads("v1/core/block_pool.py", "BlockPool", "null_block"),
    *_reads(_CACHE, "KVCacheBlock", "block_id"),
    *_reads("v1/kv_cache_interface.py", "KVCacheConfig", "kv_cache_groups"),
    *_reads("v1/kv_cache_interface.py", "KVCacheGroupSpec", "kv_cache_spec"),
    *_reads("v1/kv_cache_interface.py", "KVCacheSpec", "block_size"),
    *_reads(_SCHEDULED, "SchedulerOutput", "scheduled_cached_reqs"),
    *_reads(_SCHEDULED, "CachedRequestData", "req_ids", "num_computed_tokens"),
    *_reads(_SCHEDULED, "NewRequestData", "num_computed_tokens"),
    *_reads("v1/request.py", "RequestStatus", "FINISHED_ERROR"),
    *_reads("v1/request.py", "Request", "request_id", "client_index", "trace_headers"),
    _calls("v1/request.py", "Request.get_finished_reason", "self"),
    _calls("v1/request.py", "Request.take_events", "self"),
    *_reads(_REQUEST, "EngineCoreOutput", "request_id", "new_token_ids", "finish_reason"),
    *_reads(_REQUEST, "EngineCoreOutput", "stop_reason", "events", "trace_headers"),
    *_reads(_REQUEST, "EngineCoreOutputs", "outputs"),
    # compat/admission.py
    *_reads("sampling_params.py", "SamplingParams", "extra_args", "skip_reading_prefix_cache"),
    *_reads(_REQUEST, "EngineCoreRequest", "request_id", "external_req_id", "sampling_params"),
    _calls("v1/request.py", "Request.is_finished", "self"),
    *_reads(_REQUEST, "EngineCoreRequest", "prompt_token_ids"),
    *_reads("v1/request.py", "Request", "all_token_ids", "num_tokens", "status", "stop_reason"),
    *_reads("v1/request.py", "Request", "num_computed_tokens", "num_output_tokens"),
    *_reads("v1/request.py", "Request", "sampling_params"),
    *_reads("v1/request.py", "RequestStatus", "FINISHED_STOPPED"),
    # compat/engine_core.py
    *_reads("v1/executor/uniproc_executor.py", "UniProcExecutor", "driver_worker"),
    *_reads(_WORKER, "WorkerWrapperBase", "worker"),
    # compat/api_server.py
    _calls("tokenizers/registry.py", "cached_tokenizer_from_config", "model_config"),
    *_reads(_MODEL, "ModelConfig", "skip_tokenizer_init"),
    _calls(_MODEL, "ModelConfig.get_vocab_size", "self"),
    # compat/step_hooks.py, compat/worker.py
    _wraps(_V1, f"{_RUNNER}._prepare_inputs", "self", "scheduler_output", "num_scheduled_tokens"),
    *_reads(_V1, _RUNNER, "input_batch", "positions", "input_ids", "max_num_tokens", "device"),
    *_reads(_V1_BATCH, "InputBatch", "num_reqs", "req_ids", "num_computed_tokens_cpu"),
    _wraps(_V1, f"{_RUNNER}._sample", "self", "logits", "spec_decode_metadata"),
    *_reads(_V1, _RUNNER, "speculative_config"),
    *_reads(_V1_BATCH, "InputBatch", "vocab_size"),
    *_reads("v1/outputs.py", "SamplerOutput", "sampled_token_ids"),
    *_reads(_SCHEDULED, "SchedulerOutput", "scheduled_spec_decode_tokens"),
    *_reads("config/speculative.py", "SpeculativeConfig", "method"),
    _wraps("v1/sample/rejection_sampler.py", "RejectionSampler.parse_output"),
    _wraps(_V2, f"{_RUNNER}.prepare_inputs", "self", "scheduler_output"),
    _wraps(_V2, f"{_RUNNER}.execute_model", "self", "scheduler_output", named=("dummy_run",)),
    *_reads(_V2, _RUNNER, "req_states", "input_buffers", "max_num_tokens", "device"),
    *_reads(_V2_BATCH, "InputBuffers", "positions", "input_ids"),
    *_reads(_V2_BATCH, "InputBatch", "req_ids", "num_scheduled_tokens", "num_computed_tokens_np"),
    _wraps(_V2, f"{_RUNNER}.sample", "self", "hidden_states", "input_batch"),
    *_reads(_V2_BATCH, "InputBatch", "num_draft_tokens_per_req", "query_start_loc"),
    *_reads(_V2, _RUNNER, "speculative_config"),
    *_reads(_SCHEDULED, "NewRequestData", "prefill_token_ids"),
    *(_calls(runner, f"{_RUNNER}._dummy_run", "self", "num_tokens") for runner in (_V1, _V2)),
    *(_calls(runner, f"{_RUNNER}.get_model", "self") for runner in (_V1, _V2)),
    *_reads(_SCHEDULED, "SchedulerOutput", "scheduled_new_reqs", "finished_req_ids"),
    *_reads(_SCHEDULED, "NewRequestData", "req_id", "prompt_token_ids", "sampling_params"),
    *_reads(_SCHEDULED, "NewRequestData", "mm_features"),
    *_reads(_MEDIA, "MultiModalFeatureSpec", "modality", "mm_position"),
    *_reads(_MEDIA, "PlaceholderRange", "offset", "length", "is_embed"),
    # compat/model_ops.py
    _calls(
        *(_TORCH, "direct_register_custom_op", "op_name", "op_func"),
        named=("mutates_args", "fake_impl", "target_lib", "dispatch_key"),
    ),
    _calls(_TORCH, "_encode_layer_name", "layer_name"),
    Need(_TORCH, "LayerNameType", "read"),
    _calls("forward_context.py", "get_forward_context"),
    *_reads("forward_context.py", "ForwardContext", "no_compile_layers"),
    _wraps(_NORMS, "RMSNorm.forward_native", "self", "x", "residual"),
    # compat/worker.py, compat/tap_proof.py
    _wraps(_WORKER, "WorkerBase.load_model", "self"),
    _wraps(_WORKER, "WorkerBase.compile_or_warm_up_model", "self"),
    _wraps(_WORKER, "WorkerBase.shutdown", "self"),
    _wraps("config/vllm.py", "VllmConfig.compute_hash", "self"),
    *_reads("config/compilation.py", "CompilationConfig", "static_forward_context"),
    *_reads("config/scheduler.py", "SchedulerConfig", "max_num_seqs"),
    *_reads(_MODEL, "ModelConfig", "dtype", "hf_text_config", "served_model_name", "model"),
    _calls(_MODEL, "ModelConfig.get_hidden_size", "self"),
    # compat/doctor.py
    _calls(_ARGUMENTS, "EngineArgs.create_engine_config", "self"),
    _calls("model_executor/model_loader/utils.py", "initialize_model", "vllm_config"),
    _calls("config/vllm.py", "set_current_vllm_config", "vllm_config"),
    _calls(
        *(_GROUPS, "init_distributed_environment", "world_size", "rank"),
        named=("distributed_init_method", "local_rank", "backend"),
    ),
    _calls(
        *(_GROUPS, "ensure_model_parallel_initialized"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    ),
    _calls(_GROUPS, "destroy_model_parallel"),
    _calls(_GROUPS, "destroy_distributed_environment"),
    # compat/weight_transfer.py, server/engine_rpc.py
    _calls(_FACTORY, "WeightTransferEngineFactory.register_engine", *_REGISTERED),
    *_reads(_FACTORY, "WeightTransferEngineFactory", "_registry"),
    _calls(_TRANSFER, f"{_ENGINE}.__init__", *_BUILT),
    _wraps(_TRANSFER, f"{_ENGINE}.update_weights", "self", "update_info"),
    _wraps(_TRANSFER, f"{_ENGINE}.receive_weights", "self", "update_info"),
    *(
        _wraps(_TRANSFER, f"{_ENGINE}.{name}", "self")
        for name in ("start_weight_update", "finish_weight_update", "shutdown")
    ),
    _calls(_GPU_WORKER, "Worker.start_weight_update", "self"),
    _calls(_GPU_WORKER, "Worker.update_weights", "self", "update_info"),
    _calls(_GPU_WORKER, "Worker.finish_weight_update", "self"),
    *_reads(_GPU_WORKER, "Worker", "weight_transfer_engine"),
    # compat/worker.py, compat/engine_core.py, compat/api_server.py
    _wraps(_GPU_WORKER, "Worker.reload_weights", "self"),
    *_reads("v1/request.py", "Request", *_PROGRESS),
    *_reads("v1/core/sched/scheduler.py", "Scheduler", "requests"),
    _calls(_RELOAD, "initialize_layerwise_reload", "model"),
    _calls(_RELOAD, "finalize_layerwise_processing", "model", "model_config"),
    _calls(_ASYNC, "AsyncLLM.pause_generation", "self", named=("mode", "clear_cache")),
    _calls(_ASYNC, "AsyncLLM.resume_generation", "self"),
    _calls("entrypoints/llm.py", "LLM.reset_prefix_cache", "self"),
    # plugin.py, http.py, library/engine_control.py
    Need("plugins/__init__.py", "plugins_loaded", "read"),
    _wraps(_PLUGIN, "EndpointPlugin.attach_router", "self", "app"),
    _wraps(_PLUGIN, "EndpointPlugin.init_state", "self", "engine_client", "state", "args"),
    _calls("entrypoints/llm.py", "LLM.collective_rpc", "self", "method", named=("args",)),
    _wraps(_ASYNC, "AsyncLLM.collective_rpc", "self", "method", named=("args",)),
)


def surface(package: Path) -> Surface:
    """What the release has of NEEDS; what it lacks is left out."""
    files = {need.file for need in NEEDS if (package / need.file).exists()}
    found: dict[str, Surface] = {
        file: dict(_defined(ast.parse((package / file).read_text()))) for file in files
    }
    return {
        need.key: found[need.file][need.name]
        for need in NEEDS
        if need.name in found.get(need.file, {})
    }


def sources(package: Path) -> dict[str, str]:
    """The code of each function of NEEDS that we wrap or call, without comments and docstrings."""
    found: dict[str, str] = {}
    for file in {need.file for need in NEEDS if need.use != "read"}:
        if (package / file).exists():
            functions = dict(_functions(ast.parse((package / file).read_text()).body))
            found |= {f"{file}: {name}": code for name, code in functions.items()}
    return {need.key: found[need.key] for need in NEEDS if need.key in found}


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in _statements(body):
        if isinstance(node, ast.ClassDef) and not prefix:
            yield from _functions(node.body, f"{node.name}.")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            yield prefix + node.name, ast.unparse(node)


def unmet(found: Mapping[str, str]) -> list[str]:
    """What clairai could not do with such a surface, one line each."""
    return [fault for need in NEEDS if (fault := _fault(need, found.get(need.key)))]


def _fault(need: Need, has: str | None) -> str:
    if has is None:
        return f"{need.key} is gone"
    if need.use == "read":
        return ""
    if has == "attribute":
        return f"{need.key} is no function"
    parameters = has.split(", ") if has else []
    names = [parameter.rstrip("=") for parameter in parameters]
    if names[: len(need.first)] != list(need.first):
        return f"{need.key}({has}) does not begin with {', '.join(need.first)}"
    if unknown := [name for name in need.named if name not in names]:
        return f"{need.key}({has}) takes no {', '.join(unknown)}"
    further = [name for name in parameters[len(need.first) :] if name.isidentifier()]
    if need.use == "call" and (asked := [name for name in further if name not in need.named]):
        return f"{need.key}({has}) cannot be called without {', '.join(asked)}"
    return ""


def _defined(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module defines, with their parameters; of classes also what they hold."""
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef):
            for name, what in _members(node):
                yield f"{node.name}.{name}", what
        else:
            yield from _named(node)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, and of the branches in it: `if HAS_X: ... else: ...`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _members(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(owner):
        is_target = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_target and ast.unparse(node.value) == "self":  # type: ignore[attr-defined]
            yield node.attr, "attribute"  # type: ignore[attr-defined]
    for node in _statements(owner.body):
        yield from _named(node)


def _named(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        is_property = any(ast.unparse(d).endswith("property") for d in node.decorator_list)
        yield node.name, "attribute" if is_property else _parameters(node.args)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, "attribute"


def _parameters(given: ast.arguments) -> str:
    """Names in order; `=` after one that may be left out; `*` before those given by name only."""
    listed = [*given.posonlyargs, *given.args]
    num_plain = len(listed) - len(given.defaults)
    names = [arg.arg + "=" * (index >= num_plain) for index, arg in enumerate(listed)]
    if given.vararg or given.kwonlyargs:
        names.append(f"*{given.vararg.arg if given.vararg else ''}")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    names += [arg.arg + "=" * (default is not None) for arg, default in pairs]
    return ", ".join(names + ([f"**{given.kwarg.arg}"] if given.kwarg else []))


def version_of(package: Path) -> str:
    found = re.search(r"version = '([0-9.]+)", (package / "_version.py").read_text())
    if found is None:
        raise SystemExit(f"{package}/_version.py names no version; give the folder of a release")
    return found[1].rstrip(".")


def main() -> int:
    stored: dict[str, Surface] = json.loads(STORE.read_text()) if STORE.exists() else {}
    for folder in map(Path, sys.argv[1:]):
        found = surface(folder / "vllm")
        stored[version_of(folder / "vllm")] = found
        print(f"{version_of(folder / 'vllm')}: {len(found)} names", *unmet(found), sep="\n  ")
    STORE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
