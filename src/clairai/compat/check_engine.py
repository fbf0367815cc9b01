"""Refuses engines that clairai does not serve: other versions, devices and modes of vLLM.

Runs in: the worker, and `clairai doctor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from clairai.capture.capture_settings import CaptureSettings
from clairai.compat.kv_connectors import KEYED_CONNECTORS, find_other_connector
from clairai.errors import UnsupportedError

# docs/matrix.md: all were run on a CPU, and all but 0.27 on a GPU.
FIRST_VLLM: Final = (0, 26)
LAST_VLLM: Final = (0, 32)

# vLLM's methods of speculation under which rows are known to be right; each of MTP's is `mtp` too.
SPECULATIVE_METHODS: Final = ("ngram", "draft_model", "eagle", "mtp")
FIRST_SPECULATING: Final = (0, 32)  # releases before were not tried with speculation
FIRST_WITH_RAY: Final = (0, 32)  # nor with vLLM's Ray executors

CORES_KEY: Final = "clairai_cores"  # of additional_config: how many there are, if several

ModeCheck = Callable[[Any], bool]


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _read_version(version: str) -> tuple[int, ...]:
    """Major and minor number; empty if there are none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return () if numbers is None else tuple(map(int, numbers.groups()))


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse a vLLM outside the tested range, unless the user takes the risk."""
    is_tested = FIRST_VLLM <= _read_version(version) <= LAST_VLLM
    if is_tested or allow_untested:
        return
    raise UnsupportedError(
        f"vLLM {version} is outside the tested range "
        f"{FIRST_VLLM[0]}.{FIRST_VLLM[1]} to {LAST_VLLM[0]}.{LAST_VLLM[1]}; install one of those, "
        f'or set "allow_untested_vllm": true in the clairai config to try (taps are still proven '
        f"at start)"
    )


# What clairai would get wrong there; its kernels and its memory are CUDA's.
REFUSED_ROCM: Final = (
    "AMD GPUs (ROCm): the GPU publishes rows by a store of NVIDIA's instruction set, in memory "
    "that the CUDA driver maps"
)


def find_refused_device() -> str:
    """Why clairai does not serve the device of this vLLM; empty if it does.

    vllm/platforms/interface.py, 0.26.0 and 0.32.0. A machine without a device that vLLM knows is
    "unspecified": there a model can be looked at, and nothing runs.
    """
    from vllm.platforms import current_platform as found

    if found.is_cuda() or found.is_cpu() or found.is_unspecified():
        return ""
    if found.is_rocm():
        return REFUSED_ROCM
    return f"{found.device_name}: no row of such a device was ever held against another's"


def check_device() -> None:
    if reason := find_refused_device():
        raise UnsupportedError(
            f"clairai does not serve {reason}; run vLLM on an NVIDIA GPU or on a CPU, or remove "
            "the clairai key from additional_config"
        )


def _read_path(config: Any, path: str) -> Any:
    """Attribute names: vllm/config/*.py, 0.26.0 and 0.32.0; one that a release lacks is off."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _over_one(path: str) -> ModeCheck:
    return lambda config: (_read_path(config, path) or 1) > 1


def _is_set(path: str) -> ModeCheck:
    return lambda config: bool(_read_path(config, path))


def count_cores(config: Any) -> int:
    """Engine cores behind one API server: config/parallel.py, 0.26 and 0.32:146.

    With a load balancer of the user's own, each API server has one; with the hybrid one, those of
    its machine. A core of a model without experts is told of none but itself
    (`reconfigure_for_independent_dp_rank`, 0.32:1172): where cores are counted, it has started.
    """
    parallel = _read_path(config, "parallel_config")
    if _read_path(parallel, "data_parallel_external_lb"):
        return 1
    if _read_path(parallel, "data_parallel_hybrid_lb"):
        return _count_local_cores(config)
    return int(_read_path(parallel, "data_parallel_size") or 1)


def find_core_number(config: Any) -> int | None:
    """Which of several engine cores this is; None if it is the only one.

    A core of a model without experts is told of none but itself, so we tell it (install.py). Its
    number: config/parallel.py data_parallel_index, 0.32:439, else that on its machine. Should two
    have the same, the second finds its folder of captures locked, and does not start.
    """
    if not (_read_path(config, "additional_config") or {}).get(CORES_KEY):
        return None
    parallel = config.parallel_config
    number = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank_local if number is None else number)


def shares_api_server(config: Any) -> bool:
    """True in an engine core that has others beside it, behind the same API server."""
    is_external = bool(_read_path(config, "parallel_config.data_parallel_external_lb"))
    return find_core_number(config) is not None and not is_external


def _has_stages(config: Any) -> bool:
    return (_read_path(config, "parallel_config.pipeline_parallel_size") or 1) > 1


def _count_local_cores(config: Any) -> int:
    return int(_read_path(config, "parallel_config.data_parallel_size_local") or 1)


def _is_speculating(config: Any) -> bool:
    return bool(_read_path(config, "speculative_config"))


def uses_ray(config: Any) -> bool:
    """True if Ray starts the ranks: ParallelConfig.use_ray, config/parallel.py, 0.26 and 0.32:1118.

    Not data_parallel_backend, by which Ray starts engine cores.
    """
    return bool(_read_path(config, "parallel_config.use_ray"))


def uses_ray_graph(config: Any) -> bool:
    """True with vLLM's older Ray executor, which runs steps by a compiled graph of Ray's.

    Executor.get_class, v1/executor/abstract.py, 0.32:76. Its workers run steps in a thread of their
    own, and calls of all ranks in another.
    """
    from vllm import envs

    return uses_ray(config) and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False)


def _is_on_cpu(config: Any) -> bool:
    return str(_read_path(config, "device_config.device_type")) == "cpu"


# Each of these would give wrong or missing rows, or has not been proven to give right ones.
REFUSED_MODES: Final[tuple[tuple[str, ModeCheck], ...]] = (
    (
        "pipeline parallelism on a GPU (run with vLLM's CPU build alone, so not proven there)",
        lambda config: (
            _has_stages(config) and _read_path(config, "device_config.device_type") != "cpu"
        ),
    ),
    (
        "data parallelism over several machines, or of several LLMs (a ring is read on its own "
        "machine, through the API server of its engine core)",
        lambda config: count_cores(config) > _count_local_cores(config),
    ),
    (
        "data parallelism of a model with experts (its cores run forwards for each other, which "
        "vLLM's CPU build cannot, so not proven)",
        lambda config: (
            (_read_path(config, "parallel_config.data_parallel_size") or 1) > 1
            and bool(_read_path(config, "model_config.is_moe"))
        ),
    ),
    (
        "data parallelism with Ray (its engine cores are not ours to find)",
        lambda config: _read_path(config, "parallel_config.data_parallel_backend") == "ray",
    ),
    (
        "elastic expert parallelism (engine cores come and go)",
        _is_set("parallel_config.enable_elastic_ep"),
    ),
    (
        "ranks on several machines that vLLM starts itself, --nnodes (each machine has settings of "
        "its own, which nothing compares; use distributed_executor_backend ray)",
        _over_one("parallel_config.nnodes"),
    ),
    (
        "prefill context parallelism (rows are split between ranks)",
        _over_one("parallel_config.prefill_context_parallel_size"),
    ),
    (
        "dual batch overlap (the batch is cut into micro-batches inside the forward)",
        lambda config: (
            bool(_read_path(config, "parallel_config.enable_dbo"))
            or (_read_path(config, "parallel_config.ubatch_size") or 0) > 1
        ),
    ),
    (
        "sequence-parallel residuals (residual rows are sharded between ranks)",
        lambda config: bool(
            _read_path(config, "parallel_config.use_sequence_parallel_moe")
            or _read_path(config, "compilation_config.pass_config.enable_sp")
            or _read_path(config, "compilation_config.pass_config.enable_sequence_parallelism")
        ),
    ),
    (
        "speculative decoding on a GPU with the V1 model runner (it rejects drafts after the step "
        "is published)",
        lambda config: (
            _is_speculating(config)
            and not _is_on_cpu(config)
            and not _read_path(config, "use_v2_model_runner")
        ),
    ),
    (
        "speculative decoding with adaptive verification (the device deals out the drafts)",
        _is_set("speculative_config.enable_adaptive_verification"),
    ),
    (
        f"speculative decoding by a method other than {', '.join(SPECULATIVE_METHODS)} (rejected "
        "drafts might be reported as rows)",
        lambda config: (
            _is_speculating(config)
            and _read_path(config, "speculative_config.method") not in SPECULATIVE_METHODS
        ),
    ),
    (
        "speculative decoding with pipeline parallelism (not tried)",
        lambda config: _is_speculating(config) and _has_stages(config),
    ),
    (
        "speculative decoding with vLLM before 0.32 (not tried)",
        lambda config: (
            _is_speculating(config) and _read_version(vllm_version()) < FIRST_SPECULATING
        ),
    ),
    (
        "vLLM's Ray executor before vLLM 0.32 (not tried; use mp, and Ray around whole engines)",
        lambda config: uses_ray(config) and _read_version(vllm_version()) < FIRST_WITH_RAY,
    ),
    (
        "a Ray executor that is not vLLM's own (not tried; use distributed_executor_backend ray)",
        lambda config: (
            uses_ray(config)
            and _read_path(config, "parallel_config.distributed_executor_backend") != "ray"
        ),
    ),
    (
        "vLLM's Ray executor on compiled graphs with a GPU (its steps and its control messages run "
        "on two threads, whose streams do not wait for each other; leave "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND unset)",
        lambda config: uses_ray_graph(config) and not _is_on_cpu(config),
    ),
    (
        "pipeline parallelism with vLLM's Ray executor (the last stage has the ring, and Ray may "
        "start it on another node than its readers; not tried)",
        lambda config: uses_ray(config) and _has_stages(config),
    ),
    (
        "speculative decoding with vLLM's Ray executor (not tried)",
        lambda config: uses_ray(config) and _is_speculating(config),
    ),
    (
        "a KV connector with vLLM's Ray executor (not tried)",
        lambda config: uses_ray(config) and bool(_read_path(config, "kv_transfer_config")),
    ),
    (
        "KV-sharing fast prefill (later layers see fewer rows than earlier ones)",
        _is_set("cache_config.kv_sharing_fast_prefill"),
    ),
    (
        "prompt embeddings (rows would carry no token ids)",
        _is_set("model_config.enable_prompt_embeds"),
    ),
    (
        "pooling models (no generation to attribute rows to)",
        lambda config: _read_path(config, "model_config.runner_type") not in (None, "generate"),
    ),
    ("encoder-decoder models", _is_set("model_config.is_encoder_decoder")),
)


def list_refused_modes(vllm_config: Any) -> list[str]:
    """Why clairai does not serve an engine with this config; empty if it does."""
    return [reason for reason, applies in REFUSED_MODES if applies(vllm_config)]


def check_modes(vllm_config: Any) -> None:
    reasons = list_refused_modes(vllm_config)
    if reasons:
        raise UnsupportedError(
            f"clairai does not serve this engine's mode: {'; '.join(reasons)}; "
            f"turn it off, or remove the clairai key from additional_config"
        )


def check_core_settings(vllm_config: Any, captures: CaptureSettings | None) -> None:
    """Refuse what several engine cores cannot do together.

    Asked where the engine's config is made: a core of a model without experts knows of no others.
    """
    if count_cores(vllm_config) == 1:
        return
    if captures is not None:
        captures.check_for_cores()


def check_steering_mode(vllm_config: Any) -> None:
    """Refuse steering where KV of steered tokens could reach requests that are not steered.

    vLLM's own prefix cache is keyed by its block hashes, which include the steering plan. A KV
    connector has keys of its own: token ids (LMCache), blocks of another engine (NIXL), block
    hashes (offloading). Only those whose keys are known to carry the plan are served.
    """
    version = _read_version(vllm_version())
    served = [name for name, first in KEYED_CONNECTORS.items() if version >= first]
    connector = find_other_connector(vllm_config, served)
    if connector is not None:
        raise UnsupportedError(
            f"steering does not go with the KV connector {connector}: it may give the KV cache of "
            f"steered tokens to requests that are not steered; use one of "
            f"{', '.join(served)}, remove kv_transfer_config (and kv_offloading_size, "
            f"which sets it), or start without steering"
        )


def check_weights_mode(vllm_config: Any) -> None:
    """Refuse new weights where something would go on with the old ones.

    A KV connector keeps KV of the old ones, without saying so.
    """
    if uses_ray(vllm_config):
        raise UnsupportedError(
            "new weights were not tried with vLLM's Ray executor; use distributed_executor_backend "
            "mp, or leave out weight_transfer_config"
        )
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        raise UnsupportedError(
            "new weights do not go with a KV connector: it would give requests of the new weights "
            "the KV cache of the old ones; remove kv_transfer_config (and kv_offloading_size), or "
            "weight_transfer_config"
        )
