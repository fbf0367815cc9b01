"""Takes vLLM's engine core; gives it a desk for steering, and keys that keep the KV cache right.

EngineCore.collective_rpc              v1/engine/core.py          0.26:945   0.32:1073
generate_block_hash_extra_keys         v1/core/kv_cache_utils.py  0.26:558   0.32:625
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any, Final

from clairai.capture.resolve import Resolver
from clairai.compat.amends import amend
from clairai.compat.captures import make_resolver
from clairai.compat.requests import read_keys
from clairai.compat.sight import KEY
from clairai.errors import WeightsBusyError
from clairai.probe.columns import Columns
from clairai.settings import Plan, Settings, plan
from clairai.steer.desk import Desk
from clairai.steer.registry import Limits, Registry
from clairai.weights.manifest import changes_model, parse

MIN_SEATS: Final = 4096
_DESK: Final = "clairai_desk"
_SETTINGS: Final = "clairai_settings"


def keep_settings(vllm_config: Any, settings: Settings) -> None:
    """The worker's fingerprint takes their place in a config it may share with the core."""
    object.__setattr__(vllm_config, _SETTINGS, settings)


def settings_of(vllm_config: Any) -> Settings:
    kept = getattr(vllm_config, _SETTINGS, None)
    return kept or Settings.read(vllm_config.additional_config[KEY], os.environ)


def desk_of(core: Any) -> Desk:
    """Made when first asked for: the plugin is loaded while the core is being made."""
    found: Desk | None = vars(core).get(_DESK)
    if found is None:
        # Two threads may come here first; setdefault lets one of the two desks be the one.
        found = vars(core).setdefault(_DESK, _make_desk(core))
    assert found is not None
    return found


def _make_desk(core: Any) -> Desk:
    vllm_config = core.vllm_config
    settings = settings_of(vllm_config)
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    planned = plan(settings, num_layers=num_layers, environ=os.environ)
    registry = make_registry(vllm_config, settings, planned)
    change = None if registry is None else functools.partial(amend, core, registry)
    guard, bank = functools.partial(require_idle, core), functools.partial(bank_here, core)
    return Desk(registry, planned.probes, change, guard, bank)


def bank_here(core: Any) -> Columns | None:
    """The worker's, if it is in this process; None if it is in another.

    UniProcExecutor.driver_worker  v1/executor/uniproc_executor.py, 0.26 and 0.32
    """
    wrapper = getattr(core.model_executor, "driver_worker", None)
    station = getattr(getattr(wrapper, "worker", None), "clairai_station", None)
    return None if station is None else station.columns


def require_idle(core: Any, manifest: bytes) -> None:
    """No request goes on with other weights than it began with, whoever asked for them."""
    if not changes_model(parse(manifest)):
        return
    held = list(core.scheduler.requests.values())
    waiting = Counter(id(getattr(one, "clairai_ticket", None)) for one in held)
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
    ticket = getattr(request, "clairai_ticket", None)
    return ticket is not None and ticket.num_admitted > waiting[id(ticket)]


def resolver_of(core: Any) -> Resolver:
    """What requests are captured, and how."""
    settings = settings_of(core.vllm_config)
    num_layers = core.vllm_config.model_config.hf_text_config.num_hidden_layers
    planned = plan(settings, num_layers=num_layers, environ=os.environ)
    return make_resolver(core.vllm_config, settings, planned)


def make_registry(vllm_config: Any, settings: Settings, planned: Plan) -> Registry | None:
    """Raises what is wrong with the settings' vectors; None for an engine that does not steer."""
    if not settings.is_steering:
        return None
    model = vllm_config.model_config
    registry = Registry(
        points=planned.points,
        width=model.get_hidden_size(),
        limits=Limits(settings.steer_rows, settings.steer_programs, num_seats(vllm_config)),
        model=model_name(vllm_config),
        can_skip_special=not model.skip_tokenizer_init,
    )
    registry.put(planned.vectors, "add")
    registry.set_probes({probe.name: probe for probe in planned.probes})
    return registry


def num_seats(vllm_config: Any) -> int:
    """Of requests whose gates remember: more than a batch has, for preempted ones keep theirs."""
    return max(MIN_SEATS, 4 * int(vllm_config.scheduler_config.max_num_seqs))


def with_keys(original: Any) -> Any:
    """`generate_block_hash_extra_keys(request, start, end, mm index)` with what steers the block.

    A tagged pair: 0.32 takes the first part off again for its events.
    """

    @functools.wraps(original)
    def extra_keys(request: Any, start: int, end: int, mm_index: int) -> Any:
        keys, next_index = original(request, start, end, mm_index)
        steered = read_keys(request.sampling_params)
        key = None if steered is None else steered.key(end)
        if key is None:
            return keys, next_index
        return (*(keys or ()), (KEY, key)), next_index

    return extra_keys


def model_name(config: Any) -> str:
    """The name users know the model by: what the server calls it, else the end of its path."""
    served = config.model_config.served_model_name
    name = served[0] if isinstance(served, list) else served
    return str(name or config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
