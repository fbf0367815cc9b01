"""Takes a vLLM worker whose config names clairai; gives it taps, a ring and a control method.

WorkerBase: v1/worker/worker_base.py, 0.26 and 0.32. `load_model` runs before the first trace of the
model (Worker.determine_available_memory), `compile_or_warm_up_model` is the last step of start-up.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final

import msgspec

from clairai.compat import (
    capture_setup,
    check_engine,
    engine_core,
    model_ops,
    model_sites,
    steering_setup,
    step_hooks,
)
from clairai.compat.find_config import CONFIG_KEY
from clairai.compat.install import accepts_weights
from clairai.engine.publish.repeat_path import NoRepeatPath
from clairai.engine.publish.step_publisher import EngineInfo, StepPublisher
from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import StepListener
from clairai.engine.worker_control import WeightsReceiver, answer_control
from clairai.errors import PointError
from clairai.probe.bank import EngineBank
from clairai.settings import ResolvedSettings, Settings, resolve_settings
from clairai.weights.receive import ServedWeights, WeightsUpdater
from clairai.wire import ring_messages

MIN_STASH_ROWS: Final = 512


def prepare(worker: Any) -> None:
    """Called at the end of WorkerBase.__init__: check, fingerprint, and wait for the model."""
    config = worker.vllm_config
    settings = Settings.read(config.additional_config[CONFIG_KEY], os.environ)
    check_engine.check_version(
        check_engine.vllm_version(), allow_untested=settings.allow_untested_vllm
    )
    check_engine.check_modes(config)
    text_config = config.model_config.hf_text_config
    planned = resolve_settings(
        settings, num_layers=text_config.num_hidden_layers, environ=os.environ
    )
    engine_core.save_settings(config, settings)
    engine_core.make_registry(
        config, settings, planned
    )  # refuse now what the core would refuse later
    capture_setup.make_capture_resolver(config, settings, planned)
    _set_compile_key(config, planned, settings)
    model_ops.define_tap_op()
    model_ops.define_join_op()
    model_ops.define_steer_ops()
    model_ops.define_norm_op()
    _call_after(worker, "load_model", lambda: _install_taps(worker, settings, planned))
    _call_after(worker, "compile_or_warm_up_model", lambda: _check_taps_ran(worker))
    _call_before(worker, "shutdown", lambda: _close(worker))


def handle_control(worker: Any, message: bytes) -> bytes:
    """`collective_rpc("clairai_control", (message,))`: see clairai.wire.ring_messages.Control.

    Every rank replies, because a call waits for all; only the first has something to say.
    """
    step_publisher = getattr(worker, "clairai_step_publisher", None)
    if step_publisher is not None:
        capture = getattr(worker, "clairai_capture", None)
        return answer_control(step_publisher, message, capture, _find_handover(worker))
    reason = "this worker has no taps: the engine was started without the clairai key, or disabled"
    return msgspec.msgpack.encode(ring_messages.Refusal("unsupported", reason))


def _find_handover(worker: Any) -> WeightsReceiver | None:
    if worker.vllm_config.weight_transfer_config is None:
        return None
    from clairai.compat.weight_transfer import get_handover

    return get_handover(worker)


def _set_compile_key(config: Any, planned: ResolvedSettings, settings: Settings) -> None:
    """Leave in additional_config what the compiled graph depends on, and nothing else.

    vLLM hashes the whole dict into its compile-cache key (config/vllm.py compute_hash, 0.26:493,
    0.32:549), in place because copies of the config share it. Without the points in the key, a
    graph without taps is loaded in silence; with the ring's size in it, every change recompiles.
    """
    config.additional_config[CONFIG_KEY] = {
        "abi": model_ops.ABI,
        "points": [str(point) for point in planned.points],
        "fused": settings.fused and model_ops.can_fuse_norms(config),
        "branch": settings.branch,
        "steering": settings.is_steering,
    }


def _install_taps(worker: Any, settings: Settings, planned: ResolvedSettings) -> None:
    config = worker.vllm_config
    text_config = config.model_config.hf_text_config
    sites = model_sites.find_sites(
        worker.model_runner.get_model(),
        num_layers=text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    _check_points(sites, planned)
    names = list(dict.fromkeys(sites.site_of[point] for point in planned.points))
    ours = model_ops.find_fusible(config, sites, names) if settings.fused else []
    tables = ScoreTables(
        names,
        width=sites.width,
        capacity=settings.capacity,
        max_tokens=worker.model_runner.max_num_tokens,
        device=str(worker.model_runner.device),
        dtype=config.model_config.dtype,
        stash_rows=_count_stash_rows(worker, settings)
        if ours or _is_capturing(worker, settings)
        else 0,
        is_capturing=_is_capturing(worker, settings),
    )
    _attach_fused(config, sites, tables, ours)
    _attach_taps(config, sites, tables, set(names) - set(ours), is_branched=settings.branch)
    worker.clairai_tables = tables
    _count_memory(worker.model_runner, tables.nbytes)
    listeners = [*_set_up_steering(worker, settings, sites, tables)]
    if worker.rank == 0:  # every rank holds the whole residual: the first one speaks for all
        worker.clairai_step_publisher = _make_step_publisher(worker, settings, planned, sites)
        watch_weights(worker, worker.clairai_step_publisher)
        listeners.append(worker.clairai_step_publisher)
        listeners += _set_up_capture(
            worker, settings, sites
        )  # behind the scores that rules wait for
    if listeners:
        repeat_path = (
            worker.clairai_step_publisher.repeat_path if worker.rank == 0 else NoRepeatPath()
        )
        worker.clairai_inputs = step_hooks.connect_listeners(
            worker.model_runner, listeners, repeat_path
        )
    forwards = worker.clairai_step_publisher.forwards if worker.rank == 0 else None
    if forwards is not None:
        inputs = worker.clairai_inputs
        step_hooks.publish_in_graphs(worker.model_runner, inputs, tables, forwards, sites.last)
    if settings.is_steering:  # before the first capture, which keeps its address
        worker.clairai_steer_tables.use_token_ids(worker.clairai_inputs().token_ids_T)


def _set_up_steering(
    worker: Any, settings: Settings, sites: model_sites.Sites, tables: ScoreTables
) -> Iterator[StepListener]:
    if not settings.is_steering:
        return
    steering = steering_setup.make_steering_tables(worker, settings, tables.sites, sites.width)
    named = worker.vllm_config.compilation_config.static_forward_context
    steering_setup.attach_steering(sites, steering, named)
    worker.clairai_steer_tables = steering
    _count_memory(worker.model_runner, steering.nbytes)
    yield steering_setup.make_worker_steering(steering, sites)


def _set_up_capture(
    worker: Any, settings: Settings, sites: model_sites.Sites
) -> Iterator[StepListener]:
    if settings.capturing is None:
        return
    worker.clairai_capture = capture_setup.make_capture(worker, settings.capturing, sites)
    yield worker.clairai_capture


def _make_step_publisher(
    worker: Any, settings: Settings, planned: ResolvedSettings, sites: model_sites.Sites
) -> StepPublisher:
    config = worker.vllm_config
    columns = _make_probe_bank(config, sites, planned, settings)
    about = EngineInfo(
        model=engine_core.get_model_name(config),
        vllm=check_engine.vllm_version(),
        points=tuple(str(point) for point in planned.points),
        max_requests=config.scheduler_config.max_num_seqs,
        weights=0 if accepts_weights(config) else None,
    )
    return StepPublisher(settings, worker.clairai_tables, columns, about)


def _check_points(sites: model_sites.Sites, planned: ResolvedSettings) -> None:
    refused = [(point, sites.refused[point]) for point in planned.points if point in sites.refused]
    if refused:
        point, reason = refused[0]
        raise PointError(
            f"{point} cannot be tapped ({len(refused)} of {len(planned.points)} points): {reason}; "
            f"leave it out, or see `clairai doctor MODEL` for the points that can"
        )


def _is_capturing(worker: Any, settings: Settings) -> bool:
    """Every rank holds the whole residual: the first one keeps it for all."""
    return settings.capturing is not None and worker.rank == 0


def _count_stash_rows(worker: Any, settings: Settings) -> int:
    """As many as any captured graph has: config/compilation.py max_cudagraph_capture_size, 0.26.

    Who captures wants rows of any step.
    """
    if _is_capturing(worker, settings):
        return int(worker.model_runner.max_num_tokens)
    compilation = worker.vllm_config.compilation_config
    largest = getattr(compilation, "max_cudagraph_capture_size", None) or 0
    return min(max(largest, MIN_STASH_ROWS), int(worker.model_runner.max_num_tokens))


def _attach_fused(
    config: Any, sites: model_sites.Sites, tables: ScoreTables, names: Sequence[str]
) -> None:
    named = config.compilation_config.static_forward_context
    for name in names:
        norm = sites.modules[name]
        named[f"{CONFIG_KEY}.{name}"] = FusedNormSite(tables, name, norm.variance_epsilon)
        model_ops.attach_fused_norm(norm, f"{CONFIG_KEY}.{name}")
        tables.score_from_stash(name)


def _attach_taps(
    config: Any,
    sites: model_sites.Sites,
    tables: ScoreTables,
    names: Set[str],
    *,
    is_branched: bool,
) -> None:
    named = config.compilation_config.static_forward_context
    named[model_ops.JOIN_NAME] = tables.branch
    token = tables.ran_S.new_zeros(1)
    is_branched &= tables.device.type == "cuda"
    for name in [name for name in tables.sites if name in names]:
        key = f"{CONFIG_KEY}.{name}"
        block = sites.blocks.get(name)
        attention = model_ops.find_attention(block) if is_branched and block is not None else None
        if attention is None:
            named[key] = tables.site(name)
        else:
            named[key] = tables.side_stream_site(name)
            model_ops.attach_join(attention, token)
        model_ops.attach_tap(sites.modules[name], name=key, token=token)


def _make_probe_bank(
    config: Any, sites: model_sites.Sites, planned: ResolvedSettings, settings: Settings
) -> EngineBank:
    empty = EngineBank.empty(
        points=planned.points,
        capacity=settings.capacity,
        width=sites.width,
        model=engine_core.get_model_name(config),
        aliases=sites.site_of,
    )
    return empty.add(planned.probes) if planned.probes else empty


def _count_memory(model_runner: Any, nbytes: int) -> None:
    """0.26 does not see what torch allocates between load and profile (utils/mem_utils.py:303).

    A ring in GPU memory is the driver's and not torch's: that the profile finds by itself.
    """
    if hasattr(model_runner, "model_memory_usage"):
        model_runner.model_memory_usage += nbytes


def _check_taps_ran(worker: Any) -> None:
    """Refuse to serve unless every tap really runs in the forward that will serve."""
    tables = [worker.clairai_tables]
    if hasattr(worker, "clairai_steer_tables"):
        tables.append(worker.clairai_steer_tables)
    if not all(bool(table.ran_S.all()) for table in tables):
        # Eager with a fixed KV size warms nothing up (cpu_worker.py `_should_warm_up_model`).
        worker.model_runner._dummy_run(1)
    for table in tables:
        table.check_all_ran()
    step_publisher = getattr(worker, "clairai_step_publisher", None)
    if step_publisher is not None:
        # v1/worker/gpu/warmup.py warms kernels up with requests of its own, through execute_model.
        step_publisher.prepare(worker.clairai_inputs())
        step_publisher.serve()


def _close(worker: Any) -> None:
    for name in ("clairai_capture", "clairai_step_publisher"):
        opened = worker.__dict__.pop(name, None)
        if opened is not None:
            opened.close()


def _call_after(worker: Any, name: str, then: Any) -> None:
    original = getattr(worker, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(worker, name, wrapped)


def _call_before(worker: Any, name: str, first: Any) -> None:
    original = getattr(worker, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(worker, name, wrapped)


# MERGED
# Takes a vLLM worker; tells its station of every change of the model's weights, whoever made it.
#
# Worker.reload_weights          v1/worker/gpu_worker.py   0.26:444    0.32:629
# Worker.update_weights          v1/worker/gpu_worker.py   0.26:1338   0.32:1550
# Worker.finish_weight_update    v1/worker/gpu_worker.py   0.26:1365   0.32:1587
# Worker.reset_weights           v1/worker/gpu_worker.py   -           0.32:380
#
# One count of them: a version never stands for two sets of numbers.


_BACKEND_METHODS: Final = ("update_weights", "finish_weight_update")
_VLLM_METHODS: Final = ("reload_weights", "reset_weights")


def watch_weights(worker: Any, step_publisher: StepPublisher) -> None:
    for name in (*_BACKEND_METHODS, *_VLLM_METHODS):
        original = getattr(worker, name, None)
        if original is not None:
            setattr(worker, name, _with_weights_version(worker, step_publisher, original))


def _with_weights_version(worker: Any, step_publisher: StepPublisher, original: Any) -> Any:
    is_by_vllm = original.__name__ in _VLLM_METHODS

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        intake = _find_intake(worker)
        was_torn = intake is not None and intake.is_torn
        try:
            return original(*args, **kwargs)
        finally:  # also after a failure: nobody can say how far it came
            if intake is None:
                step_publisher.set_weights_version((step_publisher.weights or 0) + 1)
            else:
                if is_by_vllm or (intake.is_torn and not was_torn):
                    intake.served = ServedWeights(intake.served.version + 1)
                if intake.served.version != step_publisher.weights:
                    step_publisher.set_weights_version(intake.served.version)

    return wrapped


def _find_intake(worker: Any) -> WeightsUpdater | None:
    """None without our backend; vLLM makes it after the model is loaded."""
    found = getattr(getattr(worker, "weight_transfer_engine", None), "intake", None)
    return found if isinstance(found, WeightsUpdater) else None
