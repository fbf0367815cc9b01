"""Quantised checkpoints of tiny models, and the same weights as plain ones for Hugging Face.

The files are written here, format by format, from integers and scales that are chosen first: so the
plain folder holds exactly the weights that a quantised one stands for, and no code of vLLM's or of
clairai's takes part in the truth. I = inputs of a linear layer, O = its outputs, G = groups of
inputs that share a scale.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 32
PACKED: Final = 8  # numbers of 4 bits in a word
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
IGNORED: Final = ("lm_head", "embed_tokens")
LARGEST_INT8: Final = 127.0
LARGEST_FP8: Final = 448.0
# Layers of a block that vLLM makes one of.
JOINED: Final = (
    *(("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)),
)

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Groups:
    """A weight as integers of 4 bits: the real one is `scales * (values - zeros)` by groups."""

    values_IO: Integers
    zeros_GO: Integers
    scales_GO: Floats

    @property
    def weight_OI(self) -> Floats:
        zeros_IO, scales_IO = (
            np.repeat(part, GROUP, axis=0) for part in (self.zeros_GO, self.scales_GO)
        )
        return np.ascontiguousarray((scales_IO * (self.values_IO - zeros_IO)).T, np.float32)


def quantise_groups(weight_OI: Floats, *, is_symmetric: bool) -> Groups:
    grouped_GIO = weight_OI.T.reshape(-1, GROUP, weight_OI.shape[0])
    low_GO, high_GO = grouped_GIO.min(axis=1), grouped_GIO.max(axis=1)
    if is_symmetric:
        scales_GO = _half(np.maximum(np.abs(low_GO), np.abs(high_GO)) / 7)
        zeros_GO = np.full(scales_GO.shape, 8, np.int32)
    else:
        scales_GO = _half((high_GO - low_GO) / 15)
        zeros_GO = np.clip(np.rint(-low_GO / scales_GO), 0, 15).astype(np.int32)
    values_GIO = np.rint(grouped_GIO / scales_GO[:, None]) + zeros_GO[:, None]
    values_IO = np.clip(values_GIO, 0, 15).astype(np.int32).reshape(weight_OI.shape[::-1])
    return Groups(values_IO, zeros_GO, scales_GO)


def _half(scales: Floats) -> Floats:
    """Every dtype that an engine may have holds these exactly: four bits of a mantissa."""
    mantissa, exponent = np.frexp(scales)
    rounded: Floats = np.ldexp(np.rint(mantissa * 16) / 16, exponent).astype(np.float32)
    return rounded


def pack(values: Integers, axis: int, order: tuple[int, ...] = tuple(range(PACKED))) -> Integers:
    """Eight numbers to a word along an axis; `order` says which comes to which four bits."""
    moved = np.moveaxis(values, axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, PACKED)[..., list(order)].astype(np.uint32)
    words = np.bitwise_or.reduce(eights << (4 * np.arange(PACKED, dtype=np.uint32)), axis=-1)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


# --- formats: tensors of one layer, and its plain weight ---


def w8a8(name: str, weight_OI: Floats) -> tuple[Tensors, Floats]:
    """Eight bits by output; inputs are quantised row by row while the model runs."""
    scales_O1 = _half(np.abs(weight_OI).max(axis=1, keepdims=True) / LARGEST_INT8)
    values_OI = np.clip(np.rint(weight_OI / scales_O1), -128, 127).astype(np.int8)
    tensors: Tensors = {f"{name}.weight": values_OI, f"{name}.weight_scale": scales_O1}
    return tensors, (values_OI * scales_O1).astype(np.float32)


def w4a16(name: str, weight_OI: Floats) -> tuple[Tensors, Floats]:
    groups = quantise_groups(weight_OI, is_symmetric=True)
    tensors: Tensors = {
        f"{name}.weight_packed": pack(groups.values_IO.T, 1),
        f"{name}.weight_scale": np.ascontiguousarray(groups.scales_GO.T),
        f"{name}.weight_shape": np.array(weight_OI.shape, np.int64),
    }
    return tensors, groups.weight_OI


def gptq(name: str, weight_OI: Floats) -> tuple[Tensors, Floats]:
    groups = quantise_groups(weight_OI, is_symmetric=True)
    tensors: Tensors = {
        f"{name}.qweight": pack(groups.values_IO, 0),
        f"{name}.qzeros": pack(groups.zeros_GO - 1, 1),  # the format's own offset
        f"{name}.scales": groups.scales_GO,
        f"{name}.g_idx": (np.arange(weight_OI.shape[1]) // GROUP).astype(np.int32),
    }
    return tensors, groups.weight_OI


def awq(name: str, weight_OI: Floats) -> tuple[Tensors, Floats]:
    groups = quantise_groups(weight_OI, is_symmetric=False)
    tensors: Tensors = {
        f"{name}.qweight": pack(groups.values_IO, 1, AWQ_ORDER),
        f"{name}.qzeros": pack(groups.zeros_GO, 1, AWQ_ORDER),
        f"{name}.scales": groups.scales_GO,
    }
    return tensors, groups.weight_OI


def _compressed_tensors(form: str, weights: Any, inputs: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


_SYMMETRIC: Final = {"type": "int", "symmetric": True}
_WEIGHTS8: Final = _SYMMETRIC | {"num_bits": 8, "strategy": "channel", "dynamic": False}
_INPUTS8: Final = _SYMMETRIC | {"num_bits": 8, "strategy": "token", "dynamic": True}
_WEIGHTS4: Final = _SYMMETRIC | {"num_bits": 4, "strategy": "group", "group_size": GROUP}

Writer = Callable[[str, Floats], tuple[Tensors, Floats]]
FORMATS: Final[Mapping[str, tuple[Writer, dict[str, Any]]]] = {
    "w8a8": (w8a8, _compressed_tensors("int-quantized", _WEIGHTS8, _INPUTS8)),
    "w4a16": (w4a16, _compressed_tensors("pack-quantized", _WEIGHTS4, None)),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP}
        | {"zero_point": True, "version": "gemm"},
    ),
}


@dataclass(frozen=True)
class Quantised:
    """A model as vLLM serves it, and its weights as plain ones for Hugging Face."""

    folder: Path
    plain: Path


def quantise(source: Path, target: Path, form: str) -> Quantised:
    """Every linear layer of a model's blocks, in one of the formats."""
    from safetensors.numpy import load_file, save_file

    writer, config = FORMATS[form]
    made = Quantised(target / form, target / f"{form}-plain")
    tensors: Tensors = {}
    plain: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if value.ndim != 2 or any(part in name for part in IGNORED):
            tensors[name] = plain[name] = value
            continue
        written, plain[name] = writer(name.removesuffix(".weight"), value)
        tensors |= written
    for folder, kept, changes in (
        (made.folder, tensors, {"quantization_config": config}),
        (made.plain, plain, {}),
    ):
        folder.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, folder)
        settings = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(settings))
        # safetensors writes memory as it lies, whatever the strides
        laid = {name: np.ascontiguousarray(value) for name, value in kept.items()}
        save_file(laid, folder / "model.safetensors", metadata={"format": "pt"})
    return made


# --- Hugging Face's model, changed to compute as a quantised one does ---


def round_inputs_to_int8(model: Any) -> None:
    """As W8A8 does: row by row, 8 bits."""
    import torch

    def round_rows(x: Any) -> Any:
        scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST_INT8
        return torch.round(x / scale) * scale

    _change_inputs(model, round_rows)


def round_to_fp8(model: Any, served: str) -> None:
    """As `quantization="fp8"` does: weights by tensor when they are loaded, inputs row by row.

    Weights are loaded in the dtype `served`. Layers that vLLM has joined share a scale.
    """
    import torch

    for name, module in model.named_modules():
        for joined in JOINED:
            parts = [getattr(module, part, None) for part in joined]
            if all(isinstance(part, torch.nn.Linear) for part in parts) and name:
                weights = [part.weight for part in parts if part is not None]
                _round_weights_to_fp8(weights, getattr(torch, served))
    _change_inputs(model, lambda x: _round_to_fp8(x, x.abs().amax(dim=-1, keepdim=True)))


def _round_weights_to_fp8(weights: list[Any], served_dtype: Any) -> None:
    import torch

    with torch.no_grad():
        served = [weight.to(served_dtype).float() for weight in weights]
        largest = torch.stack([weight.abs().max() for weight in served]).max()
        for weight, given in zip(weights, served, strict=True):
            weight.copy_(_round_to_fp8(given, largest))


def _round_to_fp8(x: Any, largest: Any) -> Any:
    import torch

    scale = (largest / LARGEST_FP8).clamp(min=1 / (LARGEST_FP8 * 512))
    scaled = (x / scale).clamp(-LARGEST_FP8, LARGEST_FP8).float()
    return scaled.to(torch.float8_e4m3fn).to(x.dtype) * scale


def _change_inputs(model: Any, change: Callable[[Any], Any]) -> None:
    """Products of what is rounded are exact in vLLM's kernels: here they are taken in float64."""
    import torch

    def forward(self: Any, x: Any) -> Any:
        rounded = change(x.double())
        return torch.nn.functional.linear(rounded, self.weight.double()).to(x.dtype)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in IGNORED):
            assert module.bias is None
            module.forward = MethodType(forward, module)
