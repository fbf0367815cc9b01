"""Takes names, types and shapes; gives a plan of which tensor lies where in which buffer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import torch

from clairai.errors import RingError, WeightsError
from clairai.local.gpu_memory import DeviceBlock
from clairai.local.shared_buffer import SharedBuffer
from clairai.points import quote
from clairai.weights import checkpoint, device_checksum
from clairai.weights import torch_buffers as device_memory
from clairai.weights.check_manifest import tensor_nbytes
from clairai.weights.checksum import copy_and_checksum
from clairai.weights.host_buffers import HostBuffer
from clairai.weights.manifest import ALIGNMENT, GRANULE_BYTES, Manifest, PlannedTensor, round_up
from clairai.weights.torch_buffers import DTYPE_NAMES

HOST_BUFFER_BYTES: Final = 128 << 20  # one is packed while the one before is read by the engine
# A GPU fills one in less time than it takes to allocate, offer and open it. 16 GB on an H200,
# without vLLM's loading: 57 ms with 512 MiB, 44 with 1 GiB, 41 with 2, 38 with 4 or with one for
# all; but as much as one holds is gathered at once, where a trainer has its weights in pieces.
DEVICE_BUFFER_BYTES: Final = 2 << 30


class TensorSpec(NamedTuple):
    """A tensor, before anybody has looked into it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TransferTarget(NamedTuple):
    """Which hand-over, for which engine, and where its buffers lie."""

    transfer: str
    epoch: str
    device: str
    label: str = ""


def plan_buffers(
    described: Iterable[TensorSpec], meant: TransferTarget, *, buffer_bytes: int = HOST_BUFFER_BYTES
) -> Manifest:
    """Tensors one after the other, a new buffer where one is full; one too large has its own."""
    tensors: list[PlannedTensor] = []
    buffers: list[int] = []
    end = 0
    for name, dtype, shape in described:
        nbytes = tensor_nbytes(shape, dtype)
        start = round_up(end, ALIGNMENT)
        if not buffers or (end and start + nbytes > buffer_bytes):
            buffers.append(0)
            start = 0
        end = start + nbytes
        buffers[-1] = round_up(max(end, 1), GRANULE_BYTES)
        tensors.append(_planned_tensor(name, dtype, shape, len(buffers) - 1, start, nbytes))
    return Manifest(
        version=1,
        transfer=meant.transfer,
        epoch=meant.epoch,
        device=meant.device,
        buffers=tuple(buffers),
        tensors=tuple(tensors),
        label=meant.label,
    )


def _planned_tensor(
    name: str, dtype: str, shape: tuple[int, ...], buffer: int, offset: int, nbytes: int
) -> PlannedTensor:
    return PlannedTensor(name, dtype, shape, buffer, offset, nbytes)  # type: ignore[arg-type]


# MERGED
# Takes a module, a folder, a mapping or pairs; gives tensors, read when they are packed.


NamedTensors: TypeAlias = Any  # a module, a mapping of tensors, pairs, or a folder of safetensors


class TensorSource(NamedTuple):
    """One tensor: what it is, where it lies, and how to get it."""

    described: TensorSpec
    device: torch.device
    read: Callable[[], torch.Tensor]
    is_whole: bool = True  # any thread may read it; a shard is gathered by the one that sends


def open_sources(named: NamedTensors, opened: ExitStack) -> list[TensorSource]:
    """All that is to be sent; files stay open until `opened` is closed."""
    if isinstance(named, str | Path):
        return _sources_of_folder(Path(named), opened)
    pairs = _named_pairs(named)
    return [_source_of_tensor(name, tensor) for name, tensor in pairs]


def _named_pairs(named: Any) -> Iterable[tuple[str, Any]]:
    pairs: Iterable[tuple[str, Any]] = named
    if isinstance(named, torch.nn.Module):
        pairs = named.named_parameters()
    elif isinstance(named, Mapping):
        pairs = named.items()
    return pairs


def _source_of_tensor(name: str, tensor: Any) -> TensorSource:
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise WeightsError(f"{quote(name)} is a {tensor.dtype} {tensor.layout}; send dense numbers")
    described = TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    is_whole = not hasattr(tensor, "full_tensor")
    return TensorSource(described, tensor.device, partial(_gather, tensor), is_whole)


def _gather(tensor: Any) -> torch.Tensor:
    """A shard of FSDP is gathered now, and not before."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = gather() if callable(gather) else tensor
    return whole.detach()


def _sources_of_folder(folder: Path, opened: ExitStack) -> list[TensorSource]:
    from safetensors import SafetensorError, safe_open

    found = [TensorSpec(*each) for each in checkpoint.list_tensors(folder)]
    holders: dict[str, Any] = {}
    for file in checkpoint.weight_files(folder):
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except SafetensorError as error:
            raise WeightsError(f"{file.name}: {error}; copy it again") from None
        holders |= dict.fromkeys(handle.keys(), handle)
    cpu = torch.device("cpu")
    return [
        TensorSource(each, cpu, partial(holders[each.name].get_tensor, each.name)) for each in found
    ]


# MERGED
# Takes tensors and a plan; gives full buffers in host memory. device_pack.py has a GPU's.


CPU_DEVICE: Final = torch.device("cpu")


class PackedBuffer(NamedTuple):
    """A full buffer, its tensors with their checksums, and what it travels as."""

    tensors: tuple[PlannedTensor, ...]
    home: Literal["host", "copied"]
    fds: tuple[int, ...]
    close: Callable[[], None]


class HostPacker:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(
        self,
        found: Sequence[TensorSource],
        plan: Manifest,
        shelf: SharedBuffer | None = None,
    ) -> None:
        """With a shelf they lie there: for plans of one buffer."""
        self._shelf = shelf
        self._items: Final = {item.described.name: item for item in found}
        self._sizes = plan.buffers
        self._groups = {
            index: tuple(group) for index, group in groupby(plan.tensors, lambda t: t.buffer)
        }

    def pack(self, index: int) -> PackedBuffer:
        group, nbytes = self._groups[index], self._sizes[index]
        if self._shelf is not None:
            return self._onto(self._shelf, group, nbytes)
        return self._into_host(group, nbytes)

    def _onto(
        self, shelf: SharedBuffer, group: tuple[PlannedTensor, ...], nbytes: int
    ) -> PackedBuffer:
        sums = self._fill(shelf.view(nbytes).data, group)
        return PackedBuffer(with_checksums(group, sums), "copied", shelf.fds, _keep_buffer)

    def _into_host(self, group: tuple[PlannedTensor, ...], nbytes: int) -> PackedBuffer:
        buffer = HostBuffer(nbytes)
        try:
            with buffer.view as view:  # nobody may hold the pages when they are sealed
                sums = self._fill(view, group)
            buffer.seal()
        except BaseException:
            buffer.close()
            raise
        return PackedBuffer(with_checksums(group, sums), "host", buffer.fds, buffer.close)

    def _fill(self, room: memoryview, group: tuple[PlannedTensor, ...]) -> list[str]:
        """Each tensor to its place, and the checksum of what lies there then."""
        sums = []
        for planned in group:
            source_N = flat_bytes(read_source(self._items, planned)).cpu().numpy()
            with room[planned.offset : planned.offset + planned.nbytes] as place:
                sums.append(copy_and_checksum(place, source_N.data))
        return sums


def _keep_buffer() -> None:
    """The shelf stays for the next time."""


def read_source(items: Mapping[str, TensorSource], planned: PlannedTensor) -> torch.Tensor:
    """As it is now, if that is still what was planned."""
    tensor = items[planned.name].read()
    _check_unchanged(tensor, planned)
    return tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_unchanged(tensor: torch.Tensor, planned: PlannedTensor) -> None:
    found = TensorSpec(planned.name, DTYPE_NAMES.get(tensor.dtype, ""), tuple(tensor.shape))
    if found != (planned.name, planned.dtype, planned.shape):
        raise WeightsError(
            f"{quote(planned.name)} was {planned.dtype} {list(planned.shape)} when it was planned "
            f"and is {found.dtype} {list(found.shape)} now; do not change it while it is sent"
        )


def with_checksums(
    group: tuple[PlannedTensor, ...], sums: Sequence[str]
) -> tuple[PlannedTensor, ...]:
    return tuple(
        msgspec.structs.replace(tensor, checksum=found)
        for tensor, found in zip(group, sums, strict=True)
    )


# MERGED
# Takes tensors on a GPU and a plan; gives its buffers there, filled and summed in one pass.
#
# Room is made on a thread of its own, ahead of who fills it, and stays until all of it is let go
# of.


class FillingBuffer(NamedTuple):
    """A buffer that is being filled: another process may open it, and reads it once it is full."""

    handle: bytes
    finish: Callable[[], tuple[PlannedTensor, ...]]  # waits; its tensors, with their checksums


class DevicePacker:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(self, found: Sequence[TensorSource], plan: Manifest, device: torch.device) -> None:
        self._items: Final = {item.described.name: item for item in found}
        self._device = device
        torch.cuda.synchronize(device)  # whatever stream the trainer's last step wrote on
        self._groups = [tuple(group) for _, group in groupby(plan.tensors, lambda t: t.buffer)]
        self._maker = ThreadPoolExecutor(1)
        self._rooms = [self._maker.submit(_allocate_block, size, device) for size in plan.buffers]

    def begin(self, index: int) -> FillingBuffer:
        """Copies are under way on return; the tensors that are read must stay as they are."""
        group, room = self._groups[index], self._rooms[index].result()
        bytes_N = device_memory.device_bytes(room, self._device)
        targets = [device_memory.tensor_bytes(bytes_N, planned) for planned in group]
        with torch.cuda.device(self._device):
            spans = [
                flat_bytes(read_source(self._items, planned).to(self._device)) for planned in group
            ]
            finish = device_checksum.begin_copy_and_checksum(spans, targets)
        return FillingBuffer(room.handle, partial(self._finish, group, finish))

    def _finish(
        self, group: tuple[PlannedTensor, ...], finish: Callable[[], list[str]]
    ) -> tuple[PlannedTensor, ...]:
        with torch.cuda.device(self._device):
            return with_checksums(group, finish())

    def close(self) -> None:
        """Let go of all room: nobody may read it any more."""
        self._maker.shutdown(cancel_futures=True)
        for made in self._rooms:
            if not made.cancelled() and made.exception() is None:
                made.result().close()


def _allocate_block(nbytes: int, device: torch.device) -> DeviceBlock:
    try:
        return DeviceBlock.create(nbytes, device.index)
    except RingError as error:
        raise WeightsError(
            f"no {nbytes} bytes more on {device} ({error.reason}); free some: while they are sent, "
            f"weights take their room twice"
        ) from error
