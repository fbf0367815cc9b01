"""Points are found where the stream really is, or refused with the reason.

The norms are read from the source of a block's forward; toy models compare the values.
"""

from __future__ import annotations

import copy
import functools
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

from clairai.compat import model_ops
from clairai.compat.block_doors import Argument, Entrance, Exit, UnknownDoorError, read_doors
from clairai.compat.block_norms import (
    NO_MLP,
    NOTHING_BETWEEN,
    SEVERAL_MIXERS,
    BlockNorms,
    ForwardCall,
    list_calls,
    read_block_norms,
    scales_stream_in_half,
)
from clairai.compat.model_sites import (
    BLOCKS_REPEATED,
    SCALED_IN_HALF,
    Sites,
    changes_stream,
    find_sites,
    repeats_blocks,
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


def test_a_block_that_normalises_afterwards_gives_the_stream_to_its_mlp() -> None:
    assert read_block_norms(toy.PostNormBlock(), "hidden_states") == BlockNorms(None, "mlp", False)


def test_a_block_that_passes_on_what_it_normalised_has_no_point_in_between() -> None:
    found = read_block_norms(toy.AfterBlock(), "hidden_states")
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason == f"AfterBlock: {NOTHING_BETWEEN}"


@pytest.mark.parametrize(
    "block", [toy.ParallelBlock(), toy.HandingBlock(), toy.TwoNormsBlock()], ids=id_of
)
def test_a_parallel_block_has_no_point_between_attention_and_mlp(block: toy.Toy) -> None:
    found = read_block_norms(block, "hidden_states")
    assert found.pre_attn == type(block).NORMS[0]
    assert found.post_attn is None
    assert found.reason == f"{type(block).__name__}: {NOTHING_BETWEEN}"
    assert not found.is_fused  # its stream leaves as one tensor, whatever its norm is given


def test_the_flags_of_a_block_say_which_branch_is_read() -> None:
    assert read_block_norms(toy.SequentialBlock(), "hidden_states").post_attn == "ln_2"


def test_a_mixer_that_is_no_attention_counts_as_one() -> None:
    expected = BlockNorms("input_layernorm", "pre_ff_layernorm", is_fused=True)
    assert read_block_norms(toy.MambaBlock()) == expected


@pytest.mark.parametrize("block", [toy.HeadlessBlock(), toy.SilentBlock()], ids=id_of)
def test_a_block_without_a_mixer_has_no_norms(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason == f"{type(block).__name__}: {NO_MLP}"


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
    "mamba.MambaDecoderLayer": ["norm", None, True],
    "jamba.JambaMambaDecoderLayer": ["input_layernorm", "pre_ff_layernorm", True],
    "jamba.JambaAttentionDecoderLayer": ["input_layernorm", "pre_ff_layernorm", True],
    "opt.OPTDecoderLayer+do_layer_norm_before": ["self_attn_layer_norm", "final_layer_norm", False],
    "exaone4.Exaone4DecoderLayer": [None, None, False],  # normalises afterwards
    "bloom.BloomBlock": [None, None, False],  # normalises before it saves the residual
}


@pytest.mark.timeout(400)  # another process imports vLLM and many of its models
def test_blocks_of_vllm_itself_are_read_correctly(tmp_path: Path) -> None:
    program = [sys.executable, "-m", vllm_blocks.__name__, *REAL]
    environ = os.environ | {"CLAIRAI_DISABLE": "1", "VLLM_CONFIG_ROOT": str(tmp_path)}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=350, env=environ, cwd=ROOT
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


class Gathering:
    layers: Any

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        for layer in self.layers:
            if hidden.shape[0] != positions.shape[0]:
                hidden, residual = gather(hidden, residual)
            hidden, residual = layer(positions, hidden, residual)
        return hidden, residual


def gather(*parts: Any) -> Any:
    return parts


class Looped:
    layers: Any

    def forward(self, hidden: Any) -> Any:
        for _ in range(2):
            for layer in self.layers:
                hidden = layer(hidden)
        return hidden


def test_a_loop_that_only_runs_blocks_hands_the_stream_on() -> None:
    assert not changes_stream(Plain, "layers")
    assert not repeats_blocks(Plain, "layers")


@pytest.mark.parametrize("kind", [Added, Skipped])
def test_a_loop_that_adds_to_the_stream_is_found(kind: type[Any]) -> None:
    assert changes_stream(kind, "layers")


def test_gathering_rows_of_other_ranks_is_no_change() -> None:
    assert not changes_stream(Gathering, "layers")


def test_blocks_that_run_twice_are_found() -> None:
    assert repeats_blocks(Looped, "layers")


def test_loops_of_vllm_itself_are_read_correctly() -> None:
    llama = pytest.importorskip("vllm.model_executor.models.llama")
    qwen3_vl = pytest.importorskip("vllm.model_executor.models.qwen3_vl")
    solar = pytest.importorskip("vllm.model_executor.models.solar")
    assert not changes_stream(llama.LlamaModel, "layers")
    assert changes_stream(qwen3_vl.Qwen3LLMModel, "layers")
    assert changes_stream(solar.SolarModel, "layers")


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


class EmbeddingDecoder(Decoder):
    """NanoChat's: the final norm normalises the embedding, too."""

    def forward(self, hidden_states: Any) -> Any:
        self.norm(hidden_states)
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class KeywordDecoder(Decoder):
    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(0, residual=residual, hidden_states=hidden_states)
        return hidden_states + residual


class AddingDecoder(Decoder):
    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for index, layer in enumerate(self.layers):
            hidden_states, residual = layer(hidden_states, residual)
            if index < 2:
                hidden_states = hidden_states + 1
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class ManyDecoder(Decoder):
    def forward(self, hidden_states: Any) -> Any:
        pending = mix = None
        for layer in self.layers:
            hidden_states, pending, mix = layer(hidden_states, pending, mix)
        return hidden_states


class StreamsPart(nn.Module):  # type: ignore[misc]
    def __init__(self, decoder_layers: nn.ModuleList) -> None:
        super().__init__()
        self.decoder_layers = decoder_layers

    def forward(self, hidden_states: Any) -> Any:
        hidden_states = hidden_states.permute(2, 0, 1)
        for layer in self.decoder_layers:
            hidden_states = layer(hidden_states)
        return hidden_states.permute(1, 2, 0)


class StreamsDecoder(Decoder):
    """Gemma 3n's: two others run parts of its blocks."""

    def __init__(self) -> None:
        super().__init__(toy.StreamsBlock)
        self.first, self.second = StreamsPart(self.layers[:2]), StreamsPart(self.layers[2:])

    def forward(self, hidden_states: Any) -> Any:
        hidden_states = torch.stack([hidden_states * factor for factor in (1, 2, 3)], dim=-1)
        hidden_states = self.second(self.first(hidden_states))
        return self.norm(hidden_states.mean(dim=-1))


class RepeatingDecoder(Decoder):
    def forward(self, hidden_states: Any) -> Any:
        residual = None
        for _ in range(2):
            for layer in self.layers:
                hidden_states, residual = layer(hidden_states, residual)
        return hidden_states + residual


def sites_of(model: nn.Module) -> Sites:
    return find_sites(model, num_layers=NUM_LAYERS, width=toy.WIDTH)


def every_point() -> list[Point]:
    return [Point(kind, layer) for layer in range(NUM_LAYERS) for kind in POINT_KINDS]


def tapped(model: nn.Module, sites: Sites) -> dict[Point, torch.Tensor]:
    """What the tap of each point reads in one forward of a copy of the model."""
    read: dict[str, torch.Tensor] = {}
    copied, copied_sites = copy.deepcopy((model, sites))
    with pytest.MonkeyPatch.context() as patched:

        def tap(x: torch.Tensor, _token: torch.Tensor, name: str) -> None:
            assert name not in read, "a tap ran twice"
            read[name] = x.clone()

        patched.setattr(torch.ops.clairai, "tap", tap, raising=False)
        patched.setattr(model_ops, "encode_name", str)
        for name, module in copied_sites.modules.items():
            door = copied_sites.doors.get(name)
            model_ops.attach_tap(module, door, name=name, token=torch.zeros(1))
        copied(HIDDEN.clone())
    return {point: read[site] for point, site in copied_sites.site_of.items()}


def stream_of(model: Decoder) -> dict[Point, torch.Tensor]:
    """The stream at every point, from what is added to it alone: x, x + attention, + MLP."""
    outputs: list[torch.Tensor] = []
    added = type(model.layers[0]).ADDED or type(model.layers[0]).OTHERS
    parts = [layer.get_submodule(name) for layer in model.layers for name in added]
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
    moved = replace(sites, modules=shifted, refused={})
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
    "model",
    [
        BareDecoder(toy.FusedBlock),
        SumFirstDecoder(toy.FusedBlock),
        EmbeddingDecoder(toy.FusedBlock),
    ],
    ids=["none", "other", "twice"],
)
def test_without_a_final_norm_of_its_own_the_last_point_is_behind_the_last_block(
    model: Decoder,
) -> None:
    sites = sites_of(model)
    assert sites.refused == {}
    assert sites.doors == {"post_block.2": Exit(0, 1)}
    assert sites.modules["post_block.2"] is model.layers[2]
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_final_norm_that_does_not_add_is_not_tapped() -> None:
    """Cohere's: the residual it returns is the stream before the last block, not after it."""
    model = Decoder(toy.HandingBlock, toy.HandingNorm)
    sites = sites_of(model)
    assert sites.doors == {"post_block.2": Exit(0, None)}
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_parallel_block_is_served_without_post_attn() -> None:
    model = OneTensorDecoder(toy.ParallelBlock)
    sites = sites_of(model)
    assert sorted(sites.refused) == [Point("post_attn", layer) for layer in range(NUM_LAYERS)]
    assert all("parallel block" in reason for reason in sites.refused.values())
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_block_that_normalises_afterwards_is_tapped_at_its_doors() -> None:
    model = OneTensorDecoder(toy.PostNormBlock)
    sites = sites_of(model)
    assert sites.refused == {}
    entrance = Entrance(Argument(0, "hidden_states"), None)
    assert sites.doors == {
        **{f"pre_attn.{layer}": entrance for layer in range(NUM_LAYERS)},
        "post_block.2": Exit(None, None),
    }
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_a_block_whose_stream_is_two_tensors_is_tapped_at_its_doors() -> None:
    model = KeywordDecoder(toy.SumBlock)
    sites = sites_of(model)
    assert sites.doors["pre_attn.1"] == Entrance(
        Argument(1, "hidden_states"), Argument(2, "residual")
    )
    assert sites.doors["post_block.2"] == Exit(0, 1)
    assert sorted(sites.refused) == [Point("post_attn", layer) for layer in range(NUM_LAYERS)]
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_where_the_owner_adds_to_the_stream_each_block_has_two_points() -> None:
    """Qwen3-VL's: what is added after a block belongs to the next block's entrance."""
    model = AddingDecoder(toy.FusedBlock)
    sites = sites_of(model)
    found = tapped(model, sites)
    assert sites.refused == {}
    for layer in range(NUM_LAYERS - 1):
        after, before = found[Point("post_block", layer)], found[Point("pre_attn", layer + 1)]
        assert torch.allclose(before, after + 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (toy.PendingBlock, "PendingBlock: does not begin by adding hidden_states and pending up"),
        (toy.ManyBlock, "ManyBlock: 3 tensors travel from block to block"),
    ],
)
def test_tensors_that_are_not_added_up_at_once_are_no_door(
    kind: type[toy.Toy], reason: str
) -> None:
    with pytest.raises(UnknownDoorError, match=reason):
        read_doors(ManyDecoder(kind), "layers", kind())


def doors_of(model: StreamsDecoder) -> dict[Point, torch.Tensor]:
    """The active stream that each block is given and gives, and the middle, by hooks."""
    found: dict[Point, torch.Tensor] = {}

    def note(point: Point, rows: torch.Tensor) -> None:
        found[point] = rows.clone()

    for layer, block in enumerate(model.layers):
        enter, between, leave = (
            functools.partial(note, Point(kind, layer)) for kind in POINT_KINDS
        )
        block.register_forward_pre_hook(lambda _, given, enter=enter: enter(given[0][1]))
        block.pre_feedforward_layernorm.register_forward_pre_hook(
            lambda _, given, between=between: between(given[0])
        )
        block.register_forward_hook(lambda _, __, output, leave=leave: leave(output[1]))
    model(HIDDEN.clone())
    return found


def test_of_several_streams_the_one_that_the_block_calls_active_is_tapped() -> None:
    model = StreamsDecoder()
    sites = sites_of(model)
    assert sites.refused == {}
    assert sites.doors["pre_attn.1"] == Entrance(Argument(0, "hidden_states"), None, active=1)
    assert sites.doors["post_block.2"] == Exit(None, None, active=1)
    found = tapped(model, sites)
    assert wrong_points(found, doors_of(model)) == []


def test_where_others_run_the_parts_of_a_stack_their_border_has_two_points() -> None:
    """What lies between the parts is not read."""
    sites = sites_of(StreamsDecoder())
    assert sites.site_of[Point("post_block", 0)] == "pre_attn.1"
    assert sites.site_of[Point("post_block", 1)] == "post_block.1"


def test_the_active_stream_alone_is_steered() -> None:
    streams = torch.stack([HIDDEN, HIDDEN * 2, HIDDEN * 3], dim=-1).permute(2, 0, 1)
    before = streams.clone()

    def add_one(x: torch.Tensor, _token: torch.Tensor, _name: str) -> None:
        assert x.is_contiguous()
        x += 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.ops.clairai, "steer_alone", add_one, raising=False)
        found = model_ops._steer_door(streams, None, 1, torch.zeros(1), "site")
    assert torch.equal(found, before[1] + 1)
    assert torch.equal(streams[1], before[1] + 1)
    assert torch.equal(streams[::2], before[::2])


def test_a_block_of_two_attentions_is_tapped_at_its_doors_alone() -> None:
    model = Decoder(toy.DoubleBlock)
    sites = sites_of(model)
    assert sorted(sites.refused) == [Point("post_attn", layer) for layer in range(NUM_LAYERS)]
    assert {*sites.refused.values()} == {f"DoubleBlock: {SEVERAL_MIXERS}"}
    assert sites.modules["pre_attn.1"] is model.layers[1].input_layernorm[0]
    outputs: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _layer, _given, output: outputs.append(sum(output)))
    found = tapped(model, sites)
    model(HIDDEN.clone())
    stream = outputs[-NUM_LAYERS:]
    assert torch.allclose(found[Point("pre_attn", 0)], HIDDEN)
    for layer in range(NUM_LAYERS):
        assert torch.allclose(found[Point("post_block", layer)], stream[layer], atol=1e-5)


def test_a_norm_inside_the_child_that_attends_is_found() -> None:
    model = OneTensorDecoder(toy.NestedBlock)
    sites = sites_of(model)
    assert sites.refused == {}
    assert sites.modules["post_attn.1"] is model.layers[1].norm_attn_norm.norm_2
    assert wrong_points(tapped(model, sites), stream_of(model)) == []


def test_of_two_stacks_the_one_that_is_run_counts() -> None:
    model = Decoder(toy.FusedBlock)
    model.gates = nn.ModuleList([toy.FusedBlock() for _ in range(NUM_LAYERS)])
    assert sites_of(model).modules["pre_attn.0"] is model.layers[0].input_layernorm


def test_a_model_whose_blocks_run_twice_is_refused_at_every_point() -> None:
    sites = sites_of(RepeatingDecoder(toy.FusedBlock))
    assert sites.site_of == {}
    assert {*sites.refused.values()} == {f"RepeatingDecoder {BLOCKS_REPEATED}"}


def test_a_block_that_scales_the_stream_in_float16_is_refused_in_float16_alone() -> None:
    assert scales_stream_in_half(toy.HalfBlock)
    assert not scales_stream_in_half(toy.FusedBlock)
    model = Decoder(toy.HalfBlock)
    find = functools.partial(find_sites, model, num_layers=NUM_LAYERS, width=toy.WIDTH)
    assert find(dtype=torch.bfloat16).refused == {}
    refused = find(dtype=torch.float16).refused
    assert sorted(refused) == every_point()
    assert {*refused.values()} == {f"HalfBlock {SCALED_IN_HALF}"}


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
