"""Routers of experts in plain PyTorch: vLLM's CPU build has no kernels for some.

Runs in: the engine of `make models`. T = tokens, E = experts, K = experts of a token.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any


def install() -> None:
    """Let LongCat's router, and those that score by sigmoids, run on a CPU in this process."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    ZeroExpertRouter._compute_routing = _route_with_zero_experts
    cpu_router.CPURouter._compute_routing = partialmethod(
        _route_by_sigmoids, cpu_router.CPURouter._compute_routing
    )


def _route_by_sigmoids(
    self: Any, route: Any, hidden_states: Any, router_logits: Any, indices_type: Any, **given: Any
) -> tuple[Any, Any]:
    """Of experts in groups vLLM can (router/cpu_router.py `_grouped_topk`, 0.32): one group."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    if self.scoring_func != "sigmoid" or self.use_grouped_topk or self.custom_routing_function:
        chosen = route(self, hidden_states, router_logits, indices_type, **given)
    else:
        chosen = cpu_router._grouped_topk(
            router_logits,
            self.top_k,
            self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func="sigmoid",
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )
    weights_TK, ids_TK = chosen
    return weights_TK, ids_TK


def _route_with_zero_experts(
    self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, **_: Any
) -> tuple[Any, Any]:
    """What vllm/model_executor/layers/fused_moe/router/zero_expert_router.py does, 0.32:57."""
    import torch

    scores_TE = torch.softmax(router_logits.float(), dim=-1)
    biased_TE = scores_TE + self.e_score_correction_bias
    ids_TK = biased_TE.topk(self.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK) * self.routed_scaling_factor
    is_zero_TK = ids_TK >= self.num_logical_experts
    share_T1 = weights_TK.where(is_zero_TK, 0.0).sum(dim=-1, keepdim=True)
    self._zero_expert_output = hidden_states * share_T1.to(hidden_states.dtype)
    ids_TK = ids_TK.masked_fill(is_zero_TK, 0).to(indices_type or torch.int32)
    return weights_TK.masked_fill(is_zero_TK, 0.0), ids_TK
