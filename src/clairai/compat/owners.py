"""Takes the class that runs a stack of blocks; gives which points its loop makes untrue, and why.

`post_block.L` is tapped where block L + 1 first sees the stream. That is the same value only if the
owner hands it on untouched, and only one value if each block runs once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Final

from clairai.points import KINDS, Kind

CHANGED: Final = "changes the residual stream between blocks (in the loop that runs them)"
REPEATED: Final = "runs its blocks more than once in a forward"


def untrue_points(kind: type[Any]) -> dict[Kind, str]:
    """Kinds of point that cannot be told from the blocks alone, with the reason."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(_forward(kind)))))
    loops = list(_loops(tree))
    if any(_runs_blocks(inner) for loop in loops for inner in _loops(loop) if inner is not loop):
        return dict.fromkeys(KINDS, f"{kind.__name__} {REPEATED}")
    if any(_changes_stream(loop) for loop in loops):
        return {"post_block": f"{kind.__name__} {CHANGED}"}
    return {}


def _forward(kind: type[Any]) -> Any:
    return next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))


def _loops(tree: ast.AST) -> Iterator[ast.For | ast.While]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))


def _runs_blocks(loop: ast.For | ast.While) -> bool:
    return any(True for _ in _block_calls(loop))


def _block_calls(loop: ast.For | ast.While) -> Iterator[ast.Assign]:
    """`hidden, residual = layer(...)`: layer is the loop's variable, or taken from self.layers."""
    assigns = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    own = set() if isinstance(loop, ast.While) else _names(loop.target)
    for node in assigns:
        if ast.unparse(node.value).startswith("self.layers["):
            own |= _written(node)
    for node in assigns:
        function = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        if function in own or function.startswith("self.layers["):
            yield node


def _changes_stream(loop: ast.For | ast.While) -> bool:
    calls = list(_block_calls(loop))
    stream = {name for call in calls for target in call.targets for name in _names(target)}
    changes = (
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign | ast.AugAssign) and node not in calls
    )
    return any(stream & _written(node) - {"_"} for node in changes)


def _written(node: ast.Assign | ast.AugAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in _names(target)}


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
