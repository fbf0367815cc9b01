"""Every tap point of a toy model is where the stream really is: the values are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat.model_sites import Sites, find_sites
from clairai.errors import UnsupportedError
from clairai.points import POINT_KINDS, Point
from tests.support import decoder_blocks as toy

NUM_LAYERS = 3
HIDDEN = torch.randn(5, toy.WIDTH, generator=torch.Generator().manual_seed(7))


class Decoder(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A stack of blocks whose stream travels as two tensors, and its final norm."""

    def __init__(self, kind: type[toy.Toy], norm: type[toy.ToyNorm] = toy.ToyNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(seed) for seed in range(NUM_LAYERS)])
        self.norm = norm()

    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class OneTensorDecoder(Decoder):
    def forward(self, hidden_states: Any) -> Any:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class BareDecoder(Decoder):
    """Leaves the final norm to its caller."""

    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return hidden_states + residual


class SumFirstDecoder(Decoder):
    """Adds the two tensors up before the final norm: the norm's call is not of the blocks' kind."""

    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.norm(hidden_states + residual)


def sites_of(model: nn.Module) -> Sites:
    return find_sites(model, num_layers=NUM_LAYERS, width=toy.WIDTH)


def every_point() -> list[Point]:
    return [Point(kind, layer) for layer in range(NUM_LAYERS) for kind in POINT_KINDS]


def tapped(model: nn.Module, sites: Sites) -> dict[Point, torch.Tensor]:
    """What a tap at each point reads in one forward: the returned residual, or what was given."""
    read: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_norm: Any, given: Any, output: Any) -> None:
            read[name] = (output[1] if len(given) > 1 else given[0]).clone()

        return hook

    handles = [norm.register_forward_hook(keep(name)) for name, norm in sites.modules.items()]
    model(HIDDEN.clone())
    for handle in handles:
        handle.remove()
    return {point: read[site] for point, site in sites.site_of.items()}


def stream_of(model: Decoder) -> dict[Point, torch.Tensor]:
    """The stream at every point, from what is added to it alone: x, x + attention, + MLP."""
    outputs: list[torch.Tensor] = []
    added = type(model.layers[0]).ADDED or type(model.layers[0]).OTHERS
    parts = [getattr(layer, name) for layer in model.layers for name in added]
    handles = [
        part.register_forward_hook(lambda _part, _given, output: outputs.append(output))
        for part in parts
    ]
    model(HIDDEN.clone())
    for handle in handles:
        handle.remove()
    stream, truth = HIDDEN, {}
    for layer in range(NUM_LAYERS):
        truth[Point("pre_attn", layer)] = stream
        stream = stream + outputs[2 * layer]
        truth[Point("post_attn", layer)] = stream
        stream = stream + outputs[2 * layer + 1]
        truth[Point("post_block", layer)] = stream
    return truth


def wrong_points(found: dict[Point, torch.Tensor], truth: dict[Point, torch.Tensor]) -> list[str]:
    return [str(p) for p in found if not torch.allclose(found[p], truth[p], atol=1e-5)]


@pytest.mark.parametrize(
    "model",
    [
        Decoder(toy.FusedBlock),
        Decoder(toy.SandwichBlock),
        Decoder(toy.GrandchildBlock),
        OneTensorDecoder(toy.OneTensorBlock),
        OneTensorDecoder(toy.EitherBlock),
    ],
    ids=["fused", "sandwich", "inherited", "one tensor", "either"],
)
def test_pitfall_02_every_point_reads_the_stream_itself(model: Decoder) -> None:
    sites = sites_of(model)
    assert sites.refused == {}
    assert sorted(sites.site_of) == every_point()
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_norm_of_another_layer_would_be_noticed() -> None:
    model = Decoder(toy.FusedBlock)
    sites = sites_of(model)
    norms = [*sites.modules.values()]
    shifted = dict(zip(sites.modules, [*norms[1:], norms[0]], strict=True))
    moved = replace(sites, modules=shifted, blocks={}, refused={})
    assert len(wrong_points(tapped(model, moved), stream_of(model))) == len(every_point())


def test_points_that_are_one_tensor_share_one_site() -> None:
    model = Decoder(toy.FusedBlock)
    sites = sites_of(model)
    for layer in range(NUM_LAYERS - 1):
        assert sites.site_of[Point("post_block", layer)] == f"pre_attn.{layer + 1}"
        assert sites.site_of[Point("pre_attn", layer + 1)] == f"pre_attn.{layer + 1}"
    assert sites.site_of[Point("post_block", 2)] == "post_block.2"
    assert sites.modules["post_block.2"] is model.norm
    assert sites.modules["pre_attn.1"] is model.layers[1].input_layernorm
    assert len(sites.modules) == 2 * NUM_LAYERS + 1


@pytest.mark.parametrize(
    "model", [BareDecoder(toy.FusedBlock), SumFirstDecoder(toy.FusedBlock)], ids=["none", "other"]
)
def test_without_a_final_norm_that_sees_the_stream_only_the_last_point_is_refused(
    model: Decoder,
) -> None:
    sites = sites_of(model)
    reason = f"{type(model).__name__}: no final norm sees the residual stream"
    assert sites.refused == {Point("post_block", 2): reason}
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_final_norm_that_only_hands_through_is_not_taken_for_one_that_adds() -> None:
    """Cohere's: the residual it returns is the stream before the last block, not after it."""
    model = Decoder(toy.HandingBlock, toy.HandingNorm)
    sites = sites_of(model)
    assert Point("post_block", 2) in sites.refused
    assert wrong_points(tapped(model, sites), stream_of(model)) == []
    assert Point("post_block", 1) in sites.site_of


def test_a_parallel_block_is_served_without_the_point_between() -> None:
    model = OneTensorDecoder(toy.ParallelBlock)
    sites = sites_of(model)
    assert sorted(sites.refused) == [Point("post_attn", layer) for layer in range(NUM_LAYERS)]
    assert all("parallel block" in reason for reason in sites.refused.values())
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


@pytest.mark.parametrize("kind", [toy.PostNormBlock, toy.AfterBlock])
def test_a_block_that_normalises_afterwards_is_refused_at_every_point(kind: type[toy.Toy]) -> None:
    sites = sites_of(OneTensorDecoder(kind))
    assert sites.modules == {}
    assert sorted(sites.refused) == every_point()
    assert all("post-LN" in reason for reason in sites.refused.values())


def test_two_stacks_of_blocks_are_refused_and_none_too() -> None:
    both = nn.ModuleDict({"a": Decoder(toy.FusedBlock), "b": Decoder(toy.FusedBlock)})
    with pytest.raises(UnsupportedError, match="found 2 stacks of 3 decoder blocks"):
        sites_of(both)
    with pytest.raises(UnsupportedError, match="found 0 stacks of 4 decoder blocks"):
        find_sites(Decoder(toy.FusedBlock), num_layers=NUM_LAYERS + 1, width=toy.WIDTH)


def test_a_list_as_long_as_the_stack_but_of_leaves_is_not_a_stack() -> None:
    model = Decoder(toy.FusedBlock)
    model.scales = nn.ModuleList([nn.Identity() for _ in range(NUM_LAYERS)])
    assert sites_of(model).refused == {}


def test_the_language_model_of_a_multimodal_one_is_tapped() -> None:
    text = Decoder(toy.FusedBlock)
    whole = nn.ModuleDict({"vision": Decoder(toy.FusedBlock), "text": text})
    whole.get_language_model = lambda: text
    assert sites_of(whole).modules["post_block.2"] is text.norm
