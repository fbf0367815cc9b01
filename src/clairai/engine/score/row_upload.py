"""Takes a bank before and after a change; gives the directions to write, where, and on the device.

P = probes, D = model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.probe.bank import SiteSlot
from clairai.probe.model import Probe

FLOATS_PER_CACHE_LINE: Final = 16  # float32 in a line of a CPU's cache


class SlotRows(NamedTuple):
    """New directions for neighbouring slots of a site."""

    site: int
    slot: int  # the first of them
    rows_PD: NDArray[np.float32]


def changed_slots(
    before: Mapping[SiteSlot, Probe | None], after: Mapping[SiteSlot, Probe]
) -> Iterator[SlotRows]:
    """What has to be written to come from one to the other; both are in order of places."""
    first, rows = (0, 0), list[NDArray[np.float32]]()
    for (site, slot), probe in after.items():
        if before.get((site, slot)) is probe:
            continue
        if rows and (site, slot) != (first[0], first[1] + len(rows)):
            yield SlotRows(*first, np.stack(rows))
            rows = []
        if not rows:
            first = (site, slot)
        rows.append(probe.direction_D)
    if rows:
        yield SlotRows(*first, np.stack(rows))


def block_slots(places: Sequence[SiteSlot], block_PD: NDArray[np.float32]) -> Iterator[SlotRows]:
    """All places, in order, whose rows are the block's."""
    begin = 0
    for end in range(1, len(places) + 1):
        site, slot = places[begin]
        if end == len(places) or places[end] != (site, slot + end - begin):
            yield SlotRows(site, slot, block_PD[begin:end])
            begin = end


class RowUpload:
    """Rows on their way to a device, in memory that is kept: fresh pages cost more than the copy.

    For a GPU it is pinned: then the host goes on while the GPU fetches them. Rows that lie in
    pinned memory already are fetched from there, and held until they have been.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_gpu = device.type == "cuda"
        # Who turns rows into columns reads one number of each: rows that lie a power of two apart
        # would all want the same few lines of a CPU's cache.
        self._gap = 0 if self._is_on_gpu else FLOATS_PER_CACHE_LINE
        self._staging = torch.empty(0)
        self._fetching: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def __call__(self, rows_PD: NDArray[np.float32]) -> torch.Tensor:
        """On the device, in the order of its current stream; on a CPU valid until the next call.

        Nobody writes to the rows any more: they are a bank's.
        """
        if not self._is_on_gpu:
            return self._staged(rows_PD)
        while self._fetching and self._fetching[0][0].query():
            self._fetching.popleft()
        given_PD = torch.from_numpy(np.asarray(_ReadOnlyRows(rows_PD)))
        source_PD = given_PD if given_PD.is_pinned() else self._staged(rows_PD)
        moved_PD = source_PD.to(self._device, non_blocking=True)
        fetched = torch.cuda.Event()
        fetched.record(torch.cuda.current_stream(self._device))
        self._fetching.append((fetched, source_PD))
        return moved_PD

    def _staged(self, rows_PD: NDArray[np.float32]) -> torch.Tensor:
        num_rows, width = rows_PD.shape
        pitch = width + self._gap
        staged_PD = self._room(num_rows * pitch).view(num_rows, pitch)[:, :width]
        np.copyto(staged_PD.numpy(), rows_PD)
        return staged_PD

    def _room(self, size: int) -> torch.Tensor:
        """Nobody reads what was there any more."""
        while self._fetching:
            self._fetching.popleft()[0].synchronize()
        if self._staging.numel() < size:
            self._staging = torch.empty(size, pin_memory=self._is_on_gpu)
        return self._staging[:size]


class _ReadOnlyRows:
    """Rows that nobody may write to, as torch takes them: it warns of those, and writes to none."""

    def __init__(self, rows_PD: NDArray[np.float32]) -> None:
        found = rows_PD.__array_interface__
        self._rows_PD = rows_PD  # as long as anybody has a tensor of them
        self.__array_interface__ = {**found, "data": (found["data"][0], False)}
