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

from clairai import wire
from clairai.compat import (
    captures,
    changes,
    core,
    fused,
    graphs,
    joins,
    layers,
    modes,
    norms,
    rig,
    runner,
    steers,
    version,
)
from clairai.compat.arm import takes_weights
from clairai.compat.sight import KEY
from clairai.errors import PointError
from clairai.probe.columns import Columns
from clairai.settings import Plan, Settings, plan
from clairai.tap.control import Handover, answer
from clairai.tap.fused import FusedSite
from clairai.tap.station import About, Station
from clairai.tap.steady import PlainSteady
from clairai.tap.tables import Tables

MIN_STASH_ROWS: Final = 512


def prepare(worker: Any) -> None:
    """Called at the end of WorkerBase.__init__: check, fingerprint, and wait for the model."""
    config = worker.vllm_config
    settings = Settings.read(config.additional_config[KEY], os.environ)
    version.check_version(version.vllm_version(), allow_untested=settings.allow_untested_vllm)
    modes.check_modes(config)
    text_config = config.model_config.hf_text_config
    planned = plan(settings, num_layers=text_config.num_hidden_layers, environ=os.environ)
    core.keep_settings(config, settings)
    core.make_registry(config, settings, planned)  # refuse now what the core would refuse later
    captures.make_resolver(config, settings, planned)
    _fingerprint(config, planned, settings)
    norms.define_op()
    joins.define_op()
    steers.define_ops()
    fused.define_op()
    _after(worker, "load_model", lambda: _install(worker, settings, planned))
    _after(worker, "compile_or_warm_up_model", lambda: _prove(worker))
    _before(worker, "shutdown", lambda: _close(worker))


def control(worker: Any, message: bytes) -> bytes:
    """`collective_rpc("clairai_control", (message,))`: see clairai.wire.Control.

    Every rank replies, because a call waits for all; only the first has something to say.
    """
    station = getattr(worker, "clairai_station", None)
    if station is not None:
        capture = getattr(worker, "clairai_capture", None)
        return answer(station, message, capture, _handover(worker))
    reason = "this worker has no taps: the engine was started without the clairai key, or disabled"
    return msgspec.msgpack.encode(wire.Refusal("unsupported", reason))


def _handover(worker: Any) -> Handover | None:
    if worker.vllm_config.weight_transfer_config is None:
        return None
    from clairai.compat.weights import handover_of

    return handover_of(worker)


def _fingerprint(config: Any, planned: Plan, settings: Settings) -> None:
    """Leave in additional_config what the compiled graph depends on, and nothing else.

    vLLM hashes the whole dict into its compile-cache key (config/vllm.py compute_hash, 0.26:493,
    0.32:549), in place because copies of the config share it. Without the points in the key, a
    graph without taps is loaded in silence; with the ring's size in it, every change recompiles.
    """
    config.additional_config[KEY] = {
        "abi": norms.ABI,
        "points": [str(point) for point in planned.points],
        "fused": settings.fused and fused.is_allowed(config),
        "branch": settings.branch,
        "steering": settings.is_steering,
    }


def _install(worker: Any, settings: Settings, planned: Plan) -> None:
    config = worker.vllm_config
    text_config = config.model_config.hf_text_config
    sites = layers.find_sites(
        worker.model_runner.get_model(),
        num_layers=text_config.num_hidden_layers,
        width=config.model_config.get_hidden_size(),
    )
    _check_served(sites, planned)
    names = list(dict.fromkeys(sites.site_of[point] for point in planned.points))
    ours = fused.fusible(config, sites, names) if settings.fused else []
    tables = Tables(
        names,
        width=sites.width,
        capacity=settings.capacity,
        max_tokens=worker.model_runner.max_num_tokens,
        device=str(worker.model_runner.device),
        dtype=config.model_config.dtype,
        stash_rows=_stash_rows(worker, settings) if ours or _captures(worker, settings) else 0,
        is_capturing=_captures(worker, settings),
    )
    _attach_ours(config, sites, tables, ours)
    _attach(config, sites, tables, set(names) - set(ours), is_branched=settings.branch)
    worker.clairai_tables = tables
    _count_memory(worker.model_runner, tables.nbytes)
    listeners = [*_steered(worker, settings, sites, tables)]
    if worker.rank == 0:  # every rank holds the whole residual: the first one speaks for all
        worker.clairai_station = _station(worker, settings, planned, sites)
        changes.watch(worker, worker.clairai_station)
        listeners.append(worker.clairai_station)
        listeners += _captured(worker, settings, sites)  # behind the scores that rules wait for
    if listeners:
        steady = worker.clairai_station.steady if worker.rank == 0 else PlainSteady()
        worker.clairai_inputs = runner.connect(worker.model_runner, listeners, steady)
    forwards = worker.clairai_station.forwards if worker.rank == 0 else None
    if forwards is not None:
        inputs = worker.clairai_inputs
        graphs.publish_in_graphs(worker.model_runner, inputs, tables, forwards, sites.last)
    if settings.is_steering:  # before the first capture, which keeps its address
        worker.clairai_steer_tables.use_token_ids(worker.clairai_inputs().token_ids_T)


def _steered(
    worker: Any, settings: Settings, sites: layers.Sites, tables: Tables
) -> Iterator[runner.Listener]:
    if not settings.is_steering:
        return
    steering = rig.make_tables(worker, settings, tables.sites, sites.width)
    named = worker.vllm_config.compilation_config.static_forward_context
    rig.attach(sites, steering, named)
    worker.clairai_steer_tables = steering
    _count_memory(worker.model_runner, steering.nbytes)
    yield rig.make_helm(steering, sites)


def _captured(worker: Any, settings: Settings, sites: layers.Sites) -> Iterator[runner.Listener]:
    if settings.capturing is None:
        return
    worker.clairai_capture = captures.make_capture(worker, settings.capturing, sites)
    yield worker.clairai_capture


def _station(worker: Any, settings: Settings, planned: Plan, sites: layers.Sites) -> Station:
    config = worker.vllm_config
    columns = _columns(config, sites, planned, settings)
    about = About(
        model=core.model_name(config),
        vllm=version.vllm_version(),
        points=tuple(str(point) for point in planned.points),
        max_requests=config.scheduler_config.max_num_seqs,
        weights=0 if takes_weights(config) else None,
    )
    return Station(settings, worker.clairai_tables, columns, about)


def _check_served(sites: layers.Sites, planned: Plan) -> None:
    refused = [(point, sites.refused[point]) for point in planned.points if point in sites.refused]
    if refused:
        point, reason = refused[0]
        raise PointError(
            f"{point} cannot be tapped ({len(refused)} of {len(planned.points)} points): {reason}; "
            f"leave it out, or see `clairai doctor MODEL` for the points that can"
        )


def _captures(worker: Any, settings: Settings) -> bool:
    """Every rank holds the whole residual: the first one keeps it for all."""
    return settings.capturing is not None and worker.rank == 0


def _stash_rows(worker: Any, settings: Settings) -> int:
    """As many as any captured graph has: config/compilation.py max_cudagraph_capture_size, 0.26.

    Who captures wants rows of any step.
    """
    if _captures(worker, settings):
        return int(worker.model_runner.max_num_tokens)
    compilation = worker.vllm_config.compilation_config
    largest = getattr(compilation, "max_cudagraph_capture_size", None) or 0
    return min(max(largest, MIN_STASH_ROWS), int(worker.model_runner.max_num_tokens))


def _attach_ours(config: Any, sites: layers.Sites, tables: Tables, names: Sequence[str]) -> None:
    named = config.compilation_config.static_forward_context
    for name in names:
        norm = sites.modules[name]
        named[f"{KEY}.{name}"] = FusedSite(tables, name, norm.variance_epsilon)
        fused.attach(norm, f"{KEY}.{name}")
        tables.score_later(name)


def _attach(
    config: Any, sites: layers.Sites, tables: Tables, names: Set[str], *, is_branched: bool
) -> None:
    named = config.compilation_config.static_forward_context
    named[joins.KEY] = tables.branch
    token = tables.ran_S.new_zeros(1)
    is_branched &= tables.device.type == "cuda"
    for name in [name for name in tables.sites if name in names]:
        key = f"{KEY}.{name}"
        block = sites.blocks.get(name)
        attention = joins.attention_of(block) if is_branched and block is not None else None
        if attention is None:
            named[key] = tables.site(name)
        else:
            named[key] = tables.site_aside(name)
            joins.attach(attention, token)
        norms.attach(sites.modules[name], name=key, token=token)


def _columns(config: Any, sites: layers.Sites, planned: Plan, settings: Settings) -> Columns:
    empty = Columns.empty(
        points=planned.points,
        capacity=settings.capacity,
        width=sites.width,
        model=core.model_name(config),
        aliases=sites.site_of,
    )
    return empty.add(planned.probes) if planned.probes else empty


def _count_memory(model_runner: Any, nbytes: int) -> None:
    """0.26 does not see what torch allocates between load and profile (utils/mem_utils.py:303).

    A ring in GPU memory is the driver's and not torch's: that the profile finds by itself.
    """
    if hasattr(model_runner, "model_memory_usage"):
        model_runner.model_memory_usage += nbytes


def _prove(worker: Any) -> None:
    """Refuse to serve unless every tap really runs in the forward that will serve."""
    tables = [worker.clairai_tables]
    if hasattr(worker, "clairai_steer_tables"):
        tables.append(worker.clairai_steer_tables)
    if not all(bool(table.ran_S.all()) for table in tables):
        # Eager with a fixed KV size warms nothing up (cpu_worker.py `_should_warm_up_model`).
        worker.model_runner._dummy_run(1)
    for table in tables:
        table.check_all_ran()
    station = getattr(worker, "clairai_station", None)
    if station is not None:
        # v1/worker/gpu/warmup.py warms kernels up with requests of its own, through execute_model.
        station.prepare(worker.clairai_inputs())
        station.serve()


def _close(worker: Any) -> None:
    for name in ("clairai_capture", "clairai_station"):
        opened = worker.__dict__.pop(name, None)
        if opened is not None:
            opened.close()


def _after(worker: Any, name: str, then: Any) -> None:
    original = getattr(worker, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(worker, name, wrapped)


def _before(worker: Any, name: str, first: Any) -> None:
    original = getattr(worker, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(worker, name, wrapped)
