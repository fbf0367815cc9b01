"""A vLLM plugin that makes the experts of vLLM's CPU build know which of them a rank has.

CPUUnquantizedExperts.apply  model_executor/layers/fused_moe/experts/cpu_moe.py  0.32:269 gets the
map from an expert's number to its place on this rank and does not look at it: with experts on
several ranks its kernel reads past the end of the weights. So a test of what clairai does there has
to put that right first. It is found by an entry point, in every process of the engine.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

ENTRY: Final = "[vllm.general_plugins]\nexpert_map = tests.engine.expert_map:register\n"


def register() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if not hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        CPUUnquantizedExperts.apply = _with_map(CPUUnquantizedExperts.apply)


def _with_map(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs).arguments
        if call["expert_map"] is not None:
            places = call["expert_map"][call["topk_ids"].long()]
            call["topk_weights"] = call["topk_weights"].masked_fill(places < 0, 0.0)
            call["topk_ids"] = places.clamp(min=0).to(call["topk_ids"].dtype)
        original(**call)

    return apply
