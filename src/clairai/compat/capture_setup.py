"""Connects captures to vLLM: their resolver, the rows they need forwarded, the worker's part.

KVCacheManager.get_computed_blocks   v1/core/kv_cache_manager.py   0.26:207   0.32:264

Runs in: the engine core (resolver, prefix cache) and the worker with the ring (the rest).
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Final

from clairai.capture.backend import CaptureBackend, open_backend
from clairai.capture.capture_settings import CaptureSettings
from clairai.capture.consumers import EngineInfo
from clairai.compat.count_layers import count_layers
from clairai.compat.extra_args import read_capture_plan
from clairai.compat.kv_connectors import CAPTURED_CONNECTORS, find_other_connector
from clairai.compat.model_sites import Sites
from clairai.engine.capture.capture_resolver import CaptureResolver, EngineShape
from clairai.engine.capture.row_copier import RowCopier
from clairai.engine.capture.stage_rows import EarlierRows
from clairai.engine.capture.worker_capture import WorkerCapture
from clairai.engine.score.score_tables import ScoreTables
from clairai.errors import UnsupportedError
from clairai.settings import ResolvedSettings
from clairai.store.codecs.raw import STORED_DTYPES
from clairai.store.codecs.rp8 import Rp8

FINGERPRINT_VALUES: Final = 64  # sampled from each parameter
EARLIER_WEIGHTS: Final = "clairai_earlier_weights"  # of the worker: fingerprints of earlier stages


def make_capture_resolver(vllm_config: Any, resolved: ResolvedSettings) -> CaptureResolver:
    """Raises what is wrong with the capture settings, or with an engine that shall capture."""
    model = vllm_config.model_config
    dtype = _dtype_name(vllm_config)
    captures = resolved.settings.capture_settings
    if captures is not None:
        _check_capture_mode(vllm_config, dtype)
    engine = EngineShape(
        points=resolved.points,
        num_layers=count_layers(model),
        width=model.get_hidden_size(),
        dtype=dtype,
        thresholds={probe.name: probe.threshold for probe in resolved.probes},
    )
    return CaptureResolver(captures, engine)


def _dtype_name(vllm_config: Any) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def _check_capture_mode(vllm_config: Any, dtype: str) -> None:
    connector = find_other_connector(vllm_config, CAPTURED_CONNECTORS)
    if connector is not None:
        raise UnsupportedError(
            f"captures do not go with the KV connector {connector}: tokens it brings are never "
            f"forwarded, so their rows would be missing; use {', '.join(CAPTURED_CONNECTORS)}, "
            f"remove kv_transfer_config (and kv_offloading_size, which sets it), or the setting "
            f"capture"
        )
    if dtype not in STORED_DTYPES:
        raise UnsupportedError(
            f"captures hold rows in {', '.join(STORED_DTYPES)}; this model runs in {dtype}"
        )


def wrap_get_computed_blocks(original: Any) -> Any:
    """Wrap `KVCacheManager.get_computed_blocks(request)`: no hit covers a row to be captured.

    Tokens from the cache are not forwarded and have no rows. The manager looks for the longest hit
    that leaves at least one token (`request.num_tokens - 1`), so it is shown a request that ends at
    the first captured position: the hit then ends at a block's end before it, whatever kinds of
    attention the model has.
    """

    @functools.wraps(original)
    def get_computed_blocks(self: Any, request: Any) -> Any:
        plan = read_capture_plan(request.sampling_params)
        if plan is None:
            return original(self, request)
        return original(self, _ShorterRequest(request, plan.first_position + 1))

    return get_computed_blocks


class _ShorterRequest:
    """A request with fewer tokens; everything else is the request's own."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = min(request.num_tokens, num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def make_capture(
    worker: Any, settings: CaptureSettings, sites: Sites, earlier: EarlierRows | None
) -> WorkerCapture:
    """The worker's step listener for captures, with its backend running and its consumers open.

    `earlier`: what other stages of a pipeline send; None without stages.
    """
    tables, publisher = worker.clairai_tables, worker.clairai_step_publisher
    engine = EngineInfo(
        model=publisher.info.model,
        weights=name_weights(worker, publisher.weights),
        dtype=_dtype_name(worker.vllm_config),
        width=sites.width,
        points=publisher.info.points,
    )
    backend = open_backend(settings, engine)
    try:
        copier = RowCopier(tables, backend)
        # A request may choose another encoder; rp8 is the one with kernels of its own.
        for encoder in (settings.encoder.for_rows(engine.dtype), Rp8()):
            copier.prepare(encoder)
    except BaseException:
        backend.close()
        raise
    publisher.weights_listeners.append(functools.partial(_rename_weights, worker, backend))
    return WorkerCapture(copier, backend, stash_indexes(sites, tables), publisher, earlier)


def stash_indexes(sites: Sites, tables: ScoreTables) -> dict[str, int]:
    """Where the rows of each tapped point lie in the stash."""
    return {
        str(point): tables.sites.index(site)
        for point, site in sites.site_of.items()
        if site in tables.sites
    }


def _rename_weights(worker: Any, backend: CaptureBackend, version: int) -> None:
    """From now on rows are stored under the name of the new weights."""
    backend.set_weights(name_weights(worker, version))


def name_weights(worker: Any, version: int | None) -> str:
    """What stored rows say about their weights: the engine's version, and a fingerprint."""
    fingerprint = fingerprint_weights(worker.model_runner.get_model())
    if earlier := getattr(worker, EARLIER_WEIGHTS, ""):  # as they were loaded; the version changes
        fingerprint = hashlib.sha256(f"{earlier} {fingerprint}".encode()).hexdigest()[:16]
    return fingerprint if version is None else f"{version}-{fingerprint}"


def fingerprint_weights(model: Any) -> str:
    """A hash of this rank's weights: names, types, shapes and a sample of the values.

    Weights that differ only outside the sample share it; a training step moves all values.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // FINGERPRINT_VALUES, 1)
        values = flat[::step][:FINGERPRINT_VALUES].float().cpu().numpy()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]
