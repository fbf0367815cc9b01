"""Takes tensors and a plan; gives full buffers, in the memory of the host or of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple

import msgspec
import torch

from clairai.errors import WeightsError
from clairai.points import quote
from clairai.weights import tensors as device_memory
from clairai.weights.buffers import HostBuffer
from clairai.weights.checksum import checksum
from clairai.weights.layout import Described
from clairai.weights.manifest import CPU, Manifest, Tensor
from clairai.weights.sources import Item
from clairai.weights.tensors import NAMES


class Packed(NamedTuple):
    """A full buffer, its tensors with their checksums, and what it travels as."""

    tensors: tuple[Tensor, ...]
    home: Literal["host", "device"]
    fds: tuple[int, ...]
    handle: bytes
    close: Callable[[], None]


class Packer:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(self, found: Sequence[Item], plan: Manifest) -> None:
        self._items: Final = {item.described.name: item for item in found}
        self._is_host = plan.device == CPU
        self._sizes = plan.buffers
        self._groups = {
            index: tuple(group) for index, group in groupby(plan.tensors, lambda t: t.buffer)
        }

    def pack(self, index: int) -> Packed:
        group, nbytes = self._groups[index], self._sizes[index]
        return self._into_host(group, nbytes) if self._is_host else self._into_gpu(group, nbytes)

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

    def _into_gpu(self, group: tuple[Tensor, ...], nbytes: int) -> Packed:
        from clairai.ring.cuda import DeviceMemory

        device = self._items[group[0].name].device
        memory = DeviceMemory.create(nbytes, device.index or 0)
        try:
            bytes_N = device_memory.device_bytes(memory, device)
            self._fill(bytes_N, group)
            sums = [device_memory.checksum(bytes_N[t.offset : t.offset + t.nbytes]) for t in group]
            torch.cuda.synchronize(device)
            handle = memory.handle
        except BaseException:
            memory.close()
            raise
        return Packed(_summed(group, sums), "device", (), handle, memory.close)

    def _fill(self, bytes_N: torch.Tensor, group: tuple[Tensor, ...]) -> None:
        for planned in group:
            tensor = self._items[planned.name].read()
            _check_as_described(tensor, planned)
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            bytes_N[planned.offset : planned.offset + planned.nbytes].copy_(flat)


def home_of(found: Sequence[Item], engine: str) -> str:
    """The engine's GPU if every tensor is there, else the host's memory, which all can reach."""
    devices = {item.device for item in found}
    if engine == CPU or len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return CPU
    from clairai.ring.cuda import Gpu

    return engine if Gpu(device.index or 0).uuid == engine else CPU


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
