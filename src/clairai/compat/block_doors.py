"""Finds where the residual stream enters and leaves a decoder block, by reading who runs it.

The class that runs the blocks gives each one tensors and takes tensors of the same names back:
those carry the stream. One tensor is the stream itself. Two are its parts if the block begins by
adding them up; a part that the block overwrites before it reads it does not count. A tensor that
the block indexes by a number of its own before it returns it holds several streams, of which that
one is active (models/gemma3n.py, 0.32): it is the stream here. Any other way is refused. Runs in:
the worker, and `clairai doctor`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from clairai.compat.block_norms import is_norm
from clairai.compat.forward_source import (
    Assignment,
    Choose,
    Loop,
    assigned_names,
    called_child,
    find_child,
    find_forward,
    given_to,
    list_loops,
    list_statements,
    name_of,
    names_in,
    parse_forwards,
    possible_branches,
)

NOT_READ: Final = "how it runs its blocks cannot be read in its forward"


class UnknownDoorError(Exception):
    """The source does not say where the stream enters or leaves a block; the text is the reason."""


@dataclass(frozen=True)
class Argument:
    """An argument of a forward, which may be given by position or by name."""

    index: int
    name: str


@dataclass(frozen=True)
class Entrance:
    """The stream comes into a block as `hidden`, or as the sum of both."""

    hidden: Argument
    residual: Argument | None
    active: int | None = None  # of the streams that `hidden` holds; None: it is one


@dataclass(frozen=True)
class Exit:
    """The stream leaves a block as one of the returned tensors, or as the sum of two.

    None as `hidden`: the block returns that tensor alone.
    """

    hidden: int | None
    residual: int | None
    active: int | None = None  # of the streams that `hidden` holds; None: it is one


@dataclass(frozen=True)
class BlockDoors:
    entrance: Entrance
    exit: Exit


@dataclass(frozen=True)
class _Carried:
    """A tensor that one block gives back and the next one gets."""

    argument: Argument
    result: int | None


def read_doors(owner: nn.Module, list_name: str, block: nn.Module) -> BlockDoors:
    """The doors of a block of `owner.<list_name>`; UnknownDoorError says why there are none."""
    calls = [*_list_block_calls(owner, list_name)]
    if not calls:
        raise UnknownDoorError(f"{type(owner).__name__}: {NOT_READ}")
    ways = {_doors_of_call(call, block) for call in calls}
    if len(ways) > 1:
        raise UnknownDoorError(f"{type(owner).__name__} runs its blocks in {len(ways)} ways")
    return ways.pop()


def _doors_of_call(call: BlockCall, block: nn.Module) -> BlockDoors:
    kind = type(block).__name__
    carried = [one for one in _list_carried(call, block) if _is_read(block, one.argument.name)]
    if not carried or len(carried) > 2:
        raise UnknownDoorError(
            f"{kind}: {len(carried)} tensors travel from block to block, "
            "and not the residual stream, or its two parts, alone"
        )
    hidden, residual = carried[0], carried[1] if len(carried) > 1 else None
    if residual is None:
        active = _find_active_stream(block) if hidden.result is None else None
        return BlockDoors(
            Entrance(hidden.argument, None, active), Exit(hidden.result, None, active)
        )
    if not _begins_with_sum(block, hidden.argument.name, residual.argument.name):
        raise UnknownDoorError(
            f"{kind}: does not begin by adding {hidden.argument.name} and "
            f"{residual.argument.name} up, so nothing says that their sum is the residual stream"
        )
    return BlockDoors(
        Entrance(hidden.argument, residual.argument), Exit(hidden.result, residual.result)
    )


# --- the loop over the blocks ---


@dataclass(frozen=True)
class BlockCall:
    """`hidden, residual = layer(positions, hidden, residual)` in a loop."""

    node: ast.Call
    results: dict[str, int | None]  # names that are assigned, and which of the results


def runs_blocks(owner: nn.Module, list_name: str) -> bool:
    """True if the forward of `owner` has a loop that runs the blocks of this list."""
    return any(True for _ in _list_block_calls(owner, list_name))


def _list_block_calls(owner: nn.Module, list_name: str) -> Iterator[BlockCall]:
    trees = parse_forwards(type(owner))
    possible = possible_branches(owner)
    body = [statement for tree in trees for statement in list_statements(tree.body, possible)]
    for loop in (loop for tree in trees for loop in list_loops(tree)):
        for node in list_block_calls(loop, list_name):
            if node in body:  # and not in a branch that this model never takes
                assert isinstance(node.value, ast.Call)
                yield BlockCall(node.value, _name_results(node, loop))


def list_block_calls(loop: Loop, list_name: str) -> list[ast.Assign]:
    """`... = layer(...)`, where layer is the loop's variable, or taken from the list of blocks."""
    blocks = f"self.{list_name}["
    assigns = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    layers: set[str] = set()
    if isinstance(loop, ast.For) and f"self.{list_name}" in ast.unparse(loop.iter):
        layers = names_in(loop.target)
    for node in assigns:
        if ast.unparse(node.value).startswith(blocks):
            layers |= assigned_names(node)

    def is_block_call(node: ast.Assign) -> bool:
        function = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return function in layers or function.startswith(blocks)

    return [node for node in assigns if is_block_call(node)]


def _name_results(node: ast.Assign, loop: Loop) -> dict[str, int | None]:
    target = node.targets[0]
    if isinstance(target, ast.Tuple):
        names = [name_of(part) for part in target.elts]
        return {name: index for index, name in enumerate(names) if name not in (None, "_")}
    name = name_of(target)
    if name is None:
        return {}
    # `outputs = layer(...)`, then `hidden = outputs`, or `hidden = outputs[0]`
    results: dict[str, int | None] = {name: None}
    for other in (one for one in ast.walk(loop) if isinstance(one, ast.Assign)):
        copied, value = name_of(other.targets[0]), other.value
        if copied and name_of(value) == name:
            results[copied] = None
        elif copied and isinstance(value, ast.Subscript) and name_of(value.value) == name:
            results[copied] = _read_index(value.slice)
    return results


def _read_index(node: ast.expr) -> int:
    index = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(index, int):
        raise UnknownDoorError(f"which result of a block is {ast.unparse(node)} cannot be read")
    return index


def _list_carried(call: BlockCall, block: nn.Module) -> list[_Carried]:
    """Tensors that are given to a block and assigned from what it returns, in its own order."""
    _, forward = find_forward(type(block))
    parameters = [*inspect.signature(forward).parameters][1:]
    given: dict[str, Argument] = {}
    for index, value in enumerate(call.node.args):
        if isinstance(value, ast.Starred):
            break
        if index < len(parameters):
            given[name_of(value) or ""] = Argument(index, parameters[index])
    for keyword in call.node.keywords:
        if keyword.arg in parameters:
            argument = Argument(parameters.index(keyword.arg), keyword.arg)
            given[name_of(keyword.value) or ""] = argument
    carried = [
        _Carried(given[name], result) for name, result in call.results.items() if name in given
    ]
    return sorted(carried, key=lambda one: one.result or 0)


# --- what the block does with what it is given ---


def _is_read(block: nn.Module, name: str) -> bool:
    """True if the forward reads this argument before it assigns it."""
    for statement in _parse_forward(type(block), name).body:
        loads = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]
        if loads:
            return True
        if isinstance(statement, Assignment) and name in assigned_names(statement):
            return False
    return False


def _parse_forward(kind: type[Any], name: str) -> ast.FunctionDef:
    """The forward that does the work: the last one by `super().forward` that takes this name."""
    trees = parse_forwards(kind)
    taking = [tree for tree in trees if name in {argument.arg for argument in tree.args.args}]
    return taking[-1] if taking else trees[0]


def _find_active_stream(block: nn.Module) -> int | None:
    """The number in `self.number` if the forward reads `name[self.number]` and returns `name`."""
    tree = parse_forwards(type(block))[-1]
    returned = {name_of(node.value) for node in ast.walk(tree) if isinstance(node, ast.Return)}
    numbers = {
        getattr(block, node.slice.attr, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and name_of(node.value) in returned - {None}
        if isinstance(node.slice, ast.Attribute) and ast.unparse(node.slice.value) == "self"
    }
    active = numbers.pop() if len(numbers) == 1 else None
    return active if isinstance(active, int) else None


def _begins_with_sum(block: nn.Module, hidden: str, residual: str) -> bool:
    """True if the first that a block does with the two, where both are given, is to add them up."""
    tree = _parse_forward(type(block), residual)
    for statement in list_statements(tree.body, _with_both(block, residual)):
        if residual in _loaded_names(statement):
            return any(_is_sum(node, block, {hidden, residual}) for node in ast.walk(statement))
        if isinstance(statement, Assignment) and {hidden, residual} & assigned_names(statement):
            return False
    return False


def _with_both(block: nn.Module, residual: str) -> Choose:
    """Branches that are taken where `residual` is given, which the first block's is not."""
    possible = possible_branches(block)

    def choose(statement: ast.If) -> Sequence[list[ast.stmt]]:
        test = ast.unparse(statement.test)
        if test == f"{residual} is None":
            return [statement.orelse]
        if test == f"{residual} is not None":
            return [statement.body]
        return possible(statement)

    return choose


def _loaded_names(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _is_sum(node: ast.AST, block: nn.Module, both: set[str]) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return {name_of(node.left), name_of(node.right)} == both
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return {name_of(node.target), name_of(node.value)} == both
    if isinstance(node, ast.Call):
        norm = find_child(block, called_child(node) or "")
        return is_norm(norm) and {name_of(given) for given in given_to(node)} == both
    return False
