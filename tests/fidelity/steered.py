"""Hugging Face's logits of a steered model, with hooks in place of clairai.

The arithmetic is written once more here, a position at a time, from what the documentation says and
not from the code it checks. T = tokens, D = model width, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gated:
    """Opens and closes a change by a linear score at one point."""

    point: str
    direction_D: Floats
    threshold: float
    bias: float = 0.0
    activation: str = "none"
    sharpness: float | None = None
    release: float | None = None
    latch: bool = False


@dataclass(frozen=True)
class Change:
    """One vector's work on the positions it is given."""

    op: str
    rows: dict[str, Floats]  # by point
    positions: frozenset[int]
    scale: float = 1.0
    matched: bool = False
    low: float = -math.inf
    high: float = math.inf
    gate: Gated | None = None


@dataclass
class _Steps:
    """How far each change's gate is open, by position; filled as the points are passed."""

    opened: dict[int, dict[int, float]] = field(default_factory=dict)


def logits(folder: str, token_ids: list[int], changes: list[Change]) -> Floats:
    """T x V, of one forward over the whole sequence, in float32."""
    import torch

    model = _model(folder)
    hooks = [*_hooks(model, changes, _Steps())]
    try:
        with torch.no_grad():
            return np.asarray(model(torch.tensor([token_ids])).logits[0].double().numpy())
    finally:
        for hook in hooks:
            hook.remove()


def streams(folder: str, token_ids: list[int], changes: list[Change]) -> dict[str, Floats]:
    """The residual stream at every point, T x D, of the same forward: as the changes left it."""
    import torch

    model = _model(folder)
    found: dict[str, Floats] = {}
    hooks = [*_hooks(model, changes, _Steps()), *_keepers(model, found)]
    try:
        with torch.no_grad():
            model(torch.tensor([token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _keepers(model: Any, found: dict[str, Floats]) -> Iterator[Any]:
    """Behind the hooks that change something: hooks run in the order they were registered in."""

    def keep(name: str, given: Any) -> None:
        stream = given[0] if isinstance(given, tuple) else given
        rows_TD = stream.detach().reshape(-1, stream.shape[-1]).double()
        found[name] = rows_TD.numpy().copy()

    def on_input(name: str) -> Any:
        return lambda _module, args: keep(name, args)

    def on_output(name: str) -> Any:
        return lambda _module, _args, output: keep(name, output)

    for index, layer in enumerate(model.model.layers):
        yield layer.input_layernorm.register_forward_pre_hook(on_input(f"pre_attn.{index}"))
        norm = layer.post_attention_layernorm
        yield norm.register_forward_pre_hook(on_input(f"post_attn.{index}"))
        yield layer.register_forward_hook(on_output(f"post_block.{index}"))


@cache
def _model(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _hooks(model: Any, changes: list[Change], steps: _Steps) -> Iterator[Any]:
    for index, layer in enumerate(model.model.layers):
        before = _on_input(f"pre_attn.{index}", changes, steps)
        between = _in_place(f"post_attn.{index}", changes, steps)
        after = _on_output(f"post_block.{index}", changes, steps)
        yield layer.register_forward_pre_hook(before, with_kwargs=True)
        yield layer.post_attention_layernorm.register_forward_pre_hook(between)
        yield layer.register_forward_hook(after)


def _on_input(point: str, changes: list[Change], steps: _Steps) -> Any:
    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (_steered(args[0], point, changes, steps), *args[1:]), kwargs
        stream = _steered(kwargs["hidden_states"], point, changes, steps)
        return args, {**kwargs, "hidden_states": stream}

    return hook


def _in_place(point: str, changes: list[Change], steps: _Steps) -> Any:
    def hook(_module: Any, args: Any) -> None:
        # The block keeps the same tensor as its residual.
        args[0].copy_(_steered(args[0], point, changes, steps))

    return hook


def _on_output(point: str, changes: list[Change], steps: _Steps) -> Any:
    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_steered(output[0], point, changes, steps), *output[1:])
        return _steered(output, point, changes, steps)

    return hook


def _steered(stream: Any, point: str, changes: list[Change], steps: _Steps) -> Any:
    import torch

    rows_TD = stream.reshape(-1, stream.shape[-1]).double().numpy().copy()
    for number, change in enumerate(changes):
        if change.gate is not None and change.gate.point == point:
            steps.opened[number] = _opened(change.gate, change.positions, rows_TD)
    for number, change in enumerate(changes):
        if point in change.rows:
            for position in sorted(change.positions & {*range(len(rows_TD))}):
                gate = 1.0 if change.gate is None else steps.opened[number][position]
                vector_D = change.rows[point]
                rows_TD[position] = _changed(rows_TD[position], change, vector_D, gate)
    return torch.from_numpy(rows_TD).to(stream.dtype).reshape(stream.shape)


def _opened(gate: Gated, positions: frozenset[int], rows_TD: Floats) -> dict[int, float]:
    found: dict[int, float] = {}
    state = 0.0
    for position in sorted(positions & {*range(len(rows_TD))}):
        score = float(rows_TD[position] @ gate.direction_D) + gate.bias
        if gate.activation == "relu":
            score = max(score, 0.0)
        if gate.activation == "sigmoid":
            score = 1 / (1 + math.exp(-score))
        if gate.release is not None:
            state = 1.0 if score >= gate.threshold else state if score >= gate.release else 0.0
            value = state
        elif gate.sharpness is None:
            value = 1.0 if score >= gate.threshold else 0.0
        else:
            value = 1 / (1 + math.exp(-gate.sharpness * (score - gate.threshold)))
        if gate.latch:
            value = state = max(state, value)
        found[position] = value
    return found


def _changed(row_D: Floats, change: Change, vector_D: Floats, gate: float) -> Floats:
    size = float(np.linalg.norm(vector_D))
    strength = change.scale * gate
    if change.op == "add":
        length = float(np.linalg.norm(row_D)) / size if change.matched else 1.0
        return row_D + strength * length * vector_D
    if change.op == "replace":
        return row_D + strength * (vector_D - row_D)
    along = float(row_D @ vector_D) / size
    target = 0.0 if change.op == "ablate" else min(max(along, change.low), change.high)
    return row_D + strength * (target - along) * vector_D / size
