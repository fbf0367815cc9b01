"""Takes a norm module of the model; gives the same module with a tap on the residual stream.

T = tokens in this step, D = model width.

A norm is where the true residual stream shows itself: called with two tensors it returns their sum
(vllm/model_executor/layers/layernorm.py, RMSNorm, 0.26:86 and 0.32:92), called with one it is
given the stream. The class of the instance is swapped, not the forward of the class, so nothing but
the tapped modules changes, and the wrapper lives in a real source file, which vLLM's compile cache
looks up (compilation/decorators.py `_verify_source_unchanged`, 0.26:265, 0.32:266).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from clairai.compat.model_sites import Sites

LIBRARY: Final = "clairai"
TAP_OP: Final = "tap"
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


def attach_tap(norm: nn.Module, *, name: str, token: torch.Tensor) -> None:
    """Make `norm` hand its residual to the site registered as `name`."""
    norm.clairai_token = token  # a plain attribute: sleep and weight reload leave it alone
    norm.clairai_name = encode_name(name)
    mix_into(norm, Tapped)


def mix_into(norm: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` in front of the class of this one instance."""
    base = type(norm)
    name = f"{kind.__name__}{base.__name__}"
    norm.__class__ = type(name, (kind, base), {"__module__": kind.__module__})


def encode_name(name: str) -> Any:
    """vllm/utils/torch_utils.py, 0.26:887, 0.32:1054: a name that is an input of the graph."""
    from vllm.utils.torch_utils import _encode_layer_name

    return _encode_layer_name(name)


def define_tap_op() -> None:
    """Define `clairai::tap(x, token!, name)` once per process.

    Opaque to the compiler: it reads `x`, and declares that it changes `token` so that it is neither
    dropped nor moved across another tap. Everything else is looked up by name at run time.
    `_encode_layer_name` (vllm/utils/torch_utils.py, 0.26:887, 0.32:1054) makes the name an input of
    the graph, so that equal layers still share one compiled piece.
    """
    from vllm.utils.torch_utils import LayerNameType

    def tap(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        find_site(name).read(x)

    def fake(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    types = {"x": torch.Tensor, "token": torch.Tensor, "name": LayerNameType, "return": None}
    register_op(TAP_OP, tap, fake, types)


def register_op(
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


def find_site(name: Any) -> Any:
    """The site `name` of the engine whose forward is running.

    vLLM keeps one table of named layers per engine for its own opaque ops
    (forward_context.py `no_compile_layers`, 0.26:134, 0.32:143); ours stand beside them.
    """
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[getattr(name, "value", name)]


# MERGED
# Takes a tapped norm of the model; gives the same module with steering in front of it.
#
# T = tokens in this step, D = model width.
#
# The norm is where the residual stream is made whole: it adds its two tensors. In front of it the
# stream can still be changed for the norm's own output and for everything behind it; behind it
# only
# for the latter. A row that is steered is put into the residual, and its other part becomes zero,
# so
# that the norm's sum is exactly the new row. Rows that are not steered are not touched.


STEER_OP: Final = "steer"
STEER_ALONE_OP: Final = "steer_alone"


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


def define_steer_ops() -> None:
    """Define `clairai::steer(x!, residual!, token!, name)` and `steer_alone` once per process.

    Opaque to the compiler, as the tap is; what they change is declared.
    """
    from vllm.utils.torch_utils import LayerNameType

    def steer(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del token
        find_site(name).apply(x, residual)

    def steer_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        find_site(name).apply(x, None)

    def no_steer(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del x, residual, token, name

    def no_steer_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    tensor = torch.Tensor
    alone = {"x": tensor, "token": tensor, "name": LayerNameType, "return": None}
    pair = {"x": tensor, "residual": tensor, "token": tensor, "name": LayerNameType, "return": None}
    register_op(STEER_OP, steer, no_steer, pair, changes=("x", "residual", "token"))
    register_op(STEER_ALONE_OP, steer_alone, no_steer_alone, alone, changes=("x", "token"))


def attach_steer_op(norm: nn.Module, name: str) -> None:
    """Make a tapped `norm` steer at the site registered as `name`."""
    norm.clairai_steer_name = encode_name(name)
    mix_into(norm, Steered)


# MERGED
# Takes a decoder block with a tap before its attention; gives the place where the branch joins.
#
# A tap on a branch of the captured graph (engine/side_stream.py) must be done before the residual
# is written
# again, and before the captured piece ends: vLLM cuts the graph at every attention op. The start
# of
# the attention module is the last place that is before both. The block's next norm comes after
# it.


JOIN_OP = "join"
JOIN_NAME = "clairai.branch"


class Joined(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of vLLM's Attention: wait for the taps beside us, change nothing."""

    clairai_token: torch.Tensor

    def forward(self, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        torch.ops.clairai.join(query, self.clairai_token)
        return super().forward(query, *given, **named)


def find_attention(block: nn.Module) -> nn.Module | None:
    """The block's one attention, if it has exactly one and it is vLLM's own plain class.

    model_executor/layers/attention/attention.py Attention.forward(query, key, value, ...),
    0.26:488 and 0.32. Other kinds (MLA, linear attention) have other signatures: their blocks are
    tapped without a branch.
    """
    from vllm.model_executor.layers.attention import Attention

    found = [module for module in block.modules() if isinstance(module, Attention)]
    return found[0] if len(found) == 1 and type(found[0]) is Attention else None


def attach_join(attention: nn.Module, token: torch.Tensor) -> None:
    attention.clairai_token = token
    base = type(attention)
    kind = type(f"Joined{base.__name__}", (Joined, base), {"__module__": __name__})
    attention.__class__ = kind


def define_join_op() -> None:
    """Define `clairai::join(x, token!)` once per process.

    It reads nothing of `x`: that argument keeps it behind the projections that made the query, and
    the token keeps it behind the tap.
    """

    def join(x: torch.Tensor, token: torch.Tensor) -> None:
        del x, token
        _find_side_stream().join()

    def fake(x: torch.Tensor, token: torch.Tensor) -> None:
        del x, token

    register_op(JOIN_OP, join, fake, {"x": torch.Tensor, "token": torch.Tensor, "return": None})


def _find_side_stream() -> Any:
    from vllm.forward_context import get_forward_context

    return get_forward_context().no_compile_layers[JOIN_NAME]


# MERGED
# Takes a norm of the model on a GPU; gives the same module with a kernel of ours for its work.
#
# T = tokens in this step, D = model width.
#
# vLLM has several kernels for this norm and takes one by platform (ir/ops/layernorm.py, 0.26:43);
# ours is one more, with the same arithmetic. It sees and steers the residual stream in passing,
# which
# as kernels of their own would cost every layer two more launches.


NORM_OP: Final = "norm"
INVARIANT_VARIABLE: Final = "VLLM_BATCH_INVARIANT"
PLAIN_NORM: Final = ("vllm.model_executor.layers.layernorm", "RMSNorm")


class Fused(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Mixed in front of a norm's class, where it is called with two tensors."""

    weight: torch.Tensor
    clairai_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> Any:
        return torch.ops.clairai.norm(x_TD, residual_TD, self.weight, self.clairai_name)


def attach_fused_norm(norm: nn.Module, name: str) -> None:
    """Make `norm` do its work in the site registered as `name`."""
    norm.clairai_name = encode_name(name)
    mix_into(norm, Fused)


def define_norm_op() -> None:
    """Define `clairai::norm(x, residual, weight, name) -> (normed, stream)` once per process.

    Opaque to the compiler. It changes none of its arguments, so nothing is copied for it; what it
    leaves in the stash is read when the forward is over.
    """
    from vllm.utils.torch_utils import LayerNameType

    def norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: LayerNameType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = find_site(name).norm(x, residual, weight)
        return made

    def fake(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: LayerNameType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del weight, name
        return torch.empty_like(x), torch.empty_like(residual)

    tensor = torch.Tensor
    given = {"x": tensor, "residual": tensor, "weight": tensor, "name": LayerNameType}
    types = {**given, "return": tuple[torch.Tensor, torch.Tensor]}
    register_op(NORM_OP, norm, fake, types, changes=())


def can_fuse_norms(vllm_config: Any) -> bool:
    """Whether a norm of ours costs this engine no fusion and no promise of vLLM's own.

    compilation/passes/fusion (0.26): norms are fused with the quantisation behind them, and with
    the all-reduce before them. VLLM_BATCH_INVARIANT promises bits that only vLLM's norm keeps.
    """
    is_plain = vllm_config.quant_config is None and os.environ.get(INVARIANT_VARIABLE, "0") in (
        "",
        "0",
    )
    is_alone = vllm_config.parallel_config.tensor_parallel_size == 1
    return is_plain and is_alone and vllm_config.device_config.device_type == "cuda"


def find_fusible(vllm_config: Any, sites: Sites, names: Iterable[str]) -> list[str]:
    """Those of the sites whose norm can be ours."""
    if not can_fuse_norms(vllm_config):
        return []
    dtype = vllm_config.model_config.dtype
    return [n for n in names if n in sites.pairs and _is_plain_norm(sites.modules[n], dtype)]


def _is_plain_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """model_executor/layers/layernorm.py RMSNorm, 0.26:37 and 0.32: a weight, the whole width."""
    kind = type(norm)
    return (
        (kind.__module__, kind.__name__) == PLAIN_NORM
        and bool(getattr(norm, "has_weight", False))
        and getattr(norm, "variance_size_override", 0) is None
        and norm.weight.dtype == dtype
    )
