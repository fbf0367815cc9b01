"""Takes tensors on a GPU and a plan; gives its buffers there, filled and summed in one pass.

Room is made on a thread of its own, ahead of who fills it, and stays until all of it is let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import torch

from clairai.errors import RingError, WeightsError
from clairai.ring.cuda import DeviceBlock
from clairai.weights import device_sums
from clairai.weights import tensors as device_memory
from clairai.weights.manifest import Manifest, Tensor
from clairai.weights.pack import flat, read, summed
from clairai.weights.sources import Item


class Begun(NamedTuple):
    """A buffer that is being filled: another process may open it, and reads it once it is full."""

    handle: bytes
    finish: Callable[[], tuple[Tensor, ...]]  # waits; its tensors, with their checksums


class DevicePacker:
    """Fills the buffers of one plan, each when it is asked for."""

    def __init__(self, found: Sequence[Item], plan: Manifest, device: torch.device) -> None:
        self._items: Final = {item.described.name: item for item in found}
        self._device = device
        torch.cuda.synchronize(device)  # whatever stream the trainer's last step wrote on
        self._groups = [tuple(group) for _, group in groupby(plan.tensors, lambda t: t.buffer)]
        self._maker = ThreadPoolExecutor(1)
        self._rooms = [self._maker.submit(_allocate, size, device) for size in plan.buffers]

    def begin(self, index: int) -> Begun:
        """Copies are under way on return; the tensors that are read must stay as they are."""
        group, room = self._groups[index], self._rooms[index].result()
        bytes_N = device_memory.device_bytes(room, self._device)
        targets = [device_memory.span(bytes_N, planned) for planned in group]
        with torch.cuda.device(self._device):
            spans = [flat(read(self._items, planned).to(self._device)) for planned in group]
            finish = device_sums.begin_copy(spans, targets)
        return Begun(room.handle, partial(self._finish, group, finish))

    def _finish(
        self, group: tuple[Tensor, ...], finish: Callable[[], list[str]]
    ) -> tuple[Tensor, ...]:
        with torch.cuda.device(self._device):
            return summed(group, finish())

    def close(self) -> None:
        """Let go of all room: nobody may read it any more."""
        self._maker.shutdown(cancel_futures=True)
        for made in self._rooms:
            if not made.cancelled() and made.exception() is None:
                made.result().close()


def _allocate(nbytes: int, device: torch.device) -> DeviceBlock:
    try:
        return DeviceBlock.create(nbytes, device.index)
    except RingError as error:
        raise WeightsError(
            f"no {nbytes} bytes more on {device} ({error.reason}); free some: while they are sent, "
            f"weights take their room twice"
        ) from error
