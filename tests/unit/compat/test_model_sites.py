"""Points are found where the stream really is, or refused with the reason.

The norms are read from the source of a block's forward; toy models compare the values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clairai.compat.model_sites import (
    BLOCKS_REPEATED,
    NO_NORM_BEFORE,
    NO_NORM_BETWEEN,
    STREAM_CHANGED,
    BlockNorms,
    ForwardCall,
    Sites,
    find_sites,
    find_unsupported_points,
    list_calls,
    read_block_norms,
)
from clairai.errors import UnsupportedError
from clairai.points import POINT_KINDS, Point
from tests.support import decoder_blocks as toy
from tests.support import vllm_blocks

ROOT = Path(__file__).parents[3]
FUSED = BlockNorms("input_layernorm", "post_attention_layernorm", is_fused=True)


def id_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (toy.FusedBlock(), FUSED),
        (toy.SandwichBlock(), BlockNorms("input_layernorm", "pre_feedforward_layernorm", True)),
        (toy.OneTensorBlock(), BlockNorms("ln_1", "ln_2", False)),
        (toy.EitherBlock(), BlockNorms("self_attn_layer_norm", "final_layer_norm", False)),
        (toy.ChildBlock(), FUSED),
        (toy.GrandchildBlock(), FUSED),
        (toy.WrappedBlock(), FUSED),
    ],
    ids=id_of,
)
def test_the_norms_that_see_the_stream_are_found(block: toy.Toy, expected: BlockNorms) -> None:
    assert read_block_norms(block) == expected


@pytest.mark.parametrize("block", [toy.PostNormBlock(), toy.AfterBlock()], ids=id_of)
def test_a_block_that_normalises_afterwards_has_no_point(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason == f"{type(block).__name__}: {NO_NORM_BEFORE}"


@pytest.mark.parametrize("block", [toy.ParallelBlock(), toy.HandingBlock()], ids=id_of)
def test_a_parallel_block_has_no_point_between_attention_and_mlp(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert found.pre_attn == type(block).NORMS[0]
    assert found.post_attn is None
    assert found.reason == f"{type(block).__name__}: {NO_NORM_BETWEEN}"
    assert not found.is_fused  # its stream leaves as one tensor, whatever its norm is given


@pytest.mark.parametrize("block", [toy.HeadlessBlock(), toy.SilentBlock()], ids=id_of)
def test_a_block_without_attention_or_mlp_is_refused_by_name(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason.startswith(f"{type(block).__name__}: calls no attention and MLP")


def test_a_norm_is_recognised_by_its_class_and_not_by_its_name() -> None:
    block = toy.FusedBlock()
    block.input_layernorm = toy.Mixer(0)
    assert read_block_norms(block).pre_attn is None


def test_calls_come_in_source_order_with_their_arguments() -> None:
    assert list(list_calls(toy.FusedBlock)) == [
        ForwardCall("input_layernorm", 1, is_saved=True),
        ForwardCall("input_layernorm", 2, is_saved=False),
        ForwardCall("self_attn", 1, is_saved=False),
        ForwardCall("post_attention_layernorm", 2, is_saved=False),
        ForwardCall("mlp", 1, is_saved=False),
    ]
    assert [*list_calls(toy.GrandchildBlock)] == [*list_calls(toy.FusedBlock)]


def test_a_residual_saved_before_and_overwritten_since_is_not_the_stream() -> None:
    saved = {call.name for call in list_calls(toy.PostNormBlock) if call.is_saved}
    assert saved == {"self_attn", "mlp"}  # the sublayers are given the stream, the norms are not


# Read in vllm/model_executor/models/*.py, each class's own forward, the same in 0.26.0 and 0.32.0.
REAL = {
    "llama.LlamaDecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "mistral.MistralDecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "qwen2.Qwen2DecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "qwen3.Qwen3DecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "mixtral.MixtralDecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "gpt_oss.TransformerBlock": ["input_layernorm", "post_attention_layernorm", True],
    "gemma.GemmaDecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "gemma2.Gemma2DecoderLayer": ["input_layernorm", "pre_feedforward_layernorm", True],
    "gemma3.Gemma3DecoderLayer": ["input_layernorm", "pre_feedforward_layernorm", True],
    # post_self_attn_layernorm and post_mlp_layernorm are on the sublayers' outputs
    "glm4.Glm4DecoderLayer": ["input_layernorm", "post_attention_layernorm", True],
    "internlm2.InternLMDecoderLayer": ["attention_norm", "ffn_norm", True],
    "apertus.ApertusDecoderLayer": ["attention_layernorm", "feedforward_layernorm", True],
    "granite.GraniteDecoderLayer": ["input_layernorm", "post_attention_layernorm", False],
    "gpt2.GPT2Block": ["ln_1", "ln_2", False],
    "gpt_j.GPTJBlock": ["ln_1", None, False],  # parallel
    "commandr.CohereDecoderLayer": ["input_layernorm", None, False],  # parallel
    "opt.OPTDecoderLayer": [None, None, False],  # without its flag it normalises afterwards
    "opt.OPTDecoderLayer+do_layer_norm_before": ["self_attn_layer_norm", "final_layer_norm", False],
    "exaone4.Exaone4DecoderLayer": [None, None, False],  # normalises afterwards
    "bloom.BloomBlock": [None, None, False],  # normalises before it saves the residual
}


def test_blocks_of_vllm_itself_are_read_correctly(tmp_path: Path) -> None:
    program = [sys.executable, "-m", vllm_blocks.__name__, *REAL]
    environ = os.environ | {"CLAIRAI_DISABLE": "1", "VLLM_CONFIG_ROOT": str(tmp_path)}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=55, env=environ, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == REAL


class Plain:
    layers: Any

    def forward(self, hidden: Any, residual: Any) -> Any:
        kept = []
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual)
            kept.append(hidden + residual if index else hidden)
        return hidden, kept


class Added:
    layers: Any

    def forward(self, hidden: Any, extra: Any) -> Any:
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index in extra:
                hidden = hidden + extra[index]
        return hidden


class Skipped:
    layers: Any

    def forward(self, hidden: Any, residual: Any, early: Any) -> Any:
        for index in range(4):
            layer = self.layers[index]
            hidden, residual = layer(hidden, residual)
            residual += early
        return hidden, residual


class Looped:
    layers: Any

    def forward(self, hidden: Any) -> Any:
        for _ in range(2):
            for layer in self.layers:
                hidden = layer(hidden)
        return hidden


def test_a_loop_that_only_runs_blocks_has_every_point() -> None:
    assert find_unsupported_points(Plain) == {}


@pytest.mark.parametrize("owner", [Added, Skipped])
def test_a_loop_that_changes_the_stream_has_no_post_block(owner: type[Any]) -> None:
    assert find_unsupported_points(owner) == {"post_block": f"{owner.__name__} {STREAM_CHANGED}"}


def test_blocks_that_run_twice_have_no_points() -> None:
    assert find_unsupported_points(Looped) == dict.fromkeys(
        POINT_KINDS, f"Looped {BLOCKS_REPEATED}"
    )


def test_loops_of_vllm_itself_are_read_correctly() -> None:
    llama = pytest.importorskip("vllm.model_executor.models.llama")
    qwen3_vl = pytest.importorskip("vllm.model_executor.models.qwen3_vl")
    solar = pytest.importorskip("vllm.model_executor.models.solar")
    assert find_unsupported_points(llama.LlamaModel) == {}
    assert [*find_unsupported_points(qwen3_vl.Qwen3LLMModel)] == ["post_block"]
    assert [*find_unsupported_points(solar.SolarModel)] == ["post_block"]


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


def test_the_comparison_notices_a_norm_of_another_layer() -> None:
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


def test_a_final_norm_that_does_not_add_is_refused() -> None:
    """Cohere's: the residual it returns is the stream before the last block, not after it."""
    model = Decoder(toy.HandingBlock, toy.HandingNorm)
    sites = sites_of(model)
    assert Point("post_block", 2) in sites.refused
    assert wrong_points(tapped(model, sites), stream_of(model)) == []
    assert Point("post_block", 1) in sites.site_of


def test_a_parallel_block_is_served_without_post_attn() -> None:
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
