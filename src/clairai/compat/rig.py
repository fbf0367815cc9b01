"""Takes a worker whose model is loaded; gives it steering: tables, ops in its norms, a helm.

Every rank gets the same: each holds the whole residual, and all must change it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clairai.compat import core, layers, steers
from clairai.compat.sight import KEY
from clairai.compat.vocabulary import special_ids
from clairai.settings import Settings
from clairai.tap.fused import FusedSite
from clairai.tap.helm import Helm
from clairai.tap.steer_tables import SteerTables
from clairai.tap.steering import Steering


def make_tables(worker: Any, settings: Settings, sites: Sequence[str], width: int) -> SteerTables:
    model_runner, config = worker.model_runner, worker.vllm_config
    tables = SteerTables(
        sites,
        width=width,
        max_tokens=model_runner.max_num_tokens,
        seats=core.num_seats(config),
        rows=settings.steer_rows,
        programs=settings.steer_programs,
        vocabulary=config.model_config.get_vocab_size(),
        device=str(model_runner.device),
        dtype=config.model_config.dtype,
    )
    special = special_ids(config.model_config)
    if special is not None:
        tables.set_special(special)
    return tables


def attach(sites: layers.Sites, tables: SteerTables, named: dict[str, Any]) -> None:
    """Steer in every norm that is ours, and in front of the others; the tap stays behind it."""
    for name in tables.sites:
        site = named[f"{KEY}.{name}"]
        if isinstance(site, FusedSite):
            site.steer_with(tables, name)
            continue
        key = f"{KEY}.steer.{name}"
        named[key] = tables.site(name)
        steers.attach(sites.modules[name], key)


def make_helm(tables: SteerTables, sites: layers.Sites) -> Helm:
    site_of = {str(point): site for point, site in sites.site_of.items() if site in tables.sites}
    return Helm(Steering(tables, site_of))
