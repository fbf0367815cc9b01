"""The custom ops that clairai puts into a model, and how they get into its modules.

T = tokens of a step, D = width of the model.

Three kinds of ops, all opaque to the compiler:

- `tap` hands the residual stream to a site. It sits in a norm, because a norm is where the stream
  is one tensor: called with two tensors it returns their sum, called with one it is given the
  stream (model_executor/layers/layernorm.py, RMSNorm, 0.26:86 and 0.32:92). Where no norm is given
  the stream, it sits at the door of a block and adds the two tensors up itself.
- `steer` changes the stream in front of a tap, so that the norm's own output changes with it. A
  steered row goes into the residual and its other half becomes zero: the norm's sum is then exactly
  the new row. Rows that are not steered are not touched.
- `norm` replaces a whole RMSNorm on a GPU by a kernel that taps and steers in passing. As kernels
  of their own those would cost every layer two more launches.

The class of a module instance is swapped, not the forward of its class: nothing but the tapped
modules changes, and the code lies in a real source file, which vLLM's compile cache looks up
(compilation/decorators.py `_verify_source_unchanged`, 0.26:265, 0.32:266). Runs in: the worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from clairai.compat.block_doors import Argument, Entrance, Exit
from clairai.compat.model_sites import Sites

LIBRARY: Final = "clairai"
TAP_OP: Final = "tap"
STEER_OP: Final = "steer"
STEER_ALONE_OP: Final = "steer_alone"
NORM_OP: Final = "norm"
# Part of the compile-cache key. Raise it when an op's schema changes, or the code around it.
ABI: Final = 8
INVARIANT_VARIABLE: Final = "VLLM_BATCH_INVARIANT"
PLAIN_NORM: Final = ("vllm.model_executor.layers.layernorm", "RMSNorm")


class Tapped(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """In front of a norm's class: hands the residual stream to the tap and changes nothing."""

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


class Steered(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """In front of a tapped norm's class: steers the stream before the norm sees it."""

    clairai_token: torch.Tensor
    clairai_steer_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None) -> Any:
        name, token = self.clairai_steer_name, self.clairai_token
        _steer(x_TD, residual_TD, token, name)
        if residual_TD is None:
            return super().forward(x_TD)
        return super().forward(x_TD, residual_TD)


class Entered(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """In front of a block's class: taps the stream that comes in, and steers it before if asked."""

    clairai_token: torch.Tensor
    clairai_entrance: Entrance
    clairai_entrance_name: Any
    clairai_entrance_steer_name: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        entrance, token = self.clairai_entrance, self.clairai_token
        hidden_TD, residual_TD = _pick(entrance.hidden, args, kwargs), None
        if entrance.residual is not None:  # the first block's is None, or left out
            residual_TD = _pick(entrance.residual, args, kwargs)
        steer_name = self.clairai_entrance_steer_name
        stream_TD = _steer_door(hidden_TD, residual_TD, entrance.active, token, steer_name)
        torch.ops.clairai.tap(stream_TD, token, self.clairai_entrance_name)
        return super().forward(*args, **kwargs)


class Left(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """In front of a block's class: taps the stream that goes out, and steers it before if asked."""

    clairai_token: torch.Tensor
    clairai_exit: Exit
    clairai_exit_name: Any
    clairai_exit_steer_name: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        way, token = self.clairai_exit, self.clairai_token
        hidden_TD = result if way.hidden is None else result[way.hidden]
        residual_TD = None if way.residual is None else result[way.residual]
        steer_name = self.clairai_exit_steer_name
        stream_TD = _steer_door(hidden_TD, residual_TD, way.active, token, steer_name)
        torch.ops.clairai.tap(stream_TD, token, self.clairai_exit_name)
        return result


def _pick(argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives for this argument, by position or by name."""
    return args[argument.index] if argument.index < len(args) else kwargs.get(argument.name)


def _steer_door(
    hidden_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    active: int | None,
    token: torch.Tensor,
    name: Any,
) -> torch.Tensor:
    """The stream at a door of a block, steered before if there is the name of a site for it."""
    if active is not None:
        # The first block's streams lie between each other; ops take whole rows.
        stream_TD = hidden_TD[active].contiguous()
        if name is not None:
            _steer(stream_TD, None, token, name)
            hidden_TD[active].copy_(stream_TD)
        return stream_TD
    if name is not None:
        _steer(hidden_TD, residual_TD, token, name)
    return hidden_TD if residual_TD is None else hidden_TD + residual_TD


def _steer(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, token: torch.Tensor, name: Any
) -> None:
    """Some norms are given one tensor twice (models/commandr.py, 0.26 and 0.32:318): it is alone.

    As a pair the new row would be written and then cleared.
    """
    if residual_TD is None or residual_TD is x_TD:
        torch.ops.clairai.steer_alone(x_TD, token, name)
    else:
        torch.ops.clairai.steer(x_TD, residual_TD, token, name)


class Fused(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """In front of the class of a norm that is always called with two tensors: our kernel instead.

    vLLM itself picks one of several kernels for this norm by platform (ir/ops/layernorm.py,
    0.26:43); ours has the same arithmetic.
    """

    weight: torch.Tensor
    clairai_name: Any

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> Any:
        return torch.ops.clairai.norm(x_TD, residual_TD, self.weight, self.clairai_name)


def attach_tap(
    module: nn.Module, door: Entrance | Exit | None, *, name: str, token: torch.Tensor
) -> None:
    """Make a norm, or a block at one of its doors, hand the stream to the site `name`."""
    module.clairai_token = token  # a plain attribute: sleep and weight reload leave it alone
    if isinstance(door, Entrance):
        module.clairai_entrance, module.clairai_entrance_name = door, encode_name(name)
        _mix_into(module, Entered)
    elif isinstance(door, Exit):
        module.clairai_exit, module.clairai_exit_name = door, encode_name(name)
        _mix_into(module, Left)
    else:
        module.clairai_name = encode_name(name)
        _mix_into(module, Tapped)


def attach_steering(module: nn.Module, door: Entrance | Exit | None, *, name: str) -> None:
    """Make a tapped norm, or a door, steer at the site registered as `name`."""
    if isinstance(door, Entrance):
        module.clairai_entrance_steer_name = encode_name(name)
    elif isinstance(door, Exit):
        module.clairai_exit_steer_name = encode_name(name)
    else:
        module.clairai_steer_name = encode_name(name)
        _mix_into(module, Steered)


def attach_fused_norm(norm: nn.Module, name: str) -> None:
    """Make the site registered as `name` do the work of `norm`."""
    norm.clairai_name = encode_name(name)
    _mix_into(norm, Fused)


def _mix_into(module: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` in front of the class of this one instance."""
    base = type(module)
    own = vars(module).get("forward")
    if isinstance(own, MethodType):
        # It would hide ours: vLLM gives some instances of Hugging Face's modules a forward of their
        # own (models/transformers/fusers/base.py fuse, 0.32:124).
        del module.forward
        base = type(
            base.__name__, (base,), {"__module__": base.__module__, "forward": own.__func__}
        )
    name = f"{kind.__name__}{base.__name__}"
    module.__class__ = type(name, (kind, base), {"__module__": kind.__module__})


def encode_name(name: str) -> Any:
    """A name that is an input of the graph: equal layers still share one compiled piece.

    utils/torch_utils.py, 0.26:887, 0.32:1054.
    """
    from vllm.utils.torch_utils import _encode_layer_name

    return _encode_layer_name(name)


def can_fuse_norms(vllm_config: Any) -> bool:
    """True if norms of ours cost this engine no fusion of vLLM's and break no promise of its.

    compilation/passes/fusion (0.26): norms are fused with the quantisation behind them, and with
    the all-reduce before them. VLLM_BATCH_INVARIANT promises bits that only vLLM's norm keeps.
    """
    is_plain = vllm_config.quant_config is None and os.environ.get(INVARIANT_VARIABLE, "0") in (
        "",
        "0",
    )
    is_single = vllm_config.parallel_config.tensor_parallel_size == 1
    return is_plain and is_single and vllm_config.device_config.device_type == "cuda"


def find_fusible(vllm_config: Any, sites: Sites, names: Iterable[str]) -> list[str]:
    """Those of the sites whose norm can be replaced by ours."""
    if not can_fuse_norms(vllm_config):
        return []
    dtype = vllm_config.model_config.dtype
    return [n for n in names if n in sites.adding and _is_plain_norm(sites.modules[n], dtype)]


def _is_plain_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """model_executor/layers/layernorm.py RMSNorm, 0.26:37 and 0.32: a weight, the whole width."""
    kind = type(norm)
    return (
        (kind.__module__, kind.__name__) == PLAIN_NORM
        and bool(getattr(norm, "has_weight", False))
        and getattr(norm, "variance_size_override", 0) is None
        and norm.weight.dtype == dtype
    )


def define_ops() -> None:
    """Define `clairai::tap`, `steer`, `steer_alone` and `norm`, once per process.

    Sites are looked up by name when an op runs. An op that returns nothing declares that it changes
    `token`, so that the compiler neither drops it nor moves it across another.
    """
    _define_tap()
    _define_steer()
    _define_norm()


def _define_tap() -> None:
    """`tap(x, token!, name)`."""
    from vllm.utils.torch_utils import LayerNameType

    def tap(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        find_site(name).read(x)

    def fake(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    types = {"x": torch.Tensor, "token": torch.Tensor, "name": LayerNameType, "return": None}
    _register_op(TAP_OP, tap, fake, types)


def _define_steer() -> None:
    """`steer(x!, residual!, token!, name)`, and `steer_alone(x!, token!, name)` for one tensor."""
    from vllm.utils.torch_utils import LayerNameType

    def steer(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del token
        find_site(name).apply(x, residual)

    def steer_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del token
        find_site(name).apply(x, None)

    def fake(
        x: torch.Tensor, residual: torch.Tensor, token: torch.Tensor, name: LayerNameType
    ) -> None:
        del x, residual, token, name

    def fake_alone(x: torch.Tensor, token: torch.Tensor, name: LayerNameType) -> None:
        del x, token, name

    tensor = torch.Tensor
    alone = {"x": tensor, "token": tensor, "name": LayerNameType, "return": None}
    pair = {"x": tensor, "residual": tensor, "token": tensor, "name": LayerNameType, "return": None}
    _register_op(STEER_OP, steer, fake, pair, changes=("x", "residual", "token"))
    _register_op(STEER_ALONE_OP, steer_alone, fake_alone, alone, changes=("x", "token"))


def _define_norm() -> None:
    """`norm(x, residual, weight, name) -> (normed, stream)`.

    It changes none of its arguments, so the compiler copies nothing for it; what it leaves in the
    stash is read when the forward is over.
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
    _register_op(NORM_OP, norm, fake, types, changes=())


def _register_op(
    name: str,
    op: Callable[..., Any],
    fake: Callable[..., Any],
    types: dict[str, Any],
    changes: Sequence[str] = ("token",),
) -> None:
    """Define one op that changes these arguments; nothing happens the second time."""
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
