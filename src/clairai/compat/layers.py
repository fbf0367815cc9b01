"""Takes a loaded model; gives, for every tap point, the norm to tap, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from clairai.compat.blocks import Block, calls_of, is_norm, read_block
from clairai.compat.owners import untrue_points
from clairai.errors import UnsupportedError
from clairai.points import Point


@dataclass(frozen=True)
class Sites:
    """Where each point lives. Points that are the same tensor share one site."""

    modules: Mapping[str, nn.Module]  # site name to norm
    blocks: Mapping[str, nn.Module]  # site name to the block whose attention follows the norm
    pairs: frozenset[str]  # sites whose norm is always given two tensors, and adds them up
    site_of: Mapping[Point, str]
    refused: Mapping[Point, str]
    num_layers: int
    width: int

    @property
    def last(self) -> str:
        """The site behind the last block, if there is one."""
        return str(Point("post_block", self.num_layers - 1))


@dataclass(frozen=True)
class _Decoder:
    """The stack of blocks and the module that runs it."""

    owner: nn.Module
    blocks: nn.ModuleList


def find_sites(model: nn.Module, *, num_layers: int, width: int) -> Sites:
    decoder = _find_decoder(model, num_layers)
    blocks = [read_block(block) for block in decoder.blocks]
    modules: dict[str, nn.Module] = {}
    behind: dict[str, nn.Module] = {}
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
            behind[str(pre)] = module
        else:
            refused.update(dict.fromkeys([pre, *same], block.reason))
        if block.post_attn:
            place(getattr(module, block.post_attn), post)
        else:
            refused[post] = block.reason
    _place_last(decoder, blocks[-1], Point("post_block", num_layers - 1), place, refused)
    # The first block is given the stream alone: nothing has been added to it yet.
    pairs = frozenset(modules) - {"pre_attn.0"} if blocks[-1].is_fused else frozenset()
    untrue = untrue_points(type(decoder.owner))
    refused |= {point: untrue[point.kind] for point in site_of if point.kind in untrue}
    site_of = {point: site for point, site in site_of.items() if point not in refused}
    return Sites(modules, behind, pairs, site_of, refused, num_layers, width)


def _place_last(
    decoder: _Decoder, block: Block, last: Point, place: Any, refused: dict[Point, str]
) -> None:
    """The stream after the last block is what the final norm adds up, or is given."""
    norm = _final_norm(decoder, block)
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
        if _are_all_here(child)
    ]
    if len(stacks) == 1:
        return stacks[0]
    raise UnsupportedError(
        f"{type(model).__name__}: found {len(stacks)} stacks of {num_layers} decoder blocks, "
        f"need exactly 1; this architecture is not served (clairai doctor MODEL shows the rest)"
    )


def _are_all_here(blocks: nn.ModuleList) -> bool:
    """Every entry is a block of its own, here (PPMissingLayer stands for another stage's)."""
    return all(next(block.children(), None) is not None for block in blocks)


def _final_norm(decoder: _Decoder, block: Block) -> nn.Module | None:
    """The last norm that the owner calls itself, if it takes the stream as blocks hand it on."""
    for call in reversed(list(calls_of(type(decoder.owner)))):
        child = getattr(decoder.owner, call.name, None)
        if is_norm(child):
            return child if call.num_args == (2 if block.is_fused else 1) else None
    return None
