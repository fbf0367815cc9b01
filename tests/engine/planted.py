"""Changes an engine's process before it starts: modes and planted bugs that tests need there."""

from __future__ import annotations

from typing import Any

import numpy as np

import clairai


def gpu_compile_mode() -> None:
    """Piecewise compilation with vLLM's own cache, as on a GPU (platforms/cpu.py turns it off)."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    # It asks for GPU kernels by name; Inductor does the same job for the ops of a CPU graph.
    FixFunctionalizationPass.__call__ = lambda _self, _graph: None
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        config = vllm_config.compilation_config
        if config.mode == CompilationMode.DYNAMO_TRACE_ONCE:
            config.mode = CompilationMode.VLLM_COMPILE
            config.compile_sizes = []

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def fused_norms() -> None:
    """Fused norms as on a GPU, run by Triton's interpreter: needs TRITON_INTERPRET set."""
    gpu_compile_mode()
    from clairai.compat import model_ops

    def can_fuse(vllm_config: Any) -> bool:
        del vllm_config
        return True

    model_ops.can_fuse_norms = can_fuse


def large_model() -> None:
    """No bug: every model counts as large, so its graphs publish as those of a large one do."""
    from clairai.compat import step_hooks

    step_hooks.LARGE_MODEL_BYTES = 0  # type: ignore[misc]


def points_not_in_key() -> None:
    """The planted bug: what is tapped is kept out of the compile-cache key."""
    gpu_compile_mode()
    from clairai.compat import worker

    def forget(config: Any, resolved: Any) -> None:
        del resolved
        config.additional_config["clairai"] = {"abi": 1}

    worker._set_compile_key = forget


def one_tap_missing() -> None:
    """The planted bug: one norm loses its tap after it was attached."""
    from clairai.compat import model_ops

    attach = model_ops.attach_tap

    def attach_most(module: Any, door: Any, *, name: str, token: Any) -> None:
        attach(module, door, name=name, token=token)
        if name.endswith("pre_attn.1"):
            module.__class__ = type(module).__bases__[1]

    model_ops.attach_tap = attach_most


def score_at(llm: Any, point: str, prompts: list[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    bank = clairai.ProbeBank(llm)
    direction_D = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    bank.add(clairai.Probe("p", clairai.Point.parse(point), direction_D))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [[float(v) for v in answers[0]["p"][:-1]] for answers in clairai.scores(llm, outputs)]


def num_fused_norms(llm: Any) -> int:
    from clairai.compat.tap_proof import WatchedSite
    from clairai.engine.score.fused_norm import FusedNormSite

    named = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    watched = [site for site in named.values() if isinstance(site, WatchedSite)]
    return sum(isinstance(one.site, FusedNormSite) for one in watched)
