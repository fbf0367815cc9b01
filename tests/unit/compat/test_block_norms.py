"""Which norms of a block see the residual stream is read from its forward, or refused with why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clairai.compat.model_sites import (
    NO_NORM_BEFORE,
    NO_NORM_BETWEEN,
    BlockNorms,
    ForwardCall,
    list_calls,
    read_block_norms,
)
from tests.support import decoder_blocks as toy
from tests.support import vllm_blocks

ROOT = Path(__file__).parents[3]
FUSED = BlockNorms("input_layernorm", "post_attention_layernorm", is_fused=True)


def kind_of(value: object) -> str:
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
    ids=kind_of,
)
def test_the_norms_that_see_the_stream_are_found(block: toy.Toy, expected: BlockNorms) -> None:
    assert read_block_norms(block) == expected


@pytest.mark.parametrize("block", [toy.PostNormBlock(), toy.AfterBlock()], ids=kind_of)
def test_a_block_that_normalises_afterwards_has_no_point(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason == f"{type(block).__name__}: {NO_NORM_BEFORE}"


@pytest.mark.parametrize("block", [toy.ParallelBlock(), toy.HandingBlock()], ids=kind_of)
def test_a_parallel_block_has_no_point_between_attention_and_mlp(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert found.pre_attn == type(block).NORMS[0]
    assert found.post_attn is None
    assert found.reason == f"{type(block).__name__}: {NO_NORM_BETWEEN}"
    assert not found.is_fused  # its stream leaves as one tensor, whatever its norm is given


@pytest.mark.parametrize("block", [toy.HeadlessBlock(), toy.SilentBlock()], ids=kind_of)
def test_a_block_without_attention_or_mlp_is_refused_by_name(block: toy.Toy) -> None:
    found = read_block_norms(block)
    assert (found.pre_attn, found.post_attn) == (None, None)
    assert found.reason.startswith(f"{type(block).__name__}: calls no attention and MLP")


def test_a_norm_is_known_by_its_class_and_not_by_its_name() -> None:
    block = toy.FusedBlock()
    block.input_layernorm = toy.Mixer(0)
    assert read_block_norms(block).pre_attn is None


def test_calls_come_in_source_order_with_what_they_are_given() -> None:
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


def test_the_blocks_of_vllm_itself_are_read_as_a_person_reads_them(tmp_path: Path) -> None:
    program = [sys.executable, "-m", vllm_blocks.__name__, *REAL]
    environ = os.environ | {"CLAIRAI_DISABLE": "1", "VLLM_CONFIG_ROOT": str(tmp_path)}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=55, env=environ, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == REAL
