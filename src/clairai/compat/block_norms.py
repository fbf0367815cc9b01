"""Finds the modules of a decoder block that are given the residual stream, by reading its forward.

A norm sees the stream in two ways: called with two tensors it adds them up, and the residual it
returns is the stream; called with one tensor that the block keeps for the sum after the sublayer,
it is given the stream. A block that normalises after its sublayers gives the stream to its MLP in
the second way. Runs in: the worker, and `clairai doctor`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from clairai.compat.forward_source import (
    Assignment,
    assigned_names,
    called_child,
    calls_in,
    find_child,
    find_forward,
    given_to,
    is_super_forward,
    list_statements,
    name_of,
    next_forward_class,
    parse,
    parse_forwards,
    possible_branches,
)

NO_NORM_BEFORE: Final = "no norm before its first sublayer is given the residual stream"
NOTHING_BETWEEN: Final = (
    "nothing between attention and MLP is given the residual stream (a parallel block has no such "
    "point)"
)
SEVERAL_MIXERS: Final = (
    "has several attentions, each followed by an MLP, so several streams lie between the two"
)
NO_MLP: Final = "calls no attention, or another mixer, and then an MLP of its own"


@dataclass(frozen=True)
class BlockNorms:
    """Names of a block's modules that see the stream; None where there is none."""

    pre_attn: str | None
    post_attn: str | None
    is_fused: bool  # the stream travels as two tensors, added up by the next norm
    reason: str = ""  # why there is no post_attn


@dataclass(frozen=True)
class ForwardCall:
    """One `self.name(...)` in a forward."""

    name: str
    num_args: int
    is_saved: bool  # its first argument was saved as the residual just before
    num_added: int | None = None  # to the stream, which is its only argument; None: it is not

    @property
    def sees_stream(self) -> bool:
        is_given = self.is_saved or self.num_added is not None
        return self.num_args == 2 or (self.num_args == 1 and is_given)

    @property
    def adds_up(self) -> bool:
        """Not where both arguments are one tensor: such a norm returns its residual as it is.

        models/commandr.py, LayerNorm, 0.26:83 and 0.32:85.
        """
        return self.num_args == 2 and not self.is_saved


def read_block_norms(block: nn.Module, stream: str | None = None) -> BlockNorms:
    """`stream` names the argument of the forward that is the stream, where one tensor is."""
    calls = list(list_calls(type(block), block, stream))
    mixer = _find_mixer(block, calls)
    if mixer is None:
        return BlockNorms(None, None, False, f"{type(block).__name__}: {NO_MLP}")
    before = [call for call in calls[:mixer] if _is_norm_of(block, call.name) and call.sees_stream]
    between, reason = _find_between(block, calls, mixer)
    is_fused = any(call.adds_up for call in (*before, *between))
    if not before or _is_called_afterwards(block, before[0].name, calls):
        before = []
    return BlockNorms(
        before[0].name if before else None,
        between[-1].name if between else None,
        is_fused,
        reason,
    )


def _find_between(
    block: nn.Module, calls: list[ForwardCall], mixer: int
) -> tuple[list[ForwardCall], str]:
    """Calls between the mixer and the MLP that see what the mixer has left of the stream."""
    kind = type(block).__name__
    mlp = _first(calls, lambda name: _is_mlp(block, name))
    if mlp is None or mlp < mixer:
        return [], f"{kind}: {NO_MLP}"
    later = [call.name for call in calls[mlp:] if _is_attention(block, call.name)]
    if any(name != calls[mixer].name for name in later):
        return [], f"{kind}: {SEVERAL_MIXERS}"
    norms = [call for call in calls[mixer:mlp] if _is_norm_of(block, call.name)]
    # A norm that is given what came into the block is that of a parallel MLP.
    between = [call for call in norms if call.sees_stream and call.num_added != 0]
    if not between and calls[mlp].num_added:
        between = [calls[mlp]]
    if not between:
        between = _find_in_mixer(block, calls[mixer].name) or _find_summed(block, calls[mixer:mlp])
        return between, "" if between else f"{kind}: {NOTHING_BETWEEN}"
    if _is_called_afterwards(block, between[-1].name, calls):
        return [], f"{kind}: {NOTHING_BETWEEN}"
    return between, ""


def _find_in_mixer(block: nn.Module, mixer: str) -> list[ForwardCall]:
    """The norm behind attention, where a child of the block does both and returns the stream, too.

    models/dbrx.py, DbrxFusedNormAttention, 0.32:306.
    """
    child = find_child(block, mixer)
    if not isinstance(child, nn.Module):
        return []
    _, forward = find_forward(type(child))
    returns = [node.value for node in ast.walk(parse(forward)) if isinstance(node, ast.Return)]
    calls = list(list_calls(type(child), child))
    attention = _first(calls, lambda name: _is_attention(child, name))
    if attention is None or not all(isinstance(value, ast.Tuple) for value in returns):
        return []
    norms = [call for call in calls[attention:] if _is_norm_of(child, call.name)]
    return [
        replace(call, name=f"{mixer}.{call.name}")
        for call in norms[-1:]
        if call.num_args == 1 and call.is_saved
    ]


def _find_summed(block: nn.Module, calls: list[ForwardCall]) -> list[ForwardCall]:
    """Of these calls, which begin with the mixer: norms given a sum that the block adds to later.

    models/gemma3n.py, Gemma3nDecoderLayer, 0.32:536.
    """
    _, forward = find_forward(type(block))
    statements = [*list_statements(parse(forward).body, possible_branches(block))]
    at = {
        called_child(node): (index, node)
        for index, statement in enumerate(statements)
        for node in calls_in(statement)
    }
    if not {call.name for call in calls} <= at.keys():
        return []  # some of them are in a forward that this one calls
    mixed, _ = at[calls[0].name]
    found: list[ForwardCall] = []
    for call in (one for one in calls if _is_norm_of(block, one.name) and one.num_args == 1):
        index, node = at[call.name]
        given = name_of(given_to(node)[0])
        is_sum = any(_assigns_sum(one, given) for one in statements[mixed + 1 : index])
        if is_sum and _is_added_later(statements[index + 1 :], given):
            found.append(call)
    return found


def _assigns_sum(statement: ast.stmt, name: str | None) -> bool:
    """True if `name` is assigned something that an addition is part of."""
    if not isinstance(statement, Assignment) or name not in assigned_names(statement):
        return False
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.BinOp)]
    return any(isinstance(node.op, ast.Add) for node in nodes)


def _is_added_later(statements: list[ast.stmt], name: str | None) -> bool:
    """True if one of these statements adds to `name` before any assigns it again."""
    for statement in statements:
        if isinstance(statement, Assignment):
            terms = _terms(statement.value) if statement.value is not None else []
            if len(terms) > 1 and name in terms:
                return True
            if name in assigned_names(statement):
                return False
    return False


def _find_mixer(block: nn.Module, calls: list[ForwardCall]) -> int | None:
    """The call of attention, else of the first child that is neither a norm nor an MLP."""
    attention = _first(calls, lambda name: _is_attention(block, name))
    if attention is not None:
        return attention
    return _first(calls, lambda name: _is_sublayer(block, name) and not _is_mlp(block, name))


def _is_called_afterwards(block: nn.Module, name: str, calls: list[ForwardCall]) -> bool:
    """The forward can also use this norm on a sublayer's output; only a flag tells which.

    models/opt.py, `do_layer_norm_before`, 0.26 and 0.32: OPT-350m normalises afterwards.
    """
    can = any(call.name == name and not call.sees_stream for call in calls)
    return can and not getattr(block, "do_layer_norm_before", False)


def list_calls(
    kind: type[Any], module: object = None, stream: str | None = None
) -> Iterator[ForwardCall]:
    """Every `self.name(...)` of the class's forward in source order, through `super().forward`.

    Branches that the attributes of `module` rule out are left out.
    """
    owner, forward = find_forward(kind)
    saved: set[str] = set()
    held = _StreamNames(frozenset({stream} - {None}), 0)
    for statement in list_statements(parse(forward).body, possible_branches(module)):
        after = _follow_stream(statement, held)
        for node in calls_in(statement):
            name = called_child(node)
            if is_super_forward(node):
                yield from list_calls(next_forward_class(kind, owner), module, stream)
            elif name is not None:
                given = given_to(node)
                first = name_of(given[0]) if given else None
                is_kept = len(given) == 1 and first in held.names and bool(after.names)
                num_added = held.num_added if is_kept else None
                yield ForwardCall(name, len(given), first in saved, num_added)
        held = after
        _note_saved(statement, saved)


@dataclass(frozen=True)
class _StreamNames:
    """The names that hold the stream at one place of a forward."""

    names: frozenset[str | None]
    num_added: int  # to the stream that came into the block


def _note_saved(statement: ast.stmt, saved: set[str]) -> None:
    """`residual = hidden` saves hidden, until hidden is assigned again."""
    if not isinstance(statement, ast.Assign):
        return
    saved -= assigned_names(statement)
    if isinstance(statement.value, ast.Name):
        saved.add(statement.value.id)


def _follow_stream(statement: ast.stmt, held: _StreamNames) -> _StreamNames:
    """The names that hold the stream after a statement.

    A copy of such a name does, too. A sum with the stream is the stream from then on.
    """
    if not isinstance(statement, Assignment):
        return held
    targets, value = assigned_names(statement), statement.value
    is_sum = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
    terms = [*(_terms(value) if value is not None else ()), *(targets if is_sum else ())]
    if len(targets) == 1 and len(terms) > 1 and held.names & {*terms}:
        return _StreamNames(frozenset(targets), held.num_added + 1)
    if len(targets) == 1 and len(terms) == 1 and terms[0] in held.names:
        return _StreamNames(held.names | targets, held.num_added)
    return _StreamNames(held.names - targets, held.num_added)


def _terms(value: ast.expr) -> list[str | None]:
    """The names, or None for anything else, that a sum adds up."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [*_terms(value.left), *_terms(value.right)]
    return [name_of(value)]


def find_passed_norms(model: nn.Module) -> dict[nn.Module, str]:
    """Norms that a module's forward gives to a function instead of calling them itself.

    The function may do the norm's work and pass the norm by: models/common/ops/
    fused_allreduce_rms_norm.py does for small batches, 0.32:40.
    """
    found: dict[nn.Module, str] = {}
    passed = {kind: _list_passed(kind) for kind in set(map(type, model.modules()))}
    for module in model.modules():
        for name, function in passed[type(module)].items():
            norm = getattr(module, name, None)
            if isinstance(norm, nn.Module) and is_norm(norm):
                found[norm] = f"{type(module).__name__} gives {name} to {function}"
    return found


def _list_passed(kind: type[Any]) -> dict[str, str]:
    """Attributes of self that the class's forward gives to functions, each with the function."""
    try:
        tree = parse(kind.forward)
    except (OSError, TypeError, SyntaxError):  # no source in Python: it gives nothing away
        return {}
    found: dict[str, str] = {}
    for call in calls_in(tree):
        for given in given_to(call):
            if isinstance(given, ast.Attribute) and ast.unparse(given.value) == "self":
                found[given.attr] = ast.unparse(call.func)
    return found


def scales_stream_in_half(kind: type[Any]) -> bool:
    """True if the forward multiplies its tensors where the model runs in float16.

    models/deepseek_v2.py, DeepseekV2DecoderLayer, 0.32:1384; AXK1.py and openpangu.py alike.
    """
    branches = [
        node
        for tree in parse_forwards(kind)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "torch.float16" in ast.unparse(node.test)
    ]
    return any(_is_product(node) for branch in branches for node in ast.walk(branch))


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Mult | ast.Div)
    value = node.value if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div)


def _first(calls: list[ForwardCall], is_wanted: Callable[[str], bool]) -> int | None:
    return next((index for index, call in enumerate(calls) if is_wanted(call.name)), None)


def is_norm(module: object) -> bool:
    """By the name of its class; one with modules of its own is more than a norm (Dbrx)."""
    if not isinstance(module, nn.Module) or "Norm" not in type(module).__name__:
        return False
    return next(module.children(), None) is None


def _is_norm_of(block: nn.Module, name: str) -> bool:
    return is_norm(find_child(block, name))


def _is_sublayer(block: nn.Module, name: str) -> bool:
    child = find_child(block, name)
    return isinstance(child, nn.Module) and not is_norm(child)


def _is_attention(block: nn.Module, name: str) -> bool:
    """A child, or a method of the block itself (models/jamba.py, 0.32)."""
    child = find_child(block, name)
    return callable(child) and not is_norm(child) and "att" in name


def _is_mlp(block: nn.Module, name: str) -> bool:
    marks = ("mlp", "feed_forward", "moe", "ffn", "fc1")
    return _is_sublayer(block, name) and any(mark in name for mark in marks)
