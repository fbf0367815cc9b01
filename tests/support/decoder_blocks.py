"""Toy decoder blocks of every shape, written the way vLLM writes its own.

compat.blocks reads source, so these are real classes with real forwards, and they run: what a tap
reads in them can be compared with the stream itself. Shapes are [tokens, width].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

WIDTH = 4


class ToyNorm(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Adds up two tensors, as vLLM's RMSNorm does, and returns the sum as the residual."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        stream = x if residual is None else x + residual
        normed = stream / (1 + stream.abs().mean(-1, keepdim=True))
        return normed if residual is None else (normed, stream)


class HandingNorm(ToyNorm):
    """Returns its second tensor unchanged, as the LayerNorm of models/commandr.py does."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        return super().forward(x), residual


class Mixer(nn.Module):  # type: ignore[misc]
    """Stands for attention or an MLP: some function of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator)

    def forward(self, hidden_states: Any) -> Any:
        return torch.tanh(hidden_states @ self.weight)


class Toy(nn.Module):  # type: ignore[misc]
    """Makes the children that a block names."""

    NORM: ClassVar[type[ToyNorm]] = ToyNorm
    NORMS: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    OTHERS: ClassVar[tuple[str, ...]] = ("self_attn", "mlp")
    ADDED: ClassVar[tuple[str, ...]] = ()  # whose outputs are added to the stream; () for OTHERS

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for name in self.NORMS:
            setattr(self, name, self.NORM())
        for index, name in enumerate(self.OTHERS):
            setattr(self, name, Mixer(10 * seed + index))


class FusedBlock(Toy):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class SandwichBlock(Toy):
    """Gemma's shape: norms on the sublayers' outputs, too, which do not see the stream."""

    NORMS = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
    ADDED = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return hidden_states, residual


class OneTensorBlock(Toy):
    NORMS = ("ln_1", "ln_2")
    OTHERS = ("attn", "ffn")

    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output = self.attn(hidden_states)
        hidden_states = attn_output + residual

        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        return residual + self.ffn(hidden_states)


class DoubleBlock(Toy):
    """LongCat's shape: two attentions and two MLPs in one block, in lists."""

    NORMS = ()
    OTHERS = ()

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.input_layernorm = nn.ModuleList([self.NORM(), self.NORM()])
        self.post_attention_layernorm = nn.ModuleList([self.NORM(), self.NORM()])
        self.self_attn = nn.ModuleList([Mixer(10 * seed), Mixer(10 * seed + 1)])
        self.mlps = nn.ModuleList([Mixer(10 * seed + 2), Mixer(10 * seed + 3)])

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm[0](hidden_states)
        else:
            hidden_states, residual = self.input_layernorm[0](hidden_states, residual)
        hidden_states = self.self_attn[0](hidden_states)
        hidden_states, residual = self.post_attention_layernorm[0](hidden_states, residual)
        hidden_states = self.mlps[0](hidden_states)
        hidden_states, residual = self.input_layernorm[1](hidden_states, residual)
        hidden_states = self.self_attn[1](hidden_states)
        hidden_states, residual = self.post_attention_layernorm[1](hidden_states, residual)
        hidden_states = self.mlps[1](hidden_states)
        return hidden_states, residual


class NormAttentionNorm(Toy):
    NORMS = ("norm_1", "norm_2")
    OTHERS = ("attn",)

    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm_1(hidden_states)
        attended = self.attn(hidden_states)
        hidden_states = residual + attended
        residual = hidden_states
        hidden_states = self.norm_2(hidden_states)
        return hidden_states, residual


class NestedBlock(Toy):
    """Dbrx's shape: a child does all that comes before the MLP."""

    NORMS = ()
    OTHERS = ("ffn",)
    ADDED = ("norm_attn_norm.attn", "ffn")

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.norm_attn_norm = NormAttentionNorm(seed + 100)

    def forward(self, hidden_states: Any) -> Any:
        hidden_states, residual = self.norm_attn_norm(hidden_states=hidden_states)
        hidden_states = self.ffn(hidden_states)
        return hidden_states + residual


class StreamsBlock(Toy):
    """Gemma 3n's shape: several streams in one tensor, of which one is active."""

    NORMS = ("input_layernorm", "pre_feedforward_layernorm")

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.active_idx = 1

    def forward(self, hidden_states: Any) -> Any:
        active = hidden_states[self.active_idx] * 2
        normed = self.input_layernorm(active)
        attended = self.self_attn(normed)
        halved = (attended + active) / 2
        normed = self.pre_feedforward_layernorm(halved)
        activated = halved + self.mlp(normed)
        corrected = hidden_states + activated
        first = corrected[self.active_idx]
        corrected[2:] += first
        return corrected


class PostNormBlock(Toy):
    ADDED = ("input_layernorm", "post_attention_layernorm")

    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        hidden_states = self.self_attn(hidden_states)
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        return hidden_states + residual


class ParallelBlock(Toy):
    NORMS = ("ln_1",)

    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        return residual + self.self_attn(hidden_states) + self.mlp(hidden_states)


class TwoNormsBlock(Toy):
    """GPT-NeoX's shape: a parallel MLP has a norm of its own, behind attention in the source."""

    NORMS = ("ln_1", "ln_2")
    use_parallel_residual = True

    def forward(self, hidden_states: Any) -> Any:
        attended = self.self_attn(self.ln_1(hidden_states))
        if self.use_parallel_residual:
            output = self.mlp(self.ln_2(hidden_states))
            hidden_states = output + attended + hidden_states
        else:
            attended = attended + hidden_states
            hidden_states = self.mlp(self.ln_2(attended)) + attended
        return hidden_states


class SequentialBlock(TwoNormsBlock):
    use_parallel_residual = False


class MambaBlock(Toy):
    """Jamba's shape: a mixer that is no attention and writes into a tensor it is given."""

    NORMS = ("input_layernorm", "pre_ff_layernorm")
    OTHERS = ("mamba", "feed_forward")

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        output = torch.empty_like(hidden_states)
        self.mamba(hidden_states, output)
        hidden_states, residual = self.pre_ff_layernorm(output, residual)
        return self.feed_forward(hidden_states), residual


class SumBlock(Toy):
    """Adds the two tensors up itself; no norm is given either."""

    NORMS = ()

    def forward(self, _positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is not None:
            hidden_states = hidden_states + residual
        attended = self.self_attn(hidden_states)
        return self.mlp(hidden_states), hidden_states + attended


class PendingBlock(Toy):
    """What travels beside the stream is no part of it."""

    def forward(self, hidden_states: Any, pending: Any, mix: Any) -> Any:
        mix = None
        hidden_states = self.self_attn(hidden_states)
        return self.mlp(hidden_states) + pending, hidden_states, mix


class ManyBlock(PendingBlock):
    def forward(self, hidden_states: Any, pending: Any, mix: Any) -> Any:
        return hidden_states + mix, pending, mix


class HalfBlock(FusedBlock):
    """DeepSeek's shape: in float16 the stream is scaled so that it does not overflow."""

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        if hidden_states.dtype == torch.float16:
            residual *= 1.0 / 16
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class HandingBlock(Toy):
    """Cohere's shape: the norm is given the stream twice, and the stream travels as one tensor."""

    NORM = HandingNorm
    NORMS = ("input_layernorm",)

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(hidden_states)
        hidden_states = residual + attended + self.mlp(hidden_states)
        return hidden_states, residual


class EitherBlock(Toy):
    """OPT's shape: a flag says whether the same norm comes before the sublayer or after it."""

    NORMS = ("self_attn_layer_norm", "final_layer_norm")
    OTHERS = ("self_attn", "fc1")
    do_layer_norm_before = True

    def forward(self, hidden_states: Any) -> Any:
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states=hidden_states)
        hidden_states = residual + hidden_states
        if not self.do_layer_norm_before:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        residual = hidden_states
        if self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc1(hidden_states)
        hidden_states = residual + hidden_states
        if not self.do_layer_norm_before:
            hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


class AfterBlock(EitherBlock):
    do_layer_norm_before = False


class ChildBlock(FusedBlock):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return super().forward(hidden_states, residual)


class GrandchildBlock(ChildBlock):
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        outcome = super().forward(hidden_states, residual)
        return outcome  # noqa: RET504  # as vLLM's own subclasses read


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


class WrappedBlock(Toy):
    @traced
    @traced
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class HeadlessBlock(Toy):
    """No attention of its own."""

    OTHERS = ("mlp",)

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class SilentBlock(Toy):
    """No forward at all."""
