"""Takes an engine that captures; gives its parts the hooks they need: core, cache and worker.

KVCacheManager.get_computed_blocks   v1/core/kv_cache_manager.py   0.26:207   0.32:264

Everything of vLLM that captures touch and steering does not is here.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Final

from clairai.capture.backend import CaptureBackend, open_backend
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import EngineInfo
from clairai.compat.extra_args import read_capture_plan
from clairai.compat.model_sites import Sites
from clairai.engine.capture.capture_resolver import CaptureResolver, EngineShape
from clairai.engine.capture.row_copier import RowCopier
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.score.score_tables import ScoreTables
from clairai.errors import UnsupportedError
from clairai.settings import ResolvedSettings, Settings
from clairai.store.codecs.raw import STORED_DTYPES

FINGERPRINT_VALUES: Final = 64  # of each parameter


def make_capture_resolver(
    vllm_config: Any, settings: Settings, planned: ResolvedSettings
) -> CaptureResolver:
    """Raises what is wrong with the setting, or with an engine that shall capture."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if settings.capturing is not None:
        _check_capture_mode(vllm_config, dtype)
    engine = EngineShape(
        points=planned.points,
        num_layers=model.hf_text_config.num_hidden_layers,
        width=model.get_hidden_size(),
        dtype=dtype,
        thresholds={probe.name: probe.threshold for probe in planned.probes},
    )
    return CaptureResolver(settings.capturing, engine)


def _check_capture_mode(vllm_config: Any, dtype: str) -> None:
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        raise UnsupportedError(
            "captures do not go with a KV connector: tokens it brings are never forwarded, so "
            "their rows would be missing; remove kv_transfer_config, or capture"
        )
    if dtype not in STORED_DTYPES:
        raise UnsupportedError(
            f"captures hold rows in {', '.join(STORED_DTYPES)}; this model runs in {dtype}"
        )


def wrap_get_computed_blocks(original: Any) -> Any:
    """`KVCacheManager.get_computed_blocks(request)`, up to the first row that is captured.

    What the cache serves is not forwarded, and not scored. The manager looks for the longest hit
    that leaves at least one token (`request.num_tokens - 1`), so it is shown a request that is no
    longer than that: the hit ends at a block's end before the first wanted position, whatever kinds
    of attention the model has.
    """

    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any) -> Any:
        order = read_capture_plan(request.sampling_params)
        if order is None:
            return original(self, request)
        return original(self, _ShorterRequest(request, order.first_position + 1))

    return get_computed_blocks


class _ShorterRequest:
    """A request that ends earlier; all else is its own."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = min(request.num_tokens, num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _stash_indexes(sites: Sites, tables: ScoreTables) -> dict[str, int]:
    """Where the rows of each point that can be tapped lie in the stash."""
    return {
        str(point): tables.sites.index(site)
        for point, site in sites.site_of.items()
        if site in tables.sites
    }


def make_capture(worker: Any, setting: CaptureSettings, sites: Sites) -> WorkerCapture:
    """The worker's listener, its clerk at work and its consumers open."""
    tables, step_publisher = worker.clairai_tables, worker.clairai_step_publisher
    about = EngineInfo(
        model=step_publisher.about.model,
        weights=name_weights(worker, step_publisher.weights),
        dtype=str(worker.vllm_config.model_config.dtype).removeprefix("torch."),
        width=sites.width,
        points=step_publisher.about.points,
    )
    clerk = open_backend(setting, about)
    try:
        copier = RowCopier(tables, clerk)
        copier.prepare(setting.encoder.for_rows(about.dtype))
    except BaseException:
        clerk.close()
        raise
    step_publisher.weights_listeners.append(functools.partial(_rename_weights, worker, clerk))
    return WorkerCapture(copier, clerk, _stash_indexes(sites, tables), step_publisher)


def _rename_weights(worker: Any, clerk: CaptureBackend, version: int) -> None:
    """Rows are of the weights they were computed with, also after those were changed."""
    clerk.relabel(name_weights(worker, version))


def name_weights(worker: Any, version: int | None) -> str:
    """What rows say of their weights: the engine's count of them, and what they hold."""
    held = fingerprint_weights(worker.model_runner.get_model())
    return held if version is None else f"{version}-{held}"


def fingerprint_weights(model: Any) -> str:
    """Of the weights as this rank serves them: by names, types, shapes and a sample of values.

    Weights that differ nowhere in the sample have one: a training step moves them all.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // FINGERPRINT_VALUES, 1)
        values = flat[::step][:FINGERPRINT_VALUES].float().cpu().numpy()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]
