"""Takes a module, a folder, a mapping or pairs; gives tensors, read when they are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from clairai.errors import WeightsError
from clairai.points import quote
from clairai.weights import checkpoint
from clairai.weights.layout import Described
from clairai.weights.tensors import NAMES

Named: TypeAlias = Any  # a module, a mapping of tensors, pairs, or a folder of safetensors


class Item(NamedTuple):
    """One tensor: what it is, where it lies, and how to get it."""

    described: Described
    device: torch.device
    read: Callable[[], torch.Tensor]
    is_whole: bool = True  # any thread may read it; a shard is gathered by the one that sends


def items(named: Named, opened: ExitStack) -> list[Item]:
    """All that is to be sent; files stay open until `opened` is closed."""
    if isinstance(named, str | Path):
        return _of_folder(Path(named), opened)
    pairs = _pairs(named)
    return [_of_tensor(name, tensor) for name, tensor in pairs]


def _pairs(named: Any) -> Iterable[tuple[str, Any]]:
    pairs: Iterable[tuple[str, Any]] = named
    if isinstance(named, torch.nn.Module):
        pairs = named.named_parameters()
    elif isinstance(named, Mapping):
        pairs = named.items()
    return pairs


def _of_tensor(name: str, tensor: Any) -> Item:
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        raise WeightsError(f"{quote(name)} is a {tensor.dtype} {tensor.layout}; send dense numbers")
    described = Described(name, NAMES[tensor.dtype], tuple(tensor.shape))
    is_whole = not hasattr(tensor, "full_tensor")
    return Item(described, tensor.device, partial(_full, tensor), is_whole)


def _full(tensor: Any) -> torch.Tensor:
    """A shard of FSDP is gathered now, and not before."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = gather() if callable(gather) else tensor
    return whole.detach()


def _of_folder(folder: Path, opened: ExitStack) -> list[Item]:
    from safetensors import SafetensorError, safe_open

    found = [Described(*each) for each in checkpoint.tensors(folder)]
    holders: dict[str, Any] = {}
    for file in checkpoint.shards(folder):
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except SafetensorError as error:
            raise WeightsError(f"{file.name}: {error}; copy it again") from None
        holders |= dict.fromkeys(handle.keys(), handle)
    cpu = torch.device("cpu")
    return [Item(each, cpu, partial(holders[each.name].get_tensor, each.name)) for each in found]
