"""Compare a manifest with what the engine has, and refuse it with a reason.

Pure: no tensor, no socket, no CUDA. Time and memory grow only with the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from clairai.errors import WeightsError, quote
from clairai.weights.manifest import (
    ALIGNMENT,
    GRANULE_BYTES,
    ITEM_BYTES,
    MAX_I64,
    Manifest,
    PlannedTensor,
    kind_of,
    round_up,
)

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/@+-]*")


class ExpectedTensor(NamedTuple):
    """The types and the shape that a name accepts."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


# The tensors that one layer of vLLM holds, for each of them: they come together or not at all.
TensorGroups = Callable[[], Sequence[frozenset[str]]]


@dataclass(frozen=True)
class EngineTensors:
    """What the engine accepts, by name: the model's tensors and, with prefixes, the banks'.

    `find_groups` is called for a part of the model. Without it, only the whole model is accepted.
    """

    epoch: str
    device: str
    expected: Mapping[str, ExpectedTensor]
    find_groups: TensorGroups | None = None

    @property
    def max_nbytes(self) -> int:
        """The size of the largest valid plan: every tensor once, each in its own buffer."""
        return sum(
            _max_nbytes(tensor) * count for tensor, count in Counter(self.expected.values()).items()
        )


def check_plan(manifest: Manifest, engine: EngineTensors) -> None:
    """Check everything that can be checked without a buffer."""
    _check_target(manifest, engine)
    _check_names(manifest, engine)
    for tensor in manifest.tensors:
        _check_tensor(tensor, engine.expected[tensor.name])
    _check_buffers(manifest, engine)
    _check_layout(manifest)


def check_matches_plan(manifest: Manifest, plan: Manifest) -> None:
    """Check that a commit is its plan with a checksum for each tensor."""
    for given, planned in zip(manifest.tensors, plan.tensors, strict=False):
        if not given.checksum:
            raise WeightsError(f"{quote(given.name)} has no checksum; send it as it was packed")
        if _placement(given) != _placement(planned):
            raise WeightsError(f"{quote(given.name)} is not where the plan has it; plan again")
    if _outline(manifest) != _outline(plan):
        raise WeightsError("the manifest is not the one that was planned; plan again")


def check_extents(manifest: Manifest, extents: Sequence[int]) -> None:
    """`extents` are the sizes of the received buffers according to the kernel or driver."""
    if len(extents) != len(manifest.buffers):
        raise WeightsError(
            f"{len(extents)} of {len(manifest.buffers)} buffers have come; send them all first"
        )
    for index, (nbytes, extent) in enumerate(zip(manifest.buffers, extents, strict=True)):
        if extent < nbytes:
            raise WeightsError(
                f"buffer {index} claims {nbytes} bytes and has {extent}; do not trust this sender"
            )


def check_checksums(manifest: Manifest, found: Mapping[str, str]) -> None:
    """`found` are the checksums that the engine computed, by name."""
    for tensor in manifest.tensors:
        if found.get(tensor.name) != tensor.checksum:
            raise WeightsError(
                f"{quote(tensor.name)} has another checksum here than where it was packed; "
                f"send it again"
            )


def _check_target(manifest: Manifest, engine: EngineTensors) -> None:
    if manifest.epoch != engine.epoch:
        raise WeightsError(
            f"made for epoch {manifest.epoch}, this engine is {engine.epoch}: it has restarted; "
            f"ask it again and pack anew"
        )
    if manifest.device not in (engine.device, "cpu"):
        raise WeightsError(
            f"the buffers are on GPU {manifest.device}, the engine on {engine.device}; send from "
            f"the same GPU, or through host memory"
        )


def _check_names(manifest: Manifest, engine: EngineTensors) -> None:
    if len(manifest.tensors) > len(engine.expected):
        raise WeightsError(
            f"{len(manifest.tensors)} tensors, and the engine takes {len(engine.expected)}; "
            f"send each once"
        )
    if not manifest.tensors:
        raise WeightsError("the manifest names no tensor; send one or more")
    seen: set[str] = set()
    for tensor in manifest.tensors:
        _check_name(tensor.name, engine)
        if tensor.name in seen:
            raise WeightsError(f"{quote(tensor.name)} is there twice; send each once")
        seen.add(tensor.name)
    _check_complete(seen, engine)


def _check_name(name: str, engine: EngineTensors) -> None:
    if not _NAME.fullmatch(name) or ".." in name:
        raise WeightsError(
            f"{quote(name)} cannot name a tensor; use A-Z a-z 0-9 . _ : / @ + -, not starting "
            f"with . or / and without .."
        )
    if name not in engine.expected:
        raise WeightsError(
            f"the engine has nothing named {quote(name)}; GET /v1/weights/tensors lists its names"
        )


def _check_complete(names: set[str], engine: EngineTensors) -> None:
    """Whole layers or nothing of them: vLLM fuses tensors, and half a layer would be noise."""
    if all(kind_of(name) != "model" for name in names):
        return
    model = [name for name in engine.expected if kind_of(name) == "model"]
    missing = [name for name in model if name not in names]
    if not missing:
        return
    groups = [frozenset(model)] if engine.find_groups is None else engine.find_groups()
    for group in groups:
        _check_group(names, group, model)


def _check_group(names: set[str], group: frozenset[str], model: Sequence[str]) -> None:
    missing = group - names
    if not missing or len(missing) == len(group):
        return
    if len(group) < len(model):
        raise WeightsError(
            f"{quote(min(missing))} is missing: one layer of vLLM holds it with "
            f"{quote(min(group & names))}; send all {len(group)} tensors of that layer, or none"
        )
    first = next(name for name in model if name in missing)
    raise WeightsError(
        f"{len(missing)} of the model's {len(model)} tensors are missing, {quote(first)} first; "
        f"send all of them, or none"
    )


def _check_tensor(tensor: PlannedTensor, expected: ExpectedTensor) -> None:
    if tensor.shape != expected.shape:
        raise WeightsError(
            f"{quote(tensor.name)} has shape {list(tensor.shape)}, the engine's has "
            f"{list(expected.shape)}"
        )
    if tensor.dtype not in expected.dtypes:
        raise WeightsError(
            f"{quote(tensor.name)} has dtype {tensor.dtype}, the engine takes "
            f"{' or '.join(expected.dtypes)}; cast it"
        )
    nbytes = tensor_nbytes(tensor.shape, tensor.dtype)
    if tensor.nbytes != nbytes:
        raise WeightsError(
            f"{quote(tensor.name)} claims {tensor.nbytes} bytes, its shape has {nbytes}"
        )


def tensor_nbytes(shape: Sequence[int], dtype: str) -> int:
    """The size of a dense tensor; WeightsError if it exceeds 64 bits."""
    nbytes = ITEM_BYTES[dtype]
    for size in shape:
        nbytes *= size
        if nbytes > MAX_I64:
            raise WeightsError(f"shape {list(shape)} has more bytes than 64 bits can say")
    return nbytes


def _check_buffers(manifest: Manifest, engine: EngineTensors) -> None:
    for index, nbytes in enumerate(manifest.buffers):
        if nbytes == 0 or nbytes % GRANULE_BYTES:
            raise WeightsError(
                f"buffer {index} has {nbytes} bytes; give a multiple of {GRANULE_BYTES}, not 0"
            )
    total = sum(manifest.buffers)
    needed = sum(round_up(max(each.nbytes, 1), GRANULE_BYTES) for each in manifest.tensors)
    if total > needed and total > engine.max_nbytes:  # cheap test first
        raise WeightsError(
            f"the buffers claim {total} bytes, and all that this engine can take fits in "
            f"{engine.max_nbytes}"
        )


def _check_layout(manifest: Manifest) -> None:
    """Check that buffers are filled from the start, in the manifest's order, without gaps."""
    placed = [(tensor.buffer, tensor) for tensor in manifest.tensors]
    used = [index for index, _ in groupby(placed, key=lambda item: item[0])]
    if used != list(range(len(manifest.buffers))):
        raise WeightsError(
            f"{len(manifest.buffers)} buffers, and the tensors use {used[:8]} in this order; fill "
            f"each buffer, one after the other"
        )
    for index, group in groupby(placed, key=lambda item: item[0]):
        _check_buffer_layout(index, manifest.buffers[index], [tensor for _, tensor in group])


def _check_buffer_layout(index: int, nbytes: int, tensors: Sequence[PlannedTensor]) -> None:
    end = 0
    for tensor in tensors:
        start = round_up(end, ALIGNMENT)
        if tensor.offset < end:
            raise WeightsError(
                f"{quote(tensor.name)} at {tensor.offset} of buffer {index} overlaps what ends at "
                f"{end}"
            )
        if tensor.offset != start:
            raise WeightsError(
                f"{quote(tensor.name)} at {tensor.offset} of buffer {index} leaves a hole; "
                f"it belongs at {start}"
            )
        end = tensor.offset + tensor.nbytes
    if round_up(max(end, 1), GRANULE_BYTES) != nbytes:
        raise WeightsError(
            f"buffer {index} has {nbytes} bytes and its tensors end at {end}; allocate the next "
            f"multiple of {GRANULE_BYTES}"
        )


def _max_nbytes(expected: ExpectedTensor) -> int:
    widest = max(expected.dtypes, key=ITEM_BYTES.__getitem__)
    return round_up(max(tensor_nbytes(expected.shape, widest), 1), GRANULE_BYTES)


def _placement(tensor: PlannedTensor) -> tuple[object, ...]:
    return (tensor.name, tensor.dtype, tensor.shape, tensor.buffer, tensor.offset, tensor.nbytes)


def _outline(manifest: Manifest) -> tuple[object, ...]:
    counted = len(manifest.tensors)
    return (manifest.transfer, manifest.epoch, manifest.device, manifest.buffers, counted)
