"""What clairai adds to vLLM's engine core: control of steering and weights, and prefix-cache keys.

EngineCore.collective_rpc              v1/engine/core.py          0.26:945   0.32:1073
generate_block_hash_extra_keys         v1/core/kv_cache_utils.py  0.26:558   0.32:625
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from clairai.compat.capture_setup import make_capture_resolver
from clairai.compat.change_steering import change_stream_steering
from clairai.compat.check_engine import (
    check_steering_mode,
    find_core_number,
    shares_api_server,
)
from clairai.compat.count_layers import count_layers
from clairai.compat.extra_args import read_cache_keys
from clairai.compat.find_config import CONFIG_KEY
from clairai.compat.pipeline_stages import find_publisher_rank
from clairai.engine.capture.capture_resolver import CaptureResolver
from clairai.engine.core_control import AskWorkers, CoreControl
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.engine.used_streams import UsedStreams
from clairai.errors import WeightsBusyError, WeightsError
from clairai.probe.bank import EngineBank
from clairai.settings import ResolvedSettings, Settings, resolve_settings
from clairai.store.stored_streams import StoredStreams
from clairai.weights.manifest import changes_model, parse_manifest

MIN_GATE_SLOTS: Final = 4096
_CONTROL: Final = "clairai_core_control"


class CompileKey(dict[str, Any]):
    """What the compiled graph depends on, as vLLM hashes it; it carries the settings it came from.

    It stands in additional_config, so it survives every copy that vLLM makes of a config. An
    attribute of the config would not: multimodal models copy it field by field, and refuse what is
    no field (config/utils.py `replace`, 0.26 and 0.32:121).
    """

    def __init__(self, settings: Settings, factors: Mapping[str, Any]) -> None:
        super().__init__(factors)
        self.settings = settings


def get_settings(vllm_config: Any) -> Settings:
    """The engine's settings, also after the compile key has taken their place in the config."""
    given = vllm_config.additional_config[CONFIG_KEY]
    return given.settings if isinstance(given, CompileKey) else Settings.read(given, os.environ)


def resolve_engine_settings(vllm_config: Any) -> ResolvedSettings:
    num_layers = count_layers(vllm_config.model_config)
    return resolve_settings(get_settings(vllm_config), num_layers=num_layers, environ=os.environ)


def get_core_control(core: Any) -> CoreControl:
    """Made when first needed: vLLM loads the plugin before the core has its executor."""
    found: CoreControl | None = vars(core).get(_CONTROL)
    if found is None:
        # Two threads may get here at once: setdefault makes both use the same one.
        found = vars(core).setdefault(_CONTROL, _make_core_control(core))
    assert found is not None
    return found


def _make_core_control(core: Any) -> CoreControl:
    resolved = resolve_engine_settings(core.vllm_config)
    registry = make_registry(core.vllm_config, resolved)
    change = None if registry is None else functools.partial(change_stream_steering, core, registry)
    guard, bank = functools.partial(require_idle, core), functools.partial(find_local_bank, core)
    num_ranks = core.vllm_config.parallel_config.world_size
    return CoreControl(
        registry,
        resolved.probes,
        change,
        guard,
        bank,
        num_ranks,
        find_publisher_rank(core.vllm_config),
        is_one_of_several=shares_api_server(core.vllm_config),
    )


def update_weights(core: Any, called: Mapping[str, Any], ask_workers: AskWorkers) -> list[None]:
    """Do what vLLM's callers ask of `update_weights` on all ranks, or on none.

    AsyncLLM.update_weights   v1/engine/async_llm.py   0.26, 0.32:1340: kwargs["update_info"]
    Asked of the ranks themselves, one that raises would leave the replies of the others in vLLM's
    queues, for the next call to find (v1/executor/multiproc_executor.py collective_rpc, 0.32).
    """
    plan, manifest = read_update_info(called)
    get_core_control(core).update_begun(plan, manifest, ask_workers)
    return [None] * core.vllm_config.parallel_config.world_size


def read_update_info(called: Mapping[str, Any]) -> tuple[bytes | None, bytes | None]:
    """The plan or the manifest in a call of `collective_rpc("update_weights", ...)`."""
    info = (called.get("kwargs") or {}).get("update_info")
    if info is None:
        info = next(iter(called.get("args") or ()), None)
    if not isinstance(info, dict) or len(info) != 1 or not {*info} <= {"plan", "manifest"}:
        raise WeightsError(
            "backend clairai_ipc takes a plan or a manifest in update_info; use "
            "clairai.weights.Sender, or vLLM's trainer with the backend's name"
        )
    given = {kind: str(text).encode() for kind, text in info.items()}
    return given.get("plan"), given.get("manifest")


def find_local_bank(core: Any) -> EngineBank | None:
    """The worker's bank if the worker is in this process, else None.

    UniProcExecutor.driver_worker  v1/executor/uniproc_executor.py, 0.26 and 0.32
    """
    wrapper = getattr(core.model_executor, "driver_worker", None)
    publisher = getattr(getattr(wrapper, "worker", None), "clairai_step_publisher", None)
    return None if publisher is None else publisher.bank


def require_idle(core: Any, manifest: bytes) -> None:
    """Refuse new weights while requests run: a request ends with the weights it began with."""
    if not changes_model(parse_manifest(manifest)):
        return
    requests = list(core.scheduler.requests.values())
    unfinished = Counter(id(getattr(one, "clairai_stream_owner", None)) for one in requests)
    is_shared = shares_api_server(core.vllm_config)
    begun = sum(
        _has_begun(request, unfinished) or (is_shared and _is_a_choice(request))
        for request in requests
    )
    if begun:
        raise WeightsBusyError(
            f"{begun} requests have begun with the weights that serve; weights change when they "
            f"have ended: POST /v1/weights/commit waits for that"
        )


def _has_begun(request: Any, unfinished: Counter[int]) -> bool:
    """True if it has run, or if another choice of the same request (n > 1) has run and ended.

    vLLM's pause ends when nothing runs (v1/core/sched/scheduler.py get_num_unfinished_requests,
    0.26 and 0.32), while preempted requests and a request's next choices wait in the queue.
    """
    if request.num_computed_tokens or request.num_output_tokens or request.num_preemptions:
        return True
    owner = getattr(request, "clairai_stream_owner", None)
    return owner is not None and owner.num_admitted > unfinished[id(owner)]


def _is_a_choice(request: Any) -> bool:
    """True for one of the answers (n > 1) to a request: others may have begun on other cores."""
    owner = getattr(request, "clairai_stream_owner", None)
    return owner is not None and request.request_id != owner.parent


def make_core_capture_resolver(core: Any) -> CaptureResolver:
    return make_capture_resolver(core.vllm_config, resolve_engine_settings(core.vllm_config))


def make_used_streams(core: Any) -> UsedStreams:
    """Of several cores, none looks into the folders: streams of captured requests are drawn."""
    if find_core_number(core.vllm_config) is not None:
        return UsedStreams()
    captures = get_settings(core.vllm_config).capture_settings
    folders = () if captures is None else captures.folders
    return UsedStreams(StoredStreams(folders) if folders else None)


def make_registry(vllm_config: Any, resolved: ResolvedSettings) -> SteeringRegistry | None:
    """None for an engine that does not steer; raises what is wrong with the settings' vectors."""
    settings = resolved.settings
    if not settings.is_steering:
        return None
    check_steering_mode(vllm_config)
    model = vllm_config.model_config
    slots = count_gate_slots(vllm_config)
    registry = SteeringRegistry(
        points=resolved.points,
        width=model.get_hidden_size(),
        limits=SteeringLimits(settings.steer_rows, settings.steer_programs, slots),
        model=get_model_name(vllm_config),
        can_skip_special=not model.skip_tokenizer_init,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    registry.put(resolved.vectors, "add")
    registry.set_probes({probe.name: probe for probe in resolved.probes})
    return registry


def count_gate_slots(vllm_config: Any) -> int:
    """Slots for requests whose gates have memory: preempted ones keep theirs beside the batch's."""
    return max(MIN_GATE_SLOTS, 4 * int(vllm_config.scheduler_config.max_num_seqs))


def wrap_extra_keys(original: Any) -> Any:
    """Wrap `generate_block_hash_extra_keys(request, start, end, mm index)`.

    A block's hash includes what steered its tokens. Ours is a tagged pair at the end: 0.32 takes
    the first part of the keys off again for its events.
    """

    @functools.wraps(original)
    def extra_keys(request: Any, start: int, end: int, mm_index: int) -> Any:
        keys, next_index = original(request, start, end, mm_index)
        ours = read_cache_keys(request.sampling_params)
        key = None if ours is None else ours.key(end)
        if key is None:
            return keys, next_index
        return (*(keys or ()), (CONFIG_KEY, key)), next_index

    return extra_keys


def get_model_name(config: Any) -> str:
    """The name users know the model by: what the server calls it, else the end of its path."""
    served = config.model_config.served_model_name
    name = served[0] if isinstance(served, list) else served
    return str(name or config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
