"""Finds the probe directions that a change of the bank has to write, and uploads them.

Runs in: the worker. P = probes, D = model width.
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

FLOATS_PER_CACHE_LINE: Final = 16


class SlotRows(NamedTuple):
    """New directions for neighbouring slots of a site."""

    site: int
    slot: int  # the first of them
    rows_PD: NDArray[np.float32]


def changed_slots(
    before: Mapping[SiteSlot, Probe | None], after: Mapping[SiteSlot, Probe]
) -> Iterator[SlotRows]:
    """The directions that differ between two banks; both are in the order of their slots."""
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
    """All directions of a block, one part for each run of neighbouring slots."""
    begin = 0
    for end in range(1, len(places) + 1):
        site, slot = places[begin]
        if end == len(places) or places[end] != (site, slot + end - begin):
            yield SlotRows(site, slot, block_PD[begin:end])
            begin = end


class RowUpload:
    """Copies rows to the device through memory that is reused: fresh pages cost more than copies.

    For a GPU that memory is pinned, so that the host goes on while the GPU fetches the rows. Rows
    that are in pinned memory already are fetched from there, and kept until then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_gpu = device.type == "cuda"
        # Transposing reads one number of each row: rows that lie a power of two apart would all
        # compete for the same few lines of the CPU's cache.
        self._gap = 0 if self._is_on_gpu else FLOATS_PER_CACHE_LINE
        self._staging = torch.empty(0)
        self._fetching: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def __call__(self, rows_PD: NDArray[np.float32]) -> torch.Tensor:
        """The rows on the device, queued on its current stream; on a CPU valid until the next call.

        The rows belong to a bank and do not change.
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
        """Staging memory; waits until nothing reads what was there."""
        while self._fetching:
            self._fetching.popleft()[0].synchronize()
        if self._staging.numel() < size:
            self._staging = torch.empty(size, pin_memory=self._is_on_gpu)
        return self._staging[:size]


class _ReadOnlyRows:
    """Shows read-only rows to torch as writable: it warns of others, and here it only reads."""

    def __init__(self, rows_PD: NDArray[np.float32]) -> None:
        found = rows_PD.__array_interface__
        self._rows_PD = rows_PD  # kept for as long as a tensor of them exists
        self.__array_interface__ = {**found, "data": (found["data"][0], False)}
