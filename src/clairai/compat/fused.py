"""Takes a norm of the model on a GPU; gives the same module with a kernel of ours for its work.

T = tokens in this step, D = model width.

vLLM has several kernels for this norm and takes one by platform (ir/ops/layernorm.py, 0.26:43);
ours is one more, with the same arithmetic. It sees and steers the residual stream in passing, which
as kernels of their own would cost every layer two more launches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from clairai.compat.layers import Sites
from clairai.compat.norms import encoded, mix_in, register, site_of

OP: Final = "norm"
INVARIANT: Final = "VLLM_BATCH_INVARIANT"
PLAIN: Final = ("vllm.model_executor.layers.layernorm", "RMSNorm")


class Fused(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of a norm's class, where it is called with two tensors."""

    weight: torch.Tensor
    clairai_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> Any:
        return torch.ops.clairai.norm(x_TD, residual_TD, self.weight, self.clairai_name)


def attach(norm: nn.Module, name: str) -> None:
    """Make `norm` do its work in the site registered as `name`."""
    norm.clairai_name = encoded(name)
    mix_in(norm, Fused)


def define_op() -> None:
    """Define `clairai::norm(x, residual, weight, name) -> (normed, stream)` once per process.

    Opaque to the compiler. It changes none of its arguments, so nothing is copied for it; what it
    leaves in the stash is read when the forward is over.
    """
    from vllm.utils.torch_utils import LayerNameType

    def norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: LayerNameType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = site_of(name).norm(x, residual, weight)
        return made

    def fake(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: LayerNameType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del weight, name
        return torch.empty_like(x), torch.empty_like(residual)

    tensor = torch.Tensor
    given = {"x": tensor, "residual": tensor, "weight": tensor, "name": LayerNameType}
    types = {**given, "return": tuple[torch.Tensor, torch.Tensor]}
    register(OP, norm, fake, types, changes=())


def is_allowed(vllm_config: Any) -> bool:
    """Whether a norm of ours costs this engine no fusion and no promise of vLLM's own.

    compilation/passes/fusion (0.26): norms are fused with the quantisation behind them, and with
    the all-reduce before them. VLLM_BATCH_INVARIANT promises bits that only vLLM's norm keeps.
    """
    is_plain = vllm_config.quant_config is None and os.environ.get(INVARIANT, "0") in ("", "0")
    is_alone = vllm_config.parallel_config.tensor_parallel_size == 1
    return is_plain and is_alone and vllm_config.device_config.device_type == "cuda"


def fusible(vllm_config: Any, sites: Sites, names: Iterable[str]) -> list[str]:
    """Those of the sites whose norm can be ours."""
    if not is_allowed(vllm_config):
        return []
    dtype = vllm_config.model_config.dtype
    return [n for n in names if n in sites.pairs and _is_plain(sites.modules[n], dtype)]


def _is_plain(norm: nn.Module, dtype: torch.dtype) -> bool:
    """model_executor/layers/layernorm.py RMSNorm, 0.26:37 and 0.32: a weight, the whole width."""
    kind = type(norm)
    return (
        (kind.__module__, kind.__name__) == PLAIN
        and bool(getattr(norm, "has_weight", False))
        and getattr(norm, "variance_size_override", 0) is None
        and norm.weight.dtype == dtype
    )
