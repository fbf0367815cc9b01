"""Takes a norm module of the model; gives the same module with a tap on the residual stream.

T = tokens in this step, D = model width.

A norm is where the true residual stream shows itself: called with two tensors it returns their sum
(vllm/model_executor/layers/layernorm.py, RMSNorm, 0.26:86 and 0.32:92), called with one it is
given the stream. The class of the instance is swapped, not the forward of the class, so nothing but
the tapped modules changes, and the wrapper lives in a real source file, which vLLM's compile cache
looks up (compilation/decorators.py `_verify_source_unchanged`, 0.26:265, 0.32:266).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

LIBRARY: Final = "clairai"
OP: Final = "tap"
# Raise when the op's schema or the wrapper changes: it is part of the compile-cache key.
ABI: Final = 4


class Tapped(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of a norm's class: hand the residual to the tap, change nothing."""

    clairai_token: torch.Tensor
    clairai_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None) -> Any:
        tap = torch.ops.clairai.tap
        if residual_TD is None:
            tap(x_TD, self.clairai_token, self.clairai_name)
            return super().forward(x_TD)
        # The argument is donated to the fused kernel: only the returned residual may be read.
        normed_TD, stream_TD = super().forward(x_TD, residual_TD)
        tap(stream_TD, self.clairai_token, self.clairai_name)
        return normed_TD, stream_TD


def attach(norm: nn.Module, *, name: str, token: torch.Tensor) -> None:
    """Make `norm` hand its residual to the site registered as `name`."""
    norm.clairai_token = token  # a plain attribute: sleep and weight reload leave it alone
    norm.clairai_name = encoded(name)
    mix_in(norm, Tapped)


def mix_in(norm: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` in front of the class of this one instance."""
    base = type(norm)
    name = f"{kind.__name__}{base.__name__}"
    norm.__class__ = type(name, (kind, base), {"__module__": kind.__module__})


def encoded(name: str) -> Any:
    """vllm/utils/torch_utils.py, 0.26:887, 0.32:1054: a name that is an input of the graph."""
    from vllm.utils.torch_utils import _encode_layer_name

    return _encode_layer_name(name)


def define_op() -> None:
    """Define `clairai::tap(x, token!, name)` once per process.

    Opaque to the compiler: it reads `x`, and declares that it changes `token` so that it is neither
    dropped nor moved across another tap. Everything else is looked up by name at run time.
    `_encode_layer_name` (vllm/utils/torch_utils.py, 0.26:887, 0.32:1054) makes the name an input of
    the graph, so that equal layers still share one compiled piece.
    """
    from vllm.utils.torch_utils import LayerNameType

    def tap(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        site_of(name).read(x)

    def fake(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    types = {"x": torch.Tensor, "token": torch.Tensor, "name": LayerNameType, "return": None}
    register(OP, tap, fake, types)


def register(
    name: str,
    op: Callable[..., Any],
    fake: Callable[..., Any],
    types: dict[str, Any],
    changes: Sequence[str] = ("token",),
) -> None:
    """Define one op of ours that changes these arguments; the second time nothing happens."""
    if hasattr(torch.ops.clairai, name):
        return
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op

    # The schema is inferred from real types, not from the strings of this file's annotations.
    op.__annotations__ = fake.__annotations__ = types
    library = torch.library.Library(LIBRARY, "FRAGMENT")
    direct_register_custom_op(
        name,
        op,
        mutates_args=list(changes),
        fake_impl=fake,
        target_lib=library,
        dispatch_key=current_platform.dispatch_key,
    )
    # An op lives as long as its library: tie the two together instead of keeping a global.
    getattr(torch.ops.clairai, name).clairai_library = library


def site_of(name: Any) -> Any:
    """The site `name` of the engine whose forward is running.

    vLLM keeps one table of named layers per engine for its own opaque ops
    (forward_context.py `no_compile_layers`, 0.26:134, 0.32:143); ours stand beside them.
    """
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[getattr(name, "value", name)]
