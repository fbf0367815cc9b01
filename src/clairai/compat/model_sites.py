"""Finds, for every point of a loaded model, the place to tap, or the reason why there is none.

Two kinds of places have the residual stream: a norm that is given it (block_norms.py), which on a
GPU can tap in passing, and the door of a block (block_doors.py), where no norm is. Both are found
by reading source, so a new architecture of a known shape is served and one of another shape is
refused, without a table that goes stale. Runs in: the worker, and `clairai doctor`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from clairai.compat.block_doors import (
    BlockDoors,
    Entrance,
    Exit,
    UnknownDoorError,
    list_block_calls,
    read_doors,
    runs_blocks,
)
from clairai.compat.block_norms import (
    NO_NORM_BEFORE,
    BlockNorms,
    is_norm,
    list_calls,
    read_block_norms,
    scales_stream_in_half,
)
from clairai.compat.forward_source import (
    Loop,
    assigned_names,
    find_child,
    list_loops,
    parse_forwards,
)
from clairai.errors import UnsupportedError
from clairai.points import POINT_KINDS, Point

BLOCKS_REPEATED: Final = "runs its blocks more than once in a forward"
SCALED_IN_HALF: Final = "scales the residual stream in float16: serve the model in bfloat16"
# The test of a branch that gathers rows which ranks hold in parts. Engines in which they do are
# refused: config/parallel.py use_sequence_parallel_moe, 0.32:764, needs data parallelism.
_ROWS_DIFFER: Final = re.compile(r"\w+\.shape\[0\] != positions\.shape\[0\]")


@dataclass(frozen=True)
class Sites:
    """Where each point lies. Points that are the same tensor share one site."""

    modules: Mapping[str, nn.Module]  # site name to the norm, or to the block with the door
    adding: frozenset[str]  # sites whose norm is always given two tensors, and adds them up
    site_of: Mapping[Point, str]
    refused: Mapping[Point, str]
    num_layers: int
    width: int
    doors: Mapping[str, Entrance | Exit] = field(default_factory=dict)  # of sites that are no norms

    @property
    def last(self) -> str:
        """Name of the site behind the last block, whether or not there is one."""
        return str(Point("post_block", self.num_layers - 1))


@dataclass(frozen=True)
class _Stack:
    """A list of blocks and the module that has it."""

    owner: nn.Module
    list_name: str
    blocks: nn.ModuleList

    @property
    def is_run(self) -> bool:
        return runs_blocks(self.owner, self.list_name)


@dataclass(frozen=True)
class _Decoder:
    """The stack of all blocks, and those that run them: itself, or others that hold parts of it."""

    stack: _Stack
    runners: tuple[_Stack, ...]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def find_runner(self, block: nn.Module) -> _Stack:
        held = (one for one in self.runners if any(other is block for other in one.blocks))
        return next(held, self.stack)

    @property
    def local(self) -> list[tuple[int, nn.Module]]:
        """The blocks of this stage of a pipeline, with their layers; all of them without stages."""
        return [(layer, block) for layer, block in enumerate(self.blocks) if _is_local(block)]

    @property
    def keeps_stream(self) -> bool:
        """True if whoever runs the blocks changes nothing between them."""
        return not any(changes_stream(type(one.owner), one.list_name) for one in self.runners)

    def is_handed_on(self, layer: int) -> bool:
        """True if the stream after this block is that before the next one."""
        if layer < 0 or not self.keeps_stream:
            return False
        return self.find_runner(self.blocks[layer]) is self.find_runner(self.blocks[layer + 1])


@dataclass(frozen=True)
class _Block:
    """What the source says of one block."""

    module: nn.Module
    norms: BlockNorms
    doors: BlockDoors | None
    reason: str  # why it has no doors


def find_sites(
    model: nn.Module,
    *,
    num_layers: int,
    width: int,
    dtype: object = None,
    is_stage: bool = False,
) -> Sites:
    """`dtype` is that in which the model runs.

    `is_stage`: the model holds the blocks of one stage of a pipeline. Points of other stages are
    then neither served nor refused.
    """
    decoder = _find_decoder(model, num_layers, is_stage=is_stage)
    places = _Places(num_layers)
    reason = _find_reason_against_all(decoder, str(dtype))
    if reason:
        refused = dict.fromkeys(places.points, reason)
        return Sites({}, frozenset(), {}, refused, num_layers, width)
    blocks = {layer: _read_block(decoder, block) for layer, block in decoder.local}
    for layer, block in blocks.items():
        same = [Point("post_block", layer - 1)] if decoder.is_handed_on(layer - 1) else []
        places.add_pre_attn(block, layer, same)
        places.add_post_attn(block, layer)
        if layer < num_layers - 1 and not decoder.is_handed_on(layer):
            places.add_exit(block, Point("post_block", layer))
    end = blocks.get(num_layers - 1)
    if end is not None:
        last = Point("post_block", num_layers - 1)
        norm = _find_final_norm(decoder.stack, end.norms) if decoder.keeps_stream else None
        if norm is None:
            places.add_exit(end, last)
        else:
            places.add_norm(norm, [last], is_adding=end.norms.is_fused)
    return places.make_sites(width)


class _Places:
    """Collects sites, in the order of the forward pass."""

    def __init__(self, num_layers: int) -> None:
        self.points = [Point(kind, layer) for layer in range(num_layers) for kind in POINT_KINDS]
        self._num_layers = num_layers
        self._modules: dict[str, nn.Module] = {}
        self._doors: dict[str, Entrance | Exit] = {}
        self._adding: set[str] = set()
        self._site_of: dict[Point, str] = {}
        self._refused: dict[Point, str] = {}

    def add_norm(self, norm: nn.Module, points: list[Point], *, is_adding: bool) -> None:
        self._add(norm, points)
        if is_adding:
            self._adding.add(str(points[0]))

    def add_pre_attn(self, block: _Block, layer: int, same: list[Point]) -> None:
        """`same` are points that are the same tensor."""
        points = [Point("pre_attn", layer), *same]
        if block.norms.pre_attn:
            # The first block is given the stream alone: nothing has been added to it yet.
            is_adding = block.norms.is_fused and layer > 0
            self.add_norm(
                find_child(block.module, block.norms.pre_attn), points, is_adding=is_adding
            )
        elif block.doors is not None:
            self._add(block.module, points, block.doors.entrance)
        else:
            kind = type(block.module).__name__
            self._refuse(points, f"{kind}: {NO_NORM_BEFORE}; {block.reason}")

    def add_post_attn(self, block: _Block, layer: int) -> None:
        point, norms = Point("post_attn", layer), block.norms
        if norms.post_attn:
            self.add_norm(
                find_child(block.module, norms.post_attn), [point], is_adding=norms.is_fused
            )
        else:
            self._refuse([point], norms.reason)

    def add_exit(self, block: _Block, point: Point) -> None:
        if block.doors is not None:
            self._add(block.module, [point], block.doors.exit)
        else:
            self._refuse([point], block.reason)

    def _add(
        self, module: nn.Module, points: list[Point], door: Entrance | Exit | None = None
    ) -> None:
        site = str(points[0])
        self._modules[site] = module
        self._site_of.update(dict.fromkeys(points, site))
        if door is not None:
            self._doors[site] = door

    def _refuse(self, points: list[Point], reason: str) -> None:
        self._refused.update(dict.fromkeys(points, reason))

    def make_sites(self, width: int) -> Sites:
        return Sites(
            self._modules,
            frozenset(self._adding),
            self._site_of,
            self._refused,
            self._num_layers,
            width,
            self._doors,
        )


def _read_block(decoder: _Decoder, block: nn.Module) -> _Block:
    try:
        runner = decoder.find_runner(block)
        doors = read_doors(runner.owner, runner.list_name, block)
    except UnknownDoorError as error:
        return _Block(block, read_block_norms(block), None, str(error))
    entrance = doors.entrance
    stream = entrance.hidden.name if entrance.residual is None else None
    return _Block(block, read_block_norms(block, stream), doors, "")


def _find_decoder(model: nn.Module, num_layers: int, *, is_stage: bool) -> _Decoder:
    # get_language_model: model_executor/models/interfaces.py, SupportsMultiModal, 0.26 and 0.32
    text = getattr(model, "get_language_model", lambda: model)()
    lists = [
        _Stack(owner, name, child)
        for owner in text.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    stacks = [
        stack
        for stack in lists
        if len(stack.blocks) == num_layers
        if (any if is_stage else all)(map(_is_local, stack.blocks))
    ]
    if _count_different(stacks) > 1:  # as many of something else: of gates (iquest_loopcoder.py)
        stacks = [stack for stack in stacks if stack.is_run]
    # Several lists may hold the same blocks (models/gemma4.py, 0.32): the outermost one runs them.
    if _count_different(stacks) == 1:
        return _Decoder(stacks[0], _find_runners(stacks[0], lists))
    raise UnsupportedError(
        f"{type(model).__name__}: found {len(stacks)} stacks of {num_layers} decoder blocks, "
        f"need exactly 1; this architecture is not served (clairai doctor MODEL shows the rest)"
    )


def _count_different(stacks: list[_Stack]) -> int:
    return len({tuple(map(id, stack.blocks)) for stack in stacks})


def _find_runners(stack: _Stack, lists: list[_Stack]) -> tuple[_Stack, ...]:
    """The stack itself, or the lists of its parts if others run those (models/gemma3n.py, 0.32)."""
    if stack.is_run:
        return (stack,)
    blocks = {*map(id, stack.blocks)}
    parts = [one for one in lists if len(one.blocks) and {*map(id, one.blocks)} <= blocks]
    return tuple(one for one in parts if one.is_run) or (stack,)


def _is_local(block: nn.Module) -> bool:
    """False for a PPMissingLayer, which stands for a block of another stage."""
    return next(block.children(), None) is not None


def _find_final_norm(stack: _Stack, block: BlockNorms) -> nn.Module | None:
    """The last norm that the owner calls itself, if it takes the stream as blocks return it.

    And if nothing else calls it: NanoChat's normalises the embedding, too.
    """
    if block.pre_attn is None:
        return None
    calls = [*list_calls(type(stack.owner), stack.owner)]
    for call in reversed(calls):
        child = find_child(stack.owner, call.name)
        if is_norm(child):
            is_alone = sum(other.name == call.name for other in calls) == 1
            return child if is_alone and call.num_args == (2 if block.is_fused else 1) else None
    return None


# --- what the class that runs the blocks does between them ---


def _find_reason_against_all(decoder: _Decoder, dtype: str) -> str:
    """Why no point of this model can be served; empty if some may be."""
    for runner in decoder.runners:
        owner = type(runner.owner)
        if repeats_blocks(owner, runner.list_name):
            return f"{owner.__name__} {BLOCKS_REPEATED}"
    for kind in {type(block) for _, block in decoder.local}:
        if dtype == "torch.float16" and scales_stream_in_half(kind):
            return f"{kind.__name__} {SCALED_IN_HALF}"
    return ""


def repeats_blocks(kind: type[Any], list_name: str) -> bool:
    """True if a loop runs the blocks, and another one that loop."""
    loops = _list_owner_loops(kind)
    inner = [inside for loop in loops for inside in list_loops(loop)[1:]]
    return any(list_block_calls(loop, list_name) for loop in inner)


def changes_stream(kind: type[Any], list_name: str) -> bool:
    """True if the loop that runs the blocks changes what one gives to the next.

    Only if it does not is the stream after a block the one before the next.
    """
    return any(_changes_results(loop, list_name) for loop in _list_owner_loops(kind))


def _list_owner_loops(kind: type[Any]) -> list[Loop]:
    return [loop for tree in parse_forwards(kind) for loop in list_loops(tree)]


def _changes_results(loop: Loop, list_name: str) -> bool:
    calls = list_block_calls(loop, list_name)
    stream = {name for call in calls for name in assigned_names(call)}
    gathering = [
        inside
        for node in ast.walk(loop)
        if isinstance(node, ast.If) and _ROWS_DIFFER.search(ast.unparse(node.test))
        for inside in ast.walk(node)
    ]
    others = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign | ast.AugAssign) and node not in (*calls, *gathering)
    ]
    return any(stream & assigned_names(node) - {"_"} for node in others)
