"""Takes the class of a decoder block; gives which of its norms see the residual stream, and where.

Read from the source of the block's own forward, so that a new architecture of a known shape is
served, and one of another shape is refused with the reason, without a table that goes stale.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn

PARALLEL: Final = "attention and MLP read the same stream (parallel block): there is no such point"
POST_NORM: Final = (
    "the block normalises after its sublayers (post-LN): no norm sees the residual stream here"
)


@dataclass(frozen=True)
class Block:
    """Names of the norms whose residual is the stream; None, and why, where there is none."""

    pre_attn: str | None
    post_attn: str | None
    reason: str = ""


@dataclass(frozen=True)
class Call:
    """One `self.name(...)` in a forward, in source order."""

    name: str
    num_args: int


# Blocks that pass one tensor: a norm called with one argument may see the stream or a sublayer's
# output, and only reading the code tells. Read in vllm/model_executor/models/ for 0.26.0 and 0.32.0
# and compared with Hugging Face in tests/fidelity.
ONE_TENSOR: Final = {
    "OPTDecoderLayer": ("self_attn_layer_norm", "final_layer_norm"),
    "GPT2Block": ("ln_1", "ln_2"),
    "Starcoder2DecoderLayer": ("input_layernorm", "post_attention_layernorm"),
}


def read_block(block: nn.Module) -> Block:
    name = type(block).__name__
    if name in ONE_TENSOR:
        return _one_tensor(block, *ONE_TENSOR[name])
    calls = list(calls_of(type(block).forward))
    attention = _first(calls, lambda call: _is_attention(block, call.name))
    mlp = _first(calls, lambda call: _is_mlp(block, call.name))
    if attention is None or mlp is None:
        return Block(None, None, f"{name}: no attention and MLP children called by name")
    before = [c for c in calls[:attention] if _is_fused_norm(block, c)]
    between = [c for c in calls[attention:mlp] if _is_fused_norm(block, c)]
    if not before:
        return Block(None, None, f"{name}: {POST_NORM}")
    if not between:
        return Block(before[0].name, None, f"{name}: {PARALLEL}")
    return Block(before[0].name, between[-1].name)


def _one_tensor(block: nn.Module, pre_attn: str, post_attn: str) -> Block:
    # OPT-350m (models/opt.py, do_layer_norm_before): the same class, normalised afterwards.
    if getattr(block, "do_layer_norm_before", True):
        return Block(pre_attn, post_attn)
    return Block(None, None, f"{type(block).__name__}: {POST_NORM}")


def calls_of(function: Callable[..., object]) -> Iterator[Call]:
    """Every `self.name(...)` of a function, in source order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _of_self(node)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        assert isinstance(node.func, ast.Attribute)
        yield Call(node.func.attr, len(node.args) + len(node.keywords))


def _of_self(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _first(calls: list[Call], wanted: Callable[[Call], bool]) -> int | None:
    return next((index for index, call in enumerate(calls) if wanted(call)), None)


def _child(block: nn.Module, name: str) -> nn.Module | None:
    child = getattr(block, name, None)
    return child if isinstance(child, nn.Module) else None


def is_norm(module: nn.Module | None) -> bool:
    return module is not None and "Norm" in type(module).__name__


def _is_fused_norm(block: nn.Module, call: Call) -> bool:
    """A norm that adds the residual in: what it returns as residual is the stream itself."""
    return call.num_args == 2 and is_norm(_child(block, call.name))


def _is_attention(block: nn.Module, name: str) -> bool:
    child = _child(block, name)
    return child is not None and ("attn" in name or "attention" in name) and not is_norm(child)


def _is_mlp(block: nn.Module, name: str) -> bool:
    child = _child(block, name)
    marks = ("mlp", "feed_forward", "moe", "ffn")
    return child is not None and any(mark in name for mark in marks) and not is_norm(child)
