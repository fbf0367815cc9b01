"""Finds, for every point of a loaded model, the norm to tap, or the reason why there is none.

Norms are found by reading the source of each block's forward, so a new architecture of a known
shape is served and one of another shape is refused, without a table that goes stale.

A norm sees the residual stream in two ways: called with two tensors it adds them up, and the
residual it returns is the stream; called with one tensor that was just saved as the residual, it is
given the stream. Runs in: the worker, and `clairai doctor`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from clairai.errors import UnsupportedError
from clairai.points import POINT_KINDS, Point, PointKind

NO_NORM_BEFORE: Final = (
    "no norm before attention is given the residual stream (a post-LN block, or a shape not known)"
)
NO_NORM_BETWEEN: Final = (
    "no norm between attention and MLP is given the residual stream (a parallel block has no such "
    "point)"
)
STREAM_CHANGED: Final = "changes the residual stream between blocks (in the loop that runs them)"
BLOCKS_REPEATED: Final = "runs its blocks more than once in a forward"

_Loop = ast.For | ast.While


@dataclass(frozen=True)
class Sites:
    """Where each point lies. Points that are the same tensor share one site."""

    modules: Mapping[str, nn.Module]  # site name to norm
    blocks: Mapping[str, nn.Module]  # site name to the block whose attention follows the norm
    adding: frozenset[str]  # sites whose norm is always given two tensors, and adds them up
    site_of: Mapping[Point, str]
    refused: Mapping[Point, str]
    num_layers: int
    width: int

    @property
    def last(self) -> str:
        """Name of the site behind the last block, whether or not there is one."""
        return str(Point("post_block", self.num_layers - 1))


@dataclass(frozen=True)
class _Decoder:
    """The stack of blocks and the module that runs it."""

    owner: nn.Module
    blocks: nn.ModuleList


def find_sites(model: nn.Module, *, num_layers: int, width: int) -> Sites:
    decoder = _find_decoder(model, num_layers)
    blocks = [read_block_norms(block) for block in decoder.blocks]
    modules: dict[str, nn.Module] = {}
    attention_blocks: dict[str, nn.Module] = {}
    site_of: dict[Point, str] = {}
    refused: dict[Point, str] = {}

    def place(norm: nn.Module, *points: Point) -> None:
        site = str(points[0])
        modules[site] = norm
        site_of.update(dict.fromkeys(points, site))

    for layer, (module, block) in enumerate(zip(decoder.blocks, blocks, strict=True)):
        pre, post = Point("pre_attn", layer), Point("post_attn", layer)
        # The stream after block L - 1 is the stream before block L: one tensor, one site.
        same = [Point("post_block", layer - 1)] if layer else []
        if block.pre_attn:
            place(getattr(module, block.pre_attn), pre, *same)
            attention_blocks[str(pre)] = module
        else:
            refused.update(dict.fromkeys([pre, *same], block.reason))
        if block.post_attn:
            place(getattr(module, block.post_attn), post)
        else:
            refused[post] = block.reason
    _place_final_norm(decoder, blocks[-1], Point("post_block", num_layers - 1), place, refused)
    # The first block is given the stream alone: nothing has been added to it yet.
    adding = frozenset(modules) - {"pre_attn.0"} if blocks[-1].is_fused else frozenset()
    unsupported = find_unsupported_points(type(decoder.owner))
    refused |= {point: unsupported[point.kind] for point in site_of if point.kind in unsupported}
    site_of = {point: site for point, site in site_of.items() if point not in refused}
    return Sites(modules, attention_blocks, adding, site_of, refused, num_layers, width)


def _place_final_norm(
    decoder: _Decoder, block: BlockNorms, last: Point, place: Any, refused: dict[Point, str]
) -> None:
    """The stream after the last block is what the final norm adds up, or is given."""
    norm = _find_final_norm(decoder, block)
    if block.pre_attn is None:
        refused[last] = block.reason
    elif norm is None:
        refused[last] = f"{type(decoder.owner).__name__}: no final norm sees the residual stream"
    else:
        place(norm, last)


def _find_decoder(model: nn.Module, num_layers: int) -> _Decoder:
    # get_language_model: model_executor/models/interfaces.py, SupportsMultiModal, 0.26 and 0.32
    text = getattr(model, "get_language_model", lambda: model)()
    stacks = [
        _Decoder(owner, child)
        for owner in text.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
        if _are_all_local(child)
    ]
    if len(stacks) == 1:
        return stacks[0]
    raise UnsupportedError(
        f"{type(model).__name__}: found {len(stacks)} stacks of {num_layers} decoder blocks, "
        f"need exactly 1; this architecture is not served (clairai doctor MODEL shows the rest)"
    )


def _are_all_local(blocks: nn.ModuleList) -> bool:
    """True if no entry is a PPMissingLayer, which stands for a block of another stage."""
    return all(next(block.children(), None) is not None for block in blocks)


def _find_final_norm(decoder: _Decoder, block: BlockNorms) -> nn.Module | None:
    """The last norm that the owner calls itself, if it takes the stream as blocks return it."""
    for call in reversed(list(list_calls(type(decoder.owner)))):
        child = getattr(decoder.owner, call.name, None)
        if is_norm(child):
            return child if call.num_args == (2 if block.is_fused else 1) else None
    return None


# --- which norms of a block see the stream ---


@dataclass(frozen=True)
class BlockNorms:
    """Names of a block's norms that see the stream; None, and the reason, where there is none."""

    pre_attn: str | None
    post_attn: str | None
    is_fused: bool  # the stream travels as two tensors, added up by the next norm
    reason: str = ""


@dataclass(frozen=True)
class ForwardCall:
    """One `self.name(...)` in a forward."""

    name: str
    num_args: int
    is_saved: bool  # its first argument was saved as the residual just before

    @property
    def sees_stream(self) -> bool:
        return self.num_args == 2 or (self.num_args == 1 and self.is_saved)

    @property
    def adds_up(self) -> bool:
        """Not where both arguments are one tensor: such a norm returns its residual as it is.

        models/commandr.py, LayerNorm, 0.26:83 and 0.32:85.
        """
        return self.num_args == 2 and not self.is_saved


def read_block_norms(block: nn.Module) -> BlockNorms:
    calls = list(list_calls(type(block)))
    attention = _first(calls, lambda name: _is_attention(block, name))
    mlp = _first(calls, lambda name: _is_mlp(block, name))
    kind = type(block).__name__
    if attention is None or mlp is None:
        reason = f"{kind}: calls no attention and MLP children of its own"
        return BlockNorms(None, None, False, reason)
    norms = [call if _is_norm_of(block, call.name) and call.sees_stream else None for call in calls]
    before = [call for call in norms[:attention] if call]
    between = [call for call in norms[attention:mlp] if call]
    is_fused = any(call.adds_up for call in (*before, *between))
    if not before or _is_called_afterwards(block, before[0].name, calls):
        return BlockNorms(None, None, is_fused, f"{kind}: {NO_NORM_BEFORE}")
    if not between:
        return BlockNorms(before[0].name, None, is_fused, f"{kind}: {NO_NORM_BETWEEN}")
    return BlockNorms(before[0].name, between[-1].name, is_fused)


def _is_called_afterwards(block: nn.Module, name: str, calls: list[ForwardCall]) -> bool:
    """The forward can also use this norm on a sublayer's output; only a flag tells which.

    models/opt.py, `do_layer_norm_before`, 0.26 and 0.32: OPT-350m normalises afterwards.
    """
    can = any(call.name == name and not call.sees_stream for call in calls)
    return can and not getattr(block, "do_layer_norm_before", False)


def list_calls(kind: type[Any]) -> Iterator[ForwardCall]:
    """Every `self.name(...)` of the class's forward in source order, through `super().forward`."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    saved: set[str] = set()
    for statement in _list_statements(_parse(vars(owner)["forward"]).body):
        for node in _calls_in(statement):
            if ast.unparse(node.func) == "super().forward":
                yield from list_calls(_next_class(kind, owner))
            elif _is_of_self(node):
                yield _read_call(node, saved)
        _note_saved(statement, saved)


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
        tree = _parse(kind.forward)
    except (OSError, TypeError, SyntaxError):  # no source in Python: it gives nothing away
        return {}
    found: dict[str, str] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for given in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(given, ast.Attribute) and ast.unparse(given.value) == "self":
                found[given.attr] = ast.unparse(call.func)
    return found


def _parse(function: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def _list_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements in source order; branches one after the other."""
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if any(inner):
            for part in inner:
                yield from _list_statements(part)
        else:
            yield statement


def _calls_in(statement: ast.stmt) -> list[ast.Call]:
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _read_call(node: ast.Call, saved: set[str]) -> ForwardCall:
    assert isinstance(node.func, ast.Attribute)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    is_saved = bool(given) and isinstance(given[0], ast.Name) and given[0].id in saved
    return ForwardCall(node.func.attr, len(given), is_saved)


def _note_saved(statement: ast.stmt, saved: set[str]) -> None:
    """`residual = hidden` saves hidden, until hidden is assigned again."""
    if not isinstance(statement, ast.Assign):
        return
    saved -= _assigned_names(statement)
    if isinstance(statement.value, ast.Name):
        saved.add(statement.value.id)


def _is_of_self(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _next_class(kind: type[Any], owner: type[Any]) -> type[Any]:
    """The class whose forward `super().forward` in `owner` calls."""
    rest = kind.__mro__[kind.__mro__.index(owner) + 1 :]
    return next(base for base in rest if "forward" in vars(base))


def _first(calls: list[ForwardCall], is_wanted: Callable[[str], bool]) -> int | None:
    return next((index for index, call in enumerate(calls) if is_wanted(call.name)), None)


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


# --- which points the loop over the blocks makes unreadable ---


def find_unsupported_points(kind: type[Any]) -> dict[PointKind, str]:
    """Kinds of points that cannot be read off the blocks alone, with the reason.

    `post_block.L` is tapped where block L + 1 first sees the stream. That is the same value only if
    the class that runs the blocks hands it on unchanged, and a single one only if each runs once.
    """
    forward = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    loops = _list_loops(_parse(forward))
    if any(_block_calls(inner) for loop in loops for inner in _list_loops(loop)[1:]):
        return dict.fromkeys(POINT_KINDS, f"{kind.__name__} {BLOCKS_REPEATED}")
    if any(_changes_stream(loop) for loop in loops):
        return {"post_block": f"{kind.__name__} {STREAM_CHANGED}"}
    return {}


def _list_loops(tree: ast.AST) -> list[_Loop]:
    """All loops in the tree; a loop itself comes first."""
    return [node for node in ast.walk(tree) if isinstance(node, _Loop)]


def _block_calls(loop: _Loop) -> list[ast.Assign]:
    """`hidden, residual = layer(...)`: layer is the loop's variable, or taken from self.layers."""
    assigns = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    layers = set() if isinstance(loop, ast.While) else _names_in(loop.target)
    for node in assigns:
        if ast.unparse(node.value).startswith("self.layers["):
            layers |= _assigned_names(node)

    def is_block_call(node: ast.Assign) -> bool:
        function = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return function in layers or function.startswith("self.layers[")

    return [node for node in assigns if is_block_call(node)]


def _changes_stream(loop: _Loop) -> bool:
    calls = _block_calls(loop)
    stream = {name for call in calls for name in _assigned_names(call)}
    others = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign | ast.AugAssign) and node not in calls
    ]
    return any(stream & _assigned_names(node) - {"_"} for node in others)


def _assigned_names(node: ast.Assign | ast.AugAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in _names_in(target)}


def _names_in(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
