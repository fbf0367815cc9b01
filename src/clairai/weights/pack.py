"""Takes tensors and a plan; gives full buffers in host memory. device_pack.py has a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final, Literal, NamedTuple

import msgspec
import torch

from clairai.errors import WeightsError
from clairai.lent import Shelf
from clairai.points import quote
from clairai.weights.buffers import HostBuffer
from clairai.weights.checksum import copied
from clairai.weights.layout import Described
from clairai.weights.manifest import Manifest, Tensor
from clairai.weights.sources import Item
from clairai.weights.tensors import NAMES

HOST: Final = torch.device("cpu")


class Packed(NamedTuple):
    """A full buffer, its tensors with their checksums, and what it travels as."""

    tensors: tuple[Tensor, ...]
    home: Literal["host", "copied"]
    fds: tuple[int, ...]
    close: Callable[[], None]


class Packer:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(
        self,
        found: Sequence[Item],
        plan: Manifest,
        shelf: Shelf | None = None,
    ) -> None:
        """With a shelf they lie there: for plans of one buffer."""
        self._shelf = shelf
        self._items: Final = {item.described.name: item for item in found}
        self._sizes = plan.buffers
        self._groups = {
            index: tuple(group) for index, group in groupby(plan.tensors, lambda t: t.buffer)
        }

    def pack(self, index: int) -> Packed:
        group, nbytes = self._groups[index], self._sizes[index]
        if self._shelf is not None:
            return self._onto(self._shelf, group, nbytes)
        return self._into_host(group, nbytes)

    def _onto(self, shelf: Shelf, group: tuple[Tensor, ...], nbytes: int) -> Packed:
        sums = self._fill(shelf.room(nbytes).data, group)
        return Packed(summed(group, sums), "copied", shelf.fds, _keep)

    def _into_host(self, group: tuple[Tensor, ...], nbytes: int) -> Packed:
        buffer = HostBuffer(nbytes)
        try:
            with buffer.view as view:  # nobody may hold the pages when they are sealed
                sums = self._fill(view, group)
            buffer.seal()
        except BaseException:
            buffer.close()
            raise
        return Packed(summed(group, sums), "host", buffer.fds, buffer.close)

    def _fill(self, room: memoryview, group: tuple[Tensor, ...]) -> list[str]:
        """Each tensor to its place, and the checksum of what lies there then."""
        sums = []
        for planned in group:
            source_N = flat(read(self._items, planned)).cpu().numpy()
            with room[planned.offset : planned.offset + planned.nbytes] as place:
                sums.append(copied(place, source_N.data))
        return sums


def _keep() -> None:
    """The shelf stays for the next time."""


def read(items: Mapping[str, Item], planned: Tensor) -> torch.Tensor:
    """As it is now, if that is still what was planned."""
    tensor = items[planned.name].read()
    _check_as_described(tensor, planned)
    return tensor


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_as_described(tensor: torch.Tensor, planned: Tensor) -> None:
    found = Described(planned.name, NAMES.get(tensor.dtype, ""), tuple(tensor.shape))
    if found != (planned.name, planned.dtype, planned.shape):
        raise WeightsError(
            f"{quote(planned.name)} was {planned.dtype} {list(planned.shape)} when it was planned "
            f"and is {found.dtype} {list(found.shape)} now; do not change it while it is sent"
        )


def summed(group: tuple[Tensor, ...], sums: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(
        msgspec.structs.replace(tensor, checksum=found)
        for tensor, found in zip(group, sums, strict=True)
    )
