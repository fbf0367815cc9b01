"""Takes a worker whose model is loaded; gives it steering: tables, ops in its norms, a helm.

Every rank gets the same: each holds the whole residual, and all must change it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clairai.compat import engine_core, model_ops, model_sites
from clairai.compat.api_server import list_special_ids
from clairai.compat.find_config import CONFIG_KEY
from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.steer.steer_tables import SteerTables
from clairai.engine.steer.worker_steering import ProgramMap, WorkerSteering
from clairai.settings import Settings


def make_steering_tables(
    worker: Any, settings: Settings, sites: Sequence[str], width: int
) -> SteerTables:
    model_runner, config = worker.model_runner, worker.vllm_config
    tables = SteerTables(
        sites,
        width=width,
        max_tokens=model_runner.max_num_tokens,
        seats=engine_core.count_gate_slots(config),
        rows=settings.steer_rows,
        programs=settings.steer_programs,
        vocabulary=config.model_config.get_vocab_size(),
        device=str(model_runner.device),
        dtype=config.model_config.dtype,
    )
    special = list_special_ids(config.model_config)
    if special is not None:
        tables.set_special(special)
    return tables


def attach_steering(sites: model_sites.Sites, tables: SteerTables, named: dict[str, Any]) -> None:
    """Steer in every norm that is ours, and in front of the others; the tap stays behind it."""
    for name in tables.sites:
        site = named[f"{CONFIG_KEY}.{name}"]
        if isinstance(site, FusedNormSite):
            site.steer_with(tables, name)
            continue
        key = f"{CONFIG_KEY}.steer.{name}"
        named[key] = tables.site(name)
        model_ops.attach_steer_op(sites.modules[name], key)


def make_worker_steering(tables: SteerTables, sites: model_sites.Sites) -> WorkerSteering:
    site_of = {str(point): site for point, site in sites.site_of.items() if site in tables.sites}
    return WorkerSteering(ProgramMap(tables, site_of))
