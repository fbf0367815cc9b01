"""Takes vLLM's engine core; gives it a desk for steering, and keys that keep the KV cache right.

EngineCore.collective_rpc              v1/engine/core.py          0.26:945   0.32:1073
generate_block_hash_extra_keys         v1/core/kv_cache_utils.py  0.26:558   0.32:625
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any, Final

from clairai.compat.capture_setup import make_capture_resolver
from clairai.compat.change_steering import change_stream_steering
from clairai.compat.extra_args import read_cache_keys
from clairai.compat.find_config import CONFIG_KEY
from clairai.engine.capture.capture_resolver import CaptureResolver
from clairai.engine.core_control import CoreControl
from clairai.engine.steer.steering_registry import SteeringLimits, SteeringRegistry
from clairai.errors import WeightsBusyError
from clairai.probe.bank import EngineBank
from clairai.settings import ResolvedSettings, Settings, resolve_settings
from clairai.weights.manifest import changes_model, parse_manifest

MIN_GATE_SLOTS: Final = 4096
_CONTROL: Final = "clairai_core_control"
_SETTINGS: Final = "clairai_settings"


def save_settings(vllm_config: Any, settings: Settings) -> None:
    """The worker's fingerprint takes their place in a config it may share with the core."""
    object.__setattr__(vllm_config, _SETTINGS, settings)


def get_settings(vllm_config: Any) -> Settings:
    kept = getattr(vllm_config, _SETTINGS, None)
    return kept or Settings.read(vllm_config.additional_config[CONFIG_KEY], os.environ)


def get_core_control(core: Any) -> CoreControl:
    """Made when first asked for: the plugin is loaded while the core is being made."""
    found: CoreControl | None = vars(core).get(_CONTROL)
    if found is None:
        # Two threads may come here first; setdefault lets one of the two desks be the one.
        found = vars(core).setdefault(_CONTROL, _make_core_control(core))
    assert found is not None
    return found


def _make_core_control(core: Any) -> CoreControl:
    vllm_config = core.vllm_config
    settings = get_settings(vllm_config)
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    planned = resolve_settings(settings, num_layers=num_layers, environ=os.environ)
    registry = make_registry(vllm_config, settings, planned)
    change = None if registry is None else functools.partial(change_stream_steering, core, registry)
    guard, bank = functools.partial(require_idle, core), functools.partial(find_local_bank, core)
    return CoreControl(registry, planned.probes, change, guard, bank)


def find_local_bank(core: Any) -> EngineBank | None:
    """The worker's, if it is in this process; None if it is in another.

    UniProcExecutor.driver_worker  v1/executor/uniproc_executor.py, 0.26 and 0.32
    """
    wrapper = getattr(core.model_executor, "driver_worker", None)
    step_publisher = getattr(getattr(wrapper, "worker", None), "clairai_step_publisher", None)
    return None if step_publisher is None else step_publisher.columns


def require_idle(core: Any, manifest: bytes) -> None:
    """No request goes on with other weights than it began with, whoever asked for them."""
    if not changes_model(parse_manifest(manifest)):
        return
    held = list(core.scheduler.requests.values())
    waiting = Counter(id(getattr(one, "clairai_stream_owner", None)) for one in held)
    begun = sum(_has_begun(one, waiting) for one in held)
    if begun:
        raise WeightsBusyError(
            f"{begun} requests have begun with the weights that serve; weights change when they "
            f"have ended: POST /v1/weights/commit waits for that"
        )


def _has_begun(request: Any, waiting: Counter[int]) -> bool:
    """It has, or another answer to the same request (n > 1) has, and is over.

    A pause ends when nothing runs (v1/core/sched/scheduler.py get_num_unfinished_requests, 0.26 and
    0.32), and what was preempted, or is the next answer to a request, waits in the queue.
    """
    if request.num_computed_tokens or request.num_output_tokens or request.num_preemptions:
        return True
    ticket = getattr(request, "clairai_stream_owner", None)
    return ticket is not None and ticket.num_admitted > waiting[id(ticket)]


def make_core_capture_resolver(core: Any) -> CaptureResolver:
    """What requests are captured, and how."""
    settings = get_settings(core.vllm_config)
    num_layers = core.vllm_config.model_config.hf_text_config.num_hidden_layers
    planned = resolve_settings(settings, num_layers=num_layers, environ=os.environ)
    return make_capture_resolver(core.vllm_config, settings, planned)


def make_registry(
    vllm_config: Any, settings: Settings, planned: ResolvedSettings
) -> SteeringRegistry | None:
    """Raises what is wrong with the settings' vectors; None for an engine that does not steer."""
    if not settings.is_steering:
        return None
    model = vllm_config.model_config
    registry = SteeringRegistry(
        points=planned.points,
        width=model.get_hidden_size(),
        limits=SteeringLimits(
            settings.steer_rows, settings.steer_programs, count_gate_slots(vllm_config)
        ),
        model=get_model_name(vllm_config),
        can_skip_special=not model.skip_tokenizer_init,
    )
    registry.put(planned.vectors, "add")
    registry.set_probes({probe.name: probe for probe in planned.probes})
    return registry


def count_gate_slots(vllm_config: Any) -> int:
    """Of requests whose gates remember: more than a batch has, for preempted ones keep theirs."""
    return max(MIN_GATE_SLOTS, 4 * int(vllm_config.scheduler_config.max_num_seqs))


def wrap_extra_keys(original: Any) -> Any:
    """`generate_block_hash_extra_keys(request, start, end, mm index)` with what steers the block.

    A tagged pair: 0.32 takes the first part off again for its events.
    """

    @functools.wraps(original)
    def extra_keys(request: Any, start: int, end: int, mm_index: int) -> Any:
        keys, next_index = original(request, start, end, mm_index)
        steered = read_cache_keys(request.sampling_params)
        key = None if steered is None else steered.key(end)
        if key is None:
            return keys, next_index
        return (*(keys or ()), (CONFIG_KEY, key)), next_index

    return extra_keys


def get_model_name(config: Any) -> str:
    """The name users know the model by: what the server calls it, else the end of its path."""
    served = config.model_config.served_model_name
    name = served[0] if isinstance(served, list) else served
    return str(name or config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
