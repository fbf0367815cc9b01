"""LongCat's router in plain PyTorch: vLLM's CPU build has no kernels for it.

Runs in: the engine of `make models`. T = tokens, E = experts, K = experts of a token.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Let every router with zero experts of this process choose them without kernels."""
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    ZeroExpertRouter._compute_routing = _compute_routing


def _compute_routing(
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
