"""Reads the source of a module's forward: its statements, its calls, what it assigns.

Nothing here knows what a norm, a block or the residual stream is: block_norms.py and block_doors.py
ask about those. Runs in: the worker, and `clairai doctor`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final

Loop = ast.For | ast.While
Assignment = ast.Assign | ast.AugAssign | ast.AnnAssign

_UNKNOWN: Final = object()
# A test made of these alone says the same in every forward.
_CONSTANT_NODES: Final = (
    *(ast.Attribute, ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Load),
    *(ast.cmpop, ast.boolop, ast.unaryop),
)


def find_forward(kind: type[Any]) -> tuple[type[Any], Callable[..., Any]]:
    """The class among the bases of `kind` that has the forward, and that forward, unwrapped."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return owner, inspect.unwrap(vars(owner)["forward"])


def next_forward_class(kind: type[Any], owner: type[Any]) -> type[Any]:
    """The class whose forward `super().forward` in `owner` calls."""
    rest = kind.__mro__[kind.__mro__.index(owner) + 1 :]
    return next(base for base in rest if "forward" in vars(base))


@cache
def parse(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def parse_forwards(kind: type[Any]) -> list[ast.FunctionDef]:
    """The class's forward, and those of its bases that it reaches by `super().forward`."""
    owner, forward = find_forward(kind)
    tree = parse(forward)
    if any(is_super_forward(node) for node in calls_in(tree)):
        return [tree, *parse_forwards(next_forward_class(kind, owner))]
    return [tree]


Choose = Callable[[ast.If], Sequence[list[ast.stmt]]]


def list_statements(body: list[ast.stmt], choose: Choose) -> Iterator[ast.stmt]:
    """Simple statements in source order; of an `if`, the branches that `choose` gives."""
    for statement in body:
        if isinstance(statement, ast.If):
            inner = choose(statement)
        else:
            inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            if not any(inner):
                yield statement
        for part in inner:
            yield from list_statements(part, choose)


def possible_branches(module: object) -> Choose:
    """Chooses the branches of an `if` that this module can take: its own flags may decide."""

    def choose(statement: ast.If) -> Sequence[list[ast.stmt]]:
        value = _evaluate(statement.test, module)
        if value is _UNKNOWN:
            return statement.body, statement.orelse
        return [statement.body if value else statement.orelse]

    return choose


def _evaluate(test: ast.expr, module: object) -> object:
    """The value of a test that reads attributes of `self` alone; _UNKNOWN for any other."""
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if names != {"self"} or not all(isinstance(node, _CONSTANT_NODES) for node in nodes):
        return _UNKNOWN
    try:
        return bool(_value_of(test, module))
    except Exception:  # an attribute that it lacks, or that cannot be compared
        return _UNKNOWN


def _value_of(node: ast.expr, module: object) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return module
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, module), node.attr)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value_of(node.operand, module)
    if isinstance(node, ast.BoolOp):
        values = (bool(_value_of(value, module)) for value in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _value_of(node.left, module), _value_of(node.comparators[0], module)
        return _COMPARISONS[type(node.ops[0])](left, right)
    raise ValueError(ast.unparse(node))


_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
}


def calls_in(statement: ast.AST) -> list[ast.Call]:
    """Calls in the order in which they run: one that is given to another comes first."""
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))


def is_super_forward(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "super().forward"


def called_child(node: ast.Call) -> str | None:
    """`name` of a call `self.name(...)`, `name.0` of `self.name[0](...)`; None for any other."""
    function: ast.expr = node.func
    index = ""
    if isinstance(function, ast.Subscript) and isinstance(function.slice, ast.Constant):
        index = f".{function.slice.value!r}"
        function = function.value
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self":
        return f"{function.attr}{index}"
    return None


def find_child(module: object, path: str) -> Any:
    """The attribute of a module that `called_child` names; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def given_to(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def list_loops(tree: ast.AST) -> list[Loop]:
    """All loops in the tree; a loop itself comes first."""
    return [node for node in ast.walk(tree) if isinstance(node, Loop)]


def assigned_names(node: Assignment) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in names_in(target)}


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def name_of(node: ast.expr | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
