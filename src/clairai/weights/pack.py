"""Takes tensors and a plan; gives full buffers, in the memory of the host or of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from clairai.errors import RingError, WeightsError
from clairai.points import quote
from clairai.ring.cuda import DeviceBlock
from clairai.weights import device_sums
from clairai.weights import tensors as device_memory
from clairai.weights.buffers import HostBuffer
from clairai.weights.checksum import checksum
from clairai.weights.layout import Described
from clairai.weights.manifest import Manifest, Tensor
from clairai.weights.shelf import Shelf
from clairai.weights.sources import Item
from clairai.weights.tensors import NAMES
from clairai.wire_weights import Home

HOST: Final = torch.device("cpu")


class Packed(NamedTuple):
    """A full buffer, its tensors with their checksums, and what it travels as."""

    tensors: tuple[Tensor, ...]
    home: Home
    fds: tuple[int, ...]
    handle: bytes
    close: Callable[[], None]


class Packer:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(
        self,
        found: Sequence[Item],
        plan: Manifest,
        device: torch.device = HOST,
        shelf: Shelf | None = None,
    ) -> None:
        """`device` is where the buffers lie: the host, or the GPU that the plan names.

        With a shelf they lie there: for plans of one buffer.
        """
        self._shelf = shelf
        self._rooms: dict[int, DeviceBlock] = {}  # of a GPU, for the next buffer
        self._items: Final = {item.described.name: item for item in found}
        self._device = device
        if device != HOST:
            torch.cuda.synchronize(device)  # whatever stream the trainer's last step wrote on
        self._sizes = plan.buffers
        self._groups = {
            index: tuple(group) for index, group in groupby(plan.tensors, lambda t: t.buffer)
        }

    def pack(self, index: int) -> Packed:
        group, nbytes = self._groups[index], self._sizes[index]
        if self._shelf is not None:
            return self._onto(self._shelf, group, nbytes)
        return self._into_host(group, nbytes) if self._device == HOST else self._into_gpu(group)

    def _onto(self, shelf: Shelf, group: tuple[Tensor, ...], nbytes: int) -> Packed:
        bytes_N = shelf.room(nbytes)
        self._fill(torch.from_numpy(bytes_N), group)
        sums = [checksum(bytes_N[t.offset : t.offset + t.nbytes].data) for t in group]
        return Packed(_summed(group, sums), "copied", shelf.fds, b"", _keep)

    def _into_host(self, group: tuple[Tensor, ...], nbytes: int) -> Packed:
        buffer = HostBuffer(nbytes)
        try:
            bytes_N = torch.frombuffer(buffer.view, dtype=torch.uint8)
            self._fill(bytes_N, group)
            del bytes_N  # nobody may hold the pages when they are sealed
            view = buffer.view
            sums = [checksum(view[t.offset : t.offset + t.nbytes]) for t in group]
            view.release()
            buffer.seal()
        except BaseException:
            buffer.close()
            raise
        return Packed(_summed(group, sums), "host", buffer.fds, b"", buffer.close)

    def _into_gpu(self, group: tuple[Tensor, ...]) -> Packed:
        """Copied and summed in one pass; on return it is in the memory of the GPU."""
        block = self._room(group[0].buffer)
        try:
            bytes_N = device_memory.device_bytes(block, self._device)
            targets = [device_memory.span(bytes_N, planned) for planned in group]
            with torch.cuda.device(self._device):
                spans = [_flat(self._read(planned).to(self._device)) for planned in group]
                finish = device_sums.begin_copy(spans, targets)
                handle = block.handle
                self._prepare(group[0].buffer + 1)  # while the GPU copies
                sums = finish()
        except BaseException:
            block.close()
            raise
        return Packed(_summed(group, sums), "device", (), handle, block.close)

    def _room(self, index: int) -> DeviceBlock:
        return self._rooms.pop(index, None) or _allocate(self._sizes[index], self._device)

    def _prepare(self, index: int) -> None:
        if index < len(self._sizes):
            self._rooms[index] = _allocate(self._sizes[index], self._device)

    def close(self) -> None:
        """Let go of what was prepared and never packed."""
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()

    def _fill(self, bytes_N: torch.Tensor, group: tuple[Tensor, ...]) -> None:
        for planned in group:
            # Not copy_: torch wakes all its threads for it, and waits longer than a copy takes.
            source = _flat(self._read(planned)).cpu().numpy()
            np.copyto(device_memory.span(bytes_N, planned).numpy(), source)

    def _read(self, planned: Tensor) -> torch.Tensor:
        tensor = self._items[planned.name].read()
        _check_as_described(tensor, planned)
        return tensor


def _keep() -> None:
    """The shelf stays for the next time."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _allocate(nbytes: int, device: torch.device) -> DeviceBlock:
    try:
        return DeviceBlock.create(nbytes, device.index)
    except RingError as error:
        raise WeightsError(
            f"no {nbytes} bytes more on {device} ({error.reason}); free some: while they are sent, "
            f"weights take their room twice"
        ) from error


def _check_as_described(tensor: torch.Tensor, planned: Tensor) -> None:
    found = Described(planned.name, NAMES.get(tensor.dtype, ""), tuple(tensor.shape))
    if found != (planned.name, planned.dtype, planned.shape):
        raise WeightsError(
            f"{quote(planned.name)} was {planned.dtype} {list(planned.shape)} when it was planned "
            f"and is {found.dtype} {list(found.shape)} now; do not change it while it is sent"
        )


def _summed(group: tuple[Tensor, ...], sums: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(
        msgspec.structs.replace(tensor, checksum=found)
        for tensor, found in zip(group, sums, strict=True)
    )
