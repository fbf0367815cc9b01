"""Takes an engine that captures; gives its parts the hooks they need: core, cache and worker.

KVCacheManager.get_computed_blocks   v1/core/kv_cache_manager.py   0.26:207   0.32:264

Everything of vLLM that captures touch and steering does not is here.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Final

from clairai.capture import order as orders
from clairai.capture.clerks import Clerk
from clairai.capture.consumers import About
from clairai.capture.hiring import open_clerk
from clairai.capture.order import Order
from clairai.capture.resolve import Engine, Resolver
from clairai.capture.setting import Setting
from clairai.compat.layers import Sites
from clairai.errors import UnsupportedError
from clairai.settings import Plan, Settings
from clairai.store.codecs.raw import STORED
from clairai.tap.capture import Capture
from clairai.tap.tables import Tables
from clairai.tap.taker import Taker

ORDER: Final = "clairai_order"  # what the engine core leaves in extra_args for the worker
SAMPLED_VALUES: Final = 64  # of each parameter


class SealedOrder(bytes):
    """An order as it travels; within this process it need not be read again."""

    order: Order

    @classmethod
    def seal(cls, order: Order) -> SealedOrder:
        sealed = cls(orders.ENCODER.encode(order))
        sealed.order = order
        return sealed

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)  # other processes get plain bytes, whoever carries them


def read_order(sampling_params: Any) -> Order | None:
    """What is captured of a request."""
    sealed = (getattr(sampling_params, "extra_args", None) or {}).get(ORDER)
    if sealed is None or isinstance(sealed, SealedOrder):
        return getattr(sealed, "order", None)
    return orders.DECODER.decode(sealed)


def make_resolver(vllm_config: Any, settings: Settings, planned: Plan) -> Resolver:
    """Raises what is wrong with the setting, or with an engine that shall capture."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if settings.capturing is not None:
        _check_mode(vllm_config, dtype)
    engine = Engine(
        points=planned.points,
        num_layers=model.hf_text_config.num_hidden_layers,
        width=model.get_hidden_size(),
        dtype=dtype,
        thresholds={probe.name: probe.threshold for probe in planned.probes},
    )
    return Resolver(settings.capturing, engine)


def _check_mode(vllm_config: Any, dtype: str) -> None:
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        raise UnsupportedError(
            "captures do not go with a KV connector: tokens it brings are never forwarded, so "
            "their rows would be missing; remove kv_transfer_config, or capture"
        )
    if dtype not in STORED:
        raise UnsupportedError(
            f"captures hold rows in {', '.join(STORED)}; this model runs in {dtype}"
        )


def with_wanted_rows(original: Any) -> Any:
    """`KVCacheManager.get_computed_blocks(request)`, up to the first row that is captured.

    What the cache serves is not forwarded, and not scored. The manager looks for the longest hit
    that leaves at least one token (`request.num_tokens - 1`), so it is shown a request that is no
    longer than that: the hit ends at a block's end before the first wanted position, whatever kinds
    of attention the model has.
    """

    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any) -> Any:
        order = read_order(request.sampling_params)
        if order is None:
            return original(self, request)
        return original(self, _Shortened(request, order.first_position + 1))

    return get_computed_blocks


class _Shortened:
    """A request that ends earlier; all else is its own."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = min(request.num_tokens, num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _places(sites: Sites, tables: Tables) -> dict[str, int]:
    """Where the rows of each point that can be tapped lie in the stash."""
    return {
        str(point): tables.sites.index(site)
        for point, site in sites.site_of.items()
        if site in tables.sites
    }


def make_capture(worker: Any, setting: Setting, sites: Sites) -> Capture:
    """The worker's listener, its clerk at work and its consumers open."""
    tables, station = worker.clairai_tables, worker.clairai_station
    about = About(
        model=station.about.model,
        weights=weights_name(worker, station.weights),
        dtype=str(worker.vllm_config.model_config.dtype).removeprefix("torch."),
        width=sites.width,
        points=station.about.points,
    )
    clerk = open_clerk(setting, about)
    try:
        taker = Taker(tables, clerk)
        taker.prepare(setting.encoder.for_rows(about.dtype))
    except BaseException:
        clerk.close()
        raise
    station.followers.append(functools.partial(_relabel, worker, clerk))
    return Capture(taker, clerk, _places(sites, tables), station)


def _relabel(worker: Any, clerk: Clerk, version: int) -> None:
    """Rows are of the weights they were computed with, also after those were changed."""
    clerk.relabel(weights_name(worker, version))


def weights_name(worker: Any, version: int | None) -> str:
    """What rows say of their weights: the engine's count of them, and what they hold."""
    held = fingerprint(worker.model_runner.get_model())
    return held if version is None else f"{version}-{held}"


def fingerprint(model: Any) -> str:
    """Of the weights as this rank serves them: by names, types, shapes and a sample of values.

    Weights that differ nowhere in the sample have one: a training step moves them all.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // SAMPLED_VALUES, 1)
        values = flat[::step][:SAMPLED_VALUES].float().cpu().numpy()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]
