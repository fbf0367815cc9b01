"""Takes a decoder block; gives which of its norms see the residual stream, and where.

Read from the source of the block's own forward, so that a new architecture of a known shape is
served, and one of another shape is refused with the reason, without a table that goes stale.

A norm sees the stream in two ways: called with two tensors it adds them up, and what it returns as
residual is the stream; called with one that was saved as the residual just before, it is given it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

NONE_BEFORE: Final = (
    "no norm before attention is given the residual stream (a post-LN block, or a shape not known)"
)
NONE_BETWEEN: Final = (
    "no norm between attention and MLP is given the residual stream (a parallel block has no such "
    "point)"
)


@dataclass(frozen=True)
class Block:
    """Names of the norms that see the stream; None, and why, where there is none."""

    pre_attn: str | None
    post_attn: str | None
    is_fused: bool  # the stream travels as two tensors, added up by the next norm
    reason: str = ""


@dataclass(frozen=True)
class Call:
    """One `self.name(...)` of a forward."""

    name: str
    num_args: int
    is_saved: bool  # its first argument was kept as the residual just before

    @property
    def sees_stream(self) -> bool:
        return self.num_args == 2 or (self.num_args == 1 and self.is_saved)

    @property
    def adds_up(self) -> bool:
        """Not where the two are one tensor: such a norm hands its residual through as it is.

        models/commandr.py, LayerNorm, 0.26:83 and 0.32:85.
        """
        return self.num_args == 2 and not self.is_saved


def read_block(block: nn.Module) -> Block:
    calls = list(calls_of(type(block)))
    attention = _first(calls, lambda name: _is_attention(block, name))
    mlp = _first(calls, lambda name: _is_mlp(block, name))
    kind = type(block).__name__
    if attention is None or mlp is None:
        return Block(None, None, False, f"{kind}: calls no attention and MLP children of its own")
    norms = [call if _is_norm_of(block, call.name) and call.sees_stream else None for call in calls]
    before = [call for call in norms[:attention] if call]
    between = [call for call in norms[attention:mlp] if call]
    is_fused = any(call.adds_up for call in (*before, *between))
    if not before or _is_called_afterwards(block, before[0].name, calls):
        return Block(None, None, is_fused, f"{kind}: {NONE_BEFORE}")
    if not between:
        return Block(before[0].name, None, is_fused, f"{kind}: {NONE_BETWEEN}")
    return Block(before[0].name, between[-1].name, is_fused)


def _is_called_afterwards(block: nn.Module, name: str, calls: list[Call]) -> bool:
    """The forward can also use this norm on a sublayer's output: then only a flag tells which.

    models/opt.py, `do_layer_norm_before`, 0.26 and 0.32: OPT-350m normalises afterwards.
    """
    can = any(call.name == name and not call.sees_stream for call in calls)
    return can and not getattr(block, "do_layer_norm_before", False)


def calls_of(kind: type[Any]) -> Iterator[Call]:
    """Every `self.name(...)` of the class's forward in source order, through `super().forward`."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    forward = inspect.unwrap(vars(owner)["forward"])
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    saved: set[str] = set()
    for statement in _statements(tree.body):
        for node in _calls(statement):
            if _is_super_forward(node):
                yield from calls_of(_parent(kind, owner))
            elif _is_of_self(node):
                yield _call(node, saved)
        _note_saved(statement, saved)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements in source order; branches one after the other."""
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if any(inner):
            for part in inner:
                yield from _statements(part)
        else:
            yield statement


def _calls(statement: ast.stmt) -> list[ast.Call]:
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _call(node: ast.Call, saved: set[str]) -> Call:
    assert isinstance(node.func, ast.Attribute)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_saved = bool(given) and isinstance(given[0], ast.Name) and given[0].id in saved
    return Call(node.func.attr, len(given), is_saved)


def _note_saved(statement: ast.stmt, saved: set[str]) -> None:
    """`residual = hidden` saves hidden, until hidden is assigned again."""
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        saved -= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    if isinstance(statement.value, ast.Name):
        saved.add(statement.value.id)


def _is_of_self(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _is_super_forward(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "super().forward"


def _parent(kind: type[Any], owner: type[Any]) -> type[Any]:
    """A class that starts where `super()` in `owner` would look."""
    rest = kind.__mro__[kind.__mro__.index(owner) + 1 :]
    return next(base for base in rest if "forward" in vars(base))


def _first(calls: list[Call], wanted: Callable[[str], bool]) -> int | None:
    return next((index for index, call in enumerate(calls) if wanted(call.name)), None)


def is_norm(module: object) -> bool:
    return isinstance(module, nn.Module) and "Norm" in type(module).__name__


def _is_norm_of(block: nn.Module, name: str) -> bool:
    return is_norm(getattr(block, name, None))


def _is_attention(block: nn.Module, name: str) -> bool:
    child = getattr(block, name, None)
    return isinstance(child, nn.Module) and not is_norm(child) and "att" in name


def _is_mlp(block: nn.Module, name: str) -> bool:
    child = getattr(block, name, None)
    marks = ("mlp", "feed_forward", "moe", "ffn", "fc1")
    return isinstance(child, nn.Module) and not is_norm(child) and any(m in name for m in marks)
