"""Takes the arena; gives torch's view of it, reachable for the GPU, which says what has come.

Memory that the driver has registered is page-locked, whoever made it: a copy with non_blocking is
one cudaMemcpyAsync (aten/src/ATen/native/cuda/Copy.cu copy_kernel_cuda), which does not wait for
page-locked memory. torch asks the allocator of its own pinned memory about it, and nobody else.
"""

from __future__ import annotations

import contextlib

import torch

from clairai.capture.staging_arena import COPIED_WORD, StagingArena
from clairai.local.gpu_memory import Gpu
from clairai.ring.layout import WORD_BYTES


class PinnedArena:
    """Where rows come to, as tensors."""

    def __init__(self, arena: StagingArena, device: torch.device) -> None:
        self._bytes = torch.from_numpy(arena.memory)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._undo = contextlib.ExitStack()
        self._word = 0
        if device.type == "cuda":
            self._reach(arena, device)

    def _reach(self, arena: StagingArena, device: torch.device) -> None:
        gpu = self._gpu = Gpu(device.index or 0)
        here = arena.whole.ctypes.data
        self._word = gpu.map_host(here, arena.whole.nbytes) + COPIED_WORD * WORD_BYTES
        self._undo.callback(gpu.unmap_host, here)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """One array, to be written. `start` is aligned, and rows lie one behind the other."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        strides = (shape[1], 1) if len(shape) > 1 else (1,)
        return typed.as_strided(shape, strides, start // dtype.itemsize)

    def mark(self, stream: int, number: int) -> None:
        """All that the stream was given before is there when the arena says this number."""
        # Pairs with Arena.has_landed(): the driver puts a system-wide barrier before this write.
        self._gpu.write(stream, self._word, number)

    def close(self) -> None:
        """Nothing that the GPU was given may be on its way any more."""
        self._undo.close()
