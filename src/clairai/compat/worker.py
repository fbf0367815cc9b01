"""Gives a vLLM worker its taps, its ring, its steering, its captures and a control method.

WorkerBase                     v1/worker/worker_base.py   0.26 and 0.32
Worker.reload_weights          v1/worker/gpu_worker.py   0.26:444    0.32:629
Worker.update_weights          v1/worker/gpu_worker.py   0.26:1338   0.32:1550
Worker.finish_weight_update    v1/worker/gpu_worker.py   0.26:1365   0.32:1587
Worker.reset_weights           v1/worker/gpu_worker.py   -           0.32:380

`load_model` runs before the first trace of the model (Worker.determine_available_memory), and
`compile_or_warm_up_model` is the last step of start-up. Runs in: every worker.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Sequence, Set
from typing import Any, Final

from clairai.compat import check_engine, model_ops, model_sites, ranks, step_hooks
from clairai.compat.block_norms import find_passed_norms
from clairai.compat.capture_setup import (
    EARLIER_WEIGHTS,
    fingerprint_weights,
    make_capture,
    make_capture_resolver,
    stash_indexes,
)
from clairai.compat.check_engine import find_core_number
from clairai.compat.count_layers import count_layers
from clairai.compat.engine_core import (
    CompileKey,
    get_model_name,
    get_settings,
    make_registry,
    resolve_engine_settings,
)
from clairai.compat.find_config import CONFIG_KEY
from clairai.compat.install import accepts_weights
from clairai.compat.model_sites import Sites
from clairai.compat.pipeline_stages import (
    Stage,
    StageHandover,
    connect_stages,
    end_with_a_rank,
    find_stage,
    gather_fingerprints,
    join_sites,
    make_earlier_rows,
    make_stage_capture,
)
from clairai.compat.steering_setup import make_steering
from clairai.compat.tap_proof import TapProof
from clairai.engine.capture.stage_rows import EarlierRows
from clairai.engine.publish.repeat_path import RepeatPath
from clairai.engine.publish.step_publisher import StepPublisher, WorkerInfo
from clairai.engine.score.fused_norm import FusedNormSite
from clairai.engine.score.held_bank import HeldBank
from clairai.engine.score.score_tables import ScoreTables
from clairai.engine.step import StepListener
from clairai.engine.worker_control import (
    BankHolder,
    WeightsReceiver,
    answer_control,
    follow_control,
)
from clairai.errors import PointError, TapMissingError
from clairai.local.private_socket import runtime_dir
from clairai.points import Point
from clairai.probe.bank import EngineBank
from clairai.settings import ResolvedSettings, Settings
from clairai.weights.receive import ServedWeights, WeightsUpdater

MIN_STASH_ROWS: Final = 512
# Methods of the worker that change the model's weights.
_BACKEND_METHODS: Final = ("update_weights", "finish_weight_update")
_VLLM_METHODS: Final = ("reload_weights", "reset_weights")


def prepare(worker: Any) -> None:
    """Check the engine, set its compile key, and install the rest when the model is loaded.

    Called at the end of WorkerBase.__init__.
    """
    config = worker.vllm_config
    allow_untested = get_settings(config).allow_untested_vllm
    check_engine.check_version(check_engine.vllm_version(), allow_untested=allow_untested)
    check_engine.check_device()
    check_engine.check_modes(config)
    if accepts_weights(config):
        check_engine.check_weights_mode(config)
    resolved = resolve_engine_settings(config)
    # Refuse now what the engine core would refuse later.
    make_registry(config, resolved)
    make_capture_resolver(config, resolved)
    _set_compile_key(config, resolved)
    model_ops.define_ops()
    _call_after(worker, "load_model", lambda: _install_taps(worker, resolved))
    _call_after(worker, "compile_or_warm_up_model", lambda: _finish_start(worker, resolved))
    _call_before(worker, "shutdown", lambda: _close(worker))


def handle_control(worker: Any, message: bytes) -> bytes:
    """Answer `collective_rpc("clairai_control", (message,))`: see wire.control_messages.Control.

    vLLM waits for a reply of every rank. Only the one with the ring has taps to speak of; those of
    other stages follow changes of the bank, and all take weights.
    """
    held = getattr(worker, "clairai_held_bank", None)
    lock = getattr(worker, "clairai_step_lock", contextlib.nullcontext())
    with lock, end_with_a_rank(getattr(worker, "clairai_stage", None)):
        weights = _find_weights_control(worker)
        if held is not None:
            return follow_control(held, message, weights)
        publisher = getattr(worker, "clairai_step_publisher", None)
        capture = getattr(worker, "clairai_capture", None)
        return answer_control(publisher, message, capture, weights)


def _find_weights_control(worker: Any) -> WeightsReceiver | None:
    if worker.vllm_config.weight_transfer_config is None:
        return None
    from clairai.compat.weight_transfer import get_weights_control

    return get_weights_control(worker)


def _set_compile_key(config: Any, resolved: ResolvedSettings) -> None:
    """Leave in additional_config what the compiled graph depends on, and nothing else.

    vLLM hashes the whole dict into its compile-cache key (config/vllm.py compute_hash, 0.26:493,
    0.32:549); it is changed in place because copies of the config share it. Without the points in
    the key, a cached graph without taps would be loaded; with the ring's size in it, every change
    of that would recompile.
    """
    settings = resolved.settings
    factors = {
        "abi": model_ops.ABI,
        "points": [str(point) for point in resolved.points],
        "fused": settings.fused and model_ops.can_fuse_norms(config),
        "steering": settings.is_steering,
    }
    config.additional_config[CONFIG_KEY] = CompileKey(settings, factors)


def _install_taps(worker: Any, resolved: ResolvedSettings) -> None:
    """Called when the model is loaded and nothing has been traced."""
    settings, model_runner = resolved.settings, worker.model_runner
    stage = worker.clairai_stage = find_stage(worker)
    sites, names_of_stages = _find_sites(worker, resolved, stage)
    tables = _tap_sites(worker, resolved, sites, stage)
    listeners: list[StepListener] = []
    if settings.is_steering:
        steer_tables, steering = make_steering(worker, settings, sites, tables.sites)
        worker.clairai_steer_tables = steer_tables
        _count_memory(model_runner, steer_tables.nbytes)
        listeners.append(steering)
    publisher: StepPublisher | None = None
    earlier = None if stage.is_alone else _join_capture(worker, settings, names_of_stages)
    held: HeldBank | None = None
    if stage.is_publisher:  # every rank of a stage holds the whole stream: one speaks for all
        publisher = worker.clairai_step_publisher = _make_publisher(worker, resolved, sites)
        listeners.append(publisher)
        if settings.capture_settings is not None:
            # After the publisher, because rules wait for the scores.
            captures = settings.capture_settings.for_core(find_core_number(worker.vllm_config))
            worker.clairai_capture = make_capture(worker, captures, sites, earlier)
            listeners.append(worker.clairai_capture)
    elif not stage.is_alone:
        bank, weights = _make_bank(worker, resolved, sites), _first_weights(worker.vllm_config)
        held = worker.clairai_held_bank = HeldBank(tables, bank, weights)
        if earlier is not None:
            places = stash_indexes(sites, tables)
            sender = make_stage_capture(stage, names_of_stages, tables, places, earlier)
            worker.clairai_stage_capture = sender
            listeners.append(sender)
    watch_weights(worker, publisher or held)
    if listeners:
        repeat_path = RepeatPath() if publisher is None else publisher.repeat_path
        worker.clairai_inputs = step_hooks.connect_listeners(model_runner, listeners, repeat_path)
    is_speculating = worker.vllm_config.speculative_config is not None
    if publisher is not None and publisher.forwards is not None and not is_speculating:
        inputs, forwards = worker.clairai_inputs, publisher.forwards
        step_hooks.publish_in_graphs(model_runner, inputs, tables, forwards, sites.last)
    if not stage.is_alone:
        _connect_stage(worker, names_of_stages, earlier)
    if settings.is_steering:  # before the first graph is captured, which keeps the address
        worker.clairai_steer_tables.use_token_ids(worker.clairai_inputs().token_ids_T)
        worker.clairai_steer_tables.use_positions(worker.clairai_inputs().positions_T)
    worker.clairai_tap_proof = TapProof(
        worker.vllm_config.compilation_config.static_forward_context,
        CONFIG_KEY,
        has_graphs=tables.device.type == "cuda",
    )
    worker.clairai_tap_proof.watch(model_runner.get_model())


def _join_capture(
    worker: Any, settings: Settings, names_of_stages: Sequence[frozenset[str]]
) -> EarlierRows | None:
    """What earlier stages of a pipeline send to be captured; None if this rank keeps no rows."""
    if settings.capture_settings is None:
        return None
    stage: Stage = worker.clairai_stage
    own = fingerprint_weights(worker.model_runner.get_model())
    setattr(worker, EARLIER_WEIGHTS, " ".join(gather_fingerprints(own)[: stage.index]))
    tables = worker.clairai_tables
    return make_earlier_rows(stage, names_of_stages, tables) if tables.is_capturing else None


def _connect_stage(
    worker: Any, names_of_stages: Sequence[frozenset[str]], earlier: EarlierRows | None
) -> None:
    steered = getattr(worker, "clairai_steer_tables", None)
    given = (worker.clairai_stage, names_of_stages, worker.clairai_tables, steered)
    handover = StageHandover(*given)
    if earlier is not None:
        handover.capture_rows(earlier, getattr(worker, "clairai_stage_capture", None))
    connect_stages(worker.model_runner, handover)


def _find_sites(
    worker: Any, resolved: ResolvedSettings, stage: Stage
) -> tuple[Sites, list[frozenset[str]]]:
    """The sites of all stages, and the names of those of each."""
    model = worker.vllm_config.model_config
    sites = model_sites.find_sites(
        worker.model_runner.get_model(),
        num_layers=count_layers(model),
        width=model.get_hidden_size(),
        dtype=model.dtype,
        is_stage=not stage.is_alone,
    )
    names = [frozenset(sites.modules)]
    if not stage.is_alone:
        sites, names = join_sites(sites)
    refused = [(point, sites.refused[point]) for point in resolved.points if point in sites.refused]
    refused += _find_bypassed(worker, resolved.points, sites)
    if refused:
        point, reason = refused[0]
        raise PointError(
            f"{point} cannot be tapped ({len(refused)} of {len(resolved.points)} points): "
            f"{reason}; leave it out, or see `clairai doctor MODEL` for the points that can"
        )
    return sites, names


def _find_bypassed(worker: Any, points: Sequence[Point], sites: Sites) -> list[tuple[Point, str]]:
    """Points whose norm some steps of several ranks would not call.

    vLLM's fused all-reduce takes the norm's place in small batches where the machine has what it
    needs (model_executor/layers/fused_allreduce_gemma_rms_norm.py `_can_use_flashinfer`, 0.32:68);
    no setting turns it off.
    """
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:
        return []
    passed = find_passed_norms(worker.model_runner.get_model())
    norms = {
        point: sites.modules[site]
        for point in points
        if (site := sites.site_of.get(point, "")) in sites.modules  # else: of another stage
    }
    return [
        (point, f"{passed[norm]}, which may pass it by with several ranks: serve with one rank")
        for point, norm in norms.items()
        if norm in passed
    ]


def _tap_sites(worker: Any, resolved: ResolvedSettings, sites: Sites, stage: Stage) -> ScoreTables:
    """Put a tap at every site of this stage that the points name."""
    settings, config = resolved.settings, worker.vllm_config
    all_names = list(dict.fromkeys(sites.site_of[point] for point in resolved.points))
    names = [name for name in all_names if name in sites.modules]
    fused = model_ops.find_fusible(config, sites, names) if settings.fused else []
    # Ranks of a stage send the same; of the last one, one rank stores.
    keeps_rows = stage.is_publisher or not stage.is_last
    is_capturing = settings.capture_settings is not None and keeps_rows
    has_stash = fused or is_capturing or config.device_config.device_type == "cuda"
    tables = worker.clairai_tables = ScoreTables(
        all_names,
        width=sites.width,
        capacity=settings.capacity,
        max_tokens=worker.model_runner.max_num_tokens,
        device=str(worker.model_runner.device),
        dtype=config.model_config.dtype,
        stash_rows=_count_stash_rows(worker, is_capturing) if has_stash else 0,
        is_capturing=is_capturing,
    )
    tables.leave_to_other_stages(name for name in all_names if name not in sites.modules)
    _attach_fused_norms(config, sites, tables, fused)
    _attach_taps(config, sites, tables, set(names) - set(fused))
    _count_memory(worker.model_runner, tables.nbytes)
    return tables


def _count_stash_rows(worker: Any, is_capturing: bool) -> int:
    """As many as any captured graph has; a capture may want the rows of any step.

    config/compilation.py max_cudagraph_capture_size, 0.26.
    """
    max_tokens = int(worker.model_runner.max_num_tokens)
    if is_capturing:
        return max_tokens
    compilation = worker.vllm_config.compilation_config
    largest = getattr(compilation, "max_cudagraph_capture_size", None) or 0
    return min(max(largest, MIN_STASH_ROWS), max_tokens)


def _attach_fused_norms(
    config: Any, sites: Sites, tables: ScoreTables, names: Sequence[str]
) -> None:
    named = config.compilation_config.static_forward_context
    for name in names:
        norm, key = sites.modules[name], f"{CONFIG_KEY}.{name}"
        named[key] = FusedNormSite(tables, name, norm.variance_epsilon)
        model_ops.attach_fused_norm(norm, key)
        tables.score_from_stash(name)


def _attach_taps(config: Any, sites: Sites, tables: ScoreTables, names: Set[str]) -> None:
    """On a GPU taps are scored together after the forward, on a CPU each where it is."""
    named = config.compilation_config.static_forward_context
    token = tables.ran_S.new_zeros(1)
    for name in [name for name in tables.sites if name in names]:
        key = f"{CONFIG_KEY}.{name}"
        if tables.device.type == "cuda":
            named[key] = tables.stash_site(name)
            tables.score_from_stash(name)
        else:
            named[key] = tables.site(name)
        model_ops.attach_tap(sites.modules[name], sites.doors.get(name), name=key, token=token)


def _make_bank(worker: Any, resolved: ResolvedSettings, sites: Sites) -> EngineBank:
    bank = EngineBank.empty(
        points=resolved.points,
        capacity=resolved.settings.capacity,
        width=sites.width,
        model=get_model_name(worker.vllm_config),
        aliases=sites.site_of,
    )
    return bank.add(resolved.probes) if resolved.probes else bank


def _make_publisher(worker: Any, resolved: ResolvedSettings, sites: Sites) -> StepPublisher:
    config, bank = worker.vllm_config, _make_bank(worker, resolved, sites)
    about = WorkerInfo(
        model=get_model_name(config),
        vllm=check_engine.vllm_version(),
        points=tuple(str(point) for point in resolved.points),
        max_requests=config.scheduler_config.max_num_seqs,
        weights=_first_weights(config),
        engine=_name_shared_engine(config),
    )
    return StepPublisher(resolved.settings, worker.clairai_tables, bank, about)


def _first_weights(config: Any) -> int | None:
    """The version of the weights at start-up; None if they cannot change."""
    return 0 if accepts_weights(config) else None


def _name_shared_engine(config: Any) -> str:
    """What the cores of one engine have in common; empty without others.

    config/vllm.py instance_id, 0.26 and 0.32:425.
    """
    return "" if find_core_number(config) is None else f"{config.instance_id}"


def _count_memory(model_runner: Any, nbytes: int) -> None:
    """0.26 misses what torch allocates between load and profile (utils/mem_utils.py:303).

    A ring in GPU memory belongs to the driver and not to torch; the profile finds that by itself.
    """
    if hasattr(model_runner, "model_memory_usage"):
        model_runner.model_memory_usage += nbytes


def _finish_start(worker: Any, resolved: ResolvedSettings) -> None:
    _check_taps_ran(worker)
    publisher = getattr(worker, "clairai_step_publisher", None)
    if publisher is not None:
        from vllm.logger import init_logger  # 0.26 and 0.32; its handler is that of `vllm`

        folder = runtime_dir(resolved.settings.runtime_dir)
        log, model = init_logger("vllm.clairai"), get_model_name(worker.vllm_config)
        log.info("%s", resolved.describe(model, folder, publisher.ring_shape.nbytes))
        if (problem := publisher.find_ring_problem()) is not None:
            log.warning("%s", problem)


def _check_taps_ran(worker: Any) -> None:
    """Refuse to serve unless every tap really runs in the forward that will serve."""
    tables = [worker.clairai_tables]
    if hasattr(worker, "clairai_steer_tables"):
        tables.append(worker.clairai_steer_tables)
    is_eager = bool(worker.vllm_config.model_config.enforce_eager)
    if is_eager or not all(bool(table.ran_S.all()) for table in tables):
        # Eager with a fixed KV size warms nothing up (cpu_worker.py `_should_warm_up_model`), and
        # without graphs of their own the small batches of decode are not warmed up at all.
        worker.model_runner._dummy_run(1)
    for table in tables:
        table.check_all_ran()
    worker.clairai_tap_proof.finish()
    _check_every_step(worker)
    publisher = getattr(worker, "clairai_step_publisher", None)
    if publisher is not None:
        # v1/worker/gpu/warmup.py warms kernels up with requests of its own, through execute_model.
        publisher.prepare(worker.clairai_inputs())
        publisher.serve()


def _check_every_step(worker: Any) -> None:
    """Look at each step of the runner; what is raised there ends the engine.

    execute_model(scheduler_output, ...): V1 0.26:4111 0.32:3940, V2 0.26:1151 0.32:1719. Of the
    runner and not of the worker: vLLM's Ray executor on compiled graphs calls the runner itself
    (v1/executor/ray_utils.py execute_model_ray, 0.32:124), on another thread than `handle_control`.
    """
    runner, proof = worker.model_runner, worker.clairai_tap_proof
    original, check_ranks = runner.execute_model, ranks.make_step_check(worker)

    @functools.wraps(original)
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs.get("dummy_run"):  # V2 runs what is no step through the same method
            return result
        num_tokens = (args[0] if args else kwargs["scheduler_output"]).total_num_scheduled_tokens
        try:
            proof.check_step(num_tokens)
        except TapMissingError:
            _end_unheard_rank(worker)
            raise
        if check_ranks is not None and num_tokens:
            check_ranks(num_tokens)
        return result

    runner.execute_model = execute_model
    if check_engine.uses_ray_graph(worker.vllm_config):
        worker.clairai_step_lock = threading.Lock()
        runner.execute_model = _hold_lock(worker.clairai_step_lock, execute_model)


def _hold_lock(lock: threading.Lock, original: Any) -> Any:
    """Keep control messages, which take the same lock, out of a step.

    A rank's step may not have ended when the first rank has answered and a control message comes.
    All ranks have begun it by then, because a step gathers what each computed; so all ranks see
    the message between the same two steps.
    """

    @functools.wraps(original)
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return original(*args, **kwargs)

    return execute_model


def _end_unheard_rank(worker: Any) -> None:
    """End the process of a rank with a fault of which vLLM would not hear.

    vLLM reads the answer of the rank with the ring alone, and only logs what another one raises
    (v1/executor/multiproc_executor.py `_execute_worker_rpc`, 0.32:1043; v1/executor/ray_executor.py
    `_execute_dag`, 0.32:450). It ends an engine that has lost a rank.
    """
    if worker.clairai_stage.is_publisher:
        return
    logging.getLogger("vllm.clairai").critical(
        "rank %d ends, and the engine with it", worker.rank, exc_info=True
    )
    os._exit(1)


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


def watch_weights(worker: Any, holder: BankHolder | None) -> None:
    """Count every change of the model's weights, whoever makes it, and tell who has the bank.

    There is one count of them: a version never stands for two sets of weights. Ranks without a
    bank count too, so that they know what they hold.
    """
    for name in (*_BACKEND_METHODS, *_VLLM_METHODS):
        original = getattr(worker, name, None)
        if original is not None:
            setattr(worker, name, _with_weights_version(worker, holder, original))


def _with_weights_version(worker: Any, holder: BankHolder | None, original: Any) -> Any:
    is_vllms_own = original.__name__ in _VLLM_METHODS

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        updater = _find_updater(worker)
        was_torn = updater is not None and updater.is_torn
        try:
            return original(*args, **kwargs)
        finally:  # after a failure too: nobody can say how far it got
            if updater is not None and (is_vllms_own or (updater.is_torn and not was_torn)):
                updater.served = ServedWeights(updater.served.version + 1)
            if holder is not None:
                version = (holder.weights or 0) + 1
                if updater is not None:
                    version = updater.served.version
                if version != holder.weights:
                    holder.set_weights_version(version)

    return wrapped


def _find_updater(worker: Any) -> WeightsUpdater | None:
    """None without our backend; vLLM makes it after the model is loaded."""
    found = getattr(getattr(worker, "weight_transfer_engine", None), "updater", None)
    return found if isinstance(found, WeightsUpdater) else None
