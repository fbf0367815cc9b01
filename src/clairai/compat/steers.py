"""Takes a tapped norm of the model; gives the same module with steering in front of it.

T = tokens in this step, D = model width.

The norm is where the residual stream is made whole: it adds its two tensors. In front of it the
stream can still be changed for the norm's own output and for everything behind it; behind it only
for the latter. A row that is steered is put into the residual, and its other part becomes zero, so
that the norm's sum is exactly the new row. Rows that are not steered are not touched.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from clairai.compat.norms import encoded, mix_in, register, site_of

PAIR: Final = "steer"
ALONE: Final = "steer_alone"


class Steered(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of a tapped norm's class: steer the stream, then hand it on."""

    clairai_token: torch.Tensor
    clairai_steer_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None) -> Any:
        name, token = self.clairai_steer_name, self.clairai_token
        if residual_TD is None:
            torch.ops.clairai.steer_alone(x_TD, token, name)
        else:
            torch.ops.clairai.steer(x_TD, residual_TD, token, name)
        return super().forward(x_TD, residual_TD)


def define_ops() -> None:
    """Define `clairai::steer(x!, residual!, token!, name)` and `steer_alone` once per process.

    Opaque to the compiler, as the tap is; what they change is declared.
    """
    from vllm.utils.torch_utils import LayerNameType

    def steer(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del token
        site_of(name).apply(x, residual)

    def steer_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        site_of(name).apply(x, None)

    def no_steer(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del x, residual, token, name

    def no_steer_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    tensor = torch.Tensor
    alone = {"x": tensor, "token": tensor, "name": LayerNameType, "return": None}
    pair = {"x": tensor, "residual": tensor, "token": tensor, "name": LayerNameType, "return": None}
    register(PAIR, steer, no_steer, pair, changes=("x", "residual", "token"))
    register(ALONE, steer_alone, no_steer_alone, alone, changes=("x", "token"))


def attach(norm: nn.Module, name: str) -> None:
    """Make a tapped `norm` steer at the site registered as `name`."""
    norm.clairai_steer_name = encoded(name)
    mix_in(norm, Steered)
