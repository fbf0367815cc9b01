"""Takes a decoder block with a tap before its attention; gives the place where the branch joins.

A tap on a branch of the captured graph (tap/branch.py) must be done before the residual is written
again, and before the captured piece ends: vLLM cuts the graph at every attention op. The start of
the attention module is the last place that is before both. The block's next norm comes after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from clairai.compat.norms import register

OP = "join"
KEY = "clairai.branch"


class Joined(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of vLLM's Attention: wait for the taps beside us, change nothing."""

    clairai_token: torch.Tensor

    def forward(self, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        torch.ops.clairai.join(query, self.clairai_token)
        return super().forward(query, *given, **named)


def attention_of(block: nn.Module) -> nn.Module | None:
    """The block's one attention, if it has exactly one and it is vLLM's own plain class.

    model_executor/layers/attention/attention.py Attention.forward(query, key, value, ...),
    0.26:488 and 0.32. Other kinds (MLA, linear attention) have other signatures: their blocks are
    tapped without a branch.
    """
    from vllm.model_executor.layers.attention import Attention

    found = [module for module in block.modules() if isinstance(module, Attention)]
    return found[0] if len(found) == 1 and type(found[0]) is Attention else None


def attach(attention: nn.Module, token: torch.Tensor) -> None:
    attention.clairai_token = token
    base = type(attention)
    kind = type(f"Joined{base.__name__}", (Joined, base), {"__module__": __name__})
    attention.__class__ = kind


def define_op() -> None:
    """Define `clairai::join(x, token!)` once per process.

    It reads nothing of `x`: that argument keeps it behind the projections that made the query, and
    the token keeps it behind the tap.
    """

    def join(x: torch.Tensor, token: torch.Tensor) -> None:
        del x, token
        _branch().join()

    def fake(x: torch.Tensor, token: torch.Tensor) -> None:
        del x, token

    register(OP, join, fake, {"x": torch.Tensor, "token": torch.Tensor, "return": None})


def _branch() -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[KEY]
