"""Gives a worker with a loaded model its steering: device tables, ops in the norms, a listener.

Every rank gets the same: each holds the whole residual stream, and all must change it alike.
Runs in: every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clairai.compat.engine_core import count_gate_slots
from clairai.compat.find_config import CONFIG_KEY
from clairai.compat.model_ops import attach_steering
from clairai.compat.model_sites import Sites
from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.worker_steering import WorkerSteering
from clairai.settings import Settings


def make_steering(
    worker: Any, settings: Settings, sites: Sites, names: Sequence[str]
) -> tuple[SteerTables, WorkerSteering]:
    """The tables of the sites `names`, which must be tapped already, and who fills them.

    Of a pipeline, sites of other stages have a place in the tables too, and no op here.
    """
    tables = _make_tables(worker, settings, names, sites.width)
    tables.leave_to_other_stages(name for name in names if name not in sites.modules)
    named = worker.vllm_config.compilation_config.static_forward_context
    for name in [name for name in names if name in sites.modules]:
        site = named[f"{CONFIG_KEY}.{name}"]
        if isinstance(site, FusedNormSite):
            site.steer_with(tables, name)
        else:  # in front of the tap, which then sees the steered stream
            key = f"{CONFIG_KEY}.steer.{name}"
            named[key] = tables.site(name)
            attach_steering(sites.modules[name], sites.doors.get(name), name=key)
    site_of = {str(point): site for point, site in sites.site_of.items() if site in tables.sites}
    return tables, WorkerSteering(tables, site_of)


def _make_tables(worker: Any, settings: Settings, names: Sequence[str], width: int) -> SteerTables:
    model_runner, config = worker.model_runner, worker.vllm_config
    tables = SteerTables(
        names,
        width=width,
        max_tokens=model_runner.max_num_tokens,
        gate_slots=count_gate_slots(config),
        rows=settings.steer_rows,
        programs=settings.steer_programs,
        vocabulary=config.model_config.get_vocab_size(),
        device=str(model_runner.device),
        dtype=config.model_config.dtype,
    )
    if config.speculative_config is not None:
        tables.keep_states()
    special_ids = _list_special_ids(config.model_config)
    if special_ids is not None:
        tables.set_special(special_ids)
    return tables


def _list_special_ids(model_config: Any) -> list[int] | None:
    """Ids of the tokens that stand for no text; None without a tokenizer.

    tokenizers/registry.py cached_tokenizer_from_config, 0.26:253, 0.32:285
    """
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    return sorted(set(cached_tokenizer_from_config(model_config).all_special_ids))
