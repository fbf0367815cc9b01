"""Rules of style: each gives one line for every place of a parsed module that breaks it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final

from tests.shape.source import functions

MUTABLE_CALLS: Final = frozenset(
    ("dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque")
)
MUTABLE: Final = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
NESTING: Final = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar),
    ast.Match,
)
BROAD: Final = ("Exception", "BaseException")
VAGUE: Final = frozenset(("manager", "managers", "helper", "helpers", "util", "utils", "utility"))


def long_functions(tree: ast.Module, limit: int) -> list[str]:
    return [
        f"{node.name} has {num_lines(node)} lines"
        for node in functions(tree)
        if num_lines(node) > limit
    ]


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def deep_functions(tree: ast.Module, limit: int) -> list[str]:
    """Functions with a statement inside more than `limit` others; elif is as deep as its if."""
    return [
        f"{node.name} is nested {depth(node.body)} deep"
        for node in functions(tree)
        if depth(node.body) > limit
    ]


def depth(body: list[ast.stmt]) -> int:
    return max((_depth(statement) for statement in body), default=0)


def _depth(node: ast.stmt) -> int:
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + depth(node.body), _depth(node.orelse[0]))
    return (1 if isinstance(node, NESTING) else 0) + depth(_inner(node))


def _inner(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []  # measured on their own
    parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    parts += [part.body for name in ("handlers", "cases") for part in getattr(node, name, [])]
    return [statement for part in parts for statement in part]


def swallowed_errors(tree: ast.Module) -> list[str]:
    """Bare excepts; and broad ones, or suppress(Exception), that do nothing with the error."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.ExceptHandler)]
    return [f"line {node.lineno}" for node in nodes if _is_swallowing(node)]


def _is_swallowing(node: ast.Call | ast.ExceptHandler) -> bool:
    if isinstance(node, ast.Call):
        is_suppress = ast.unparse(node.func).endswith("suppress")
        return is_suppress and any(ast.unparse(arg) in BROAD for arg in node.args)
    if node.type is None:
        return True
    is_broad = any(name in BROAD for name in re.findall(r"\w+", ast.unparse(node.type)))
    return is_broad and all(_is_nothing(statement) for statement in node.body)


def _is_nothing(statement: ast.stmt) -> bool:
    is_ellipsis = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_ellipsis or isinstance(statement, ast.Pass | ast.Continue | ast.Break)


def mutable_globals(tree: ast.Module) -> list[str]:
    """Mutable names at module level, and functions that use `global`."""
    found = [f"global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _is_mutable(statement.value):
            found += [ast.unparse(target) for target in statement.targets]
        elif isinstance(statement, ast.AnnAssign) and _is_mutable(statement.value):
            is_final = ast.unparse(statement.annotation).startswith("Final")
            found += [] if is_final else [ast.unparse(statement.target)]
    return [name for name in found if name != "__all__"]


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, MUTABLE)


def promises(text: str) -> list[str]:
    """Comments that postpone something."""
    return [
        f"line {token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string)
    ]


def vague_names(name: str, tree: ast.Module) -> list[str]:
    """Files, classes, functions and assigned names that say manager, helper or util."""
    named = [*re.split(r"[./]", name.removesuffix(".py")), *_named(tree)]
    return [name for name in named if VAGUE & set(words(name))]


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def words(name: str) -> list[str]:
    """`RowLayout` and `row_layout` are the words row and layout."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
