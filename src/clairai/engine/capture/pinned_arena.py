"""The staging arena as tensors that a GPU can write to.

Memory that the driver has registered is page-locked, whoever allocated it: a copy with
non_blocking is one cudaMemcpyAsync (aten/src/ATen/native/cuda/Copy.cu copy_kernel_cuda), which does
not wait for page-locked memory. torch only asks its own pinned allocator about it.

Runs in: the worker.
"""

from __future__ import annotations

import contextlib

import torch

from clairai.capture.staging_arena import COPIED_WORD, StagingArena
from clairai.local.gpu_memory import Gpu
from clairai.ring.layout import WORD_BYTES


class PinnedArena:
    """Typed views of the arena, and the GPU's way to say what it has copied."""

    def __init__(self, arena: StagingArena, device: torch.device) -> None:
        self._bytes = torch.from_numpy(arena.memory)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._undo = contextlib.ExitStack()
        self._copied_word = 0  # the GPU's address of it
        if device.type == "cuda":
            self._map(arena, device)

    def _map(self, arena: StagingArena, device: torch.device) -> None:
        gpu = self._gpu = Gpu(device.index or 0)
        address = arena.whole.ctypes.data
        self._copied_word = gpu.map_host(address, arena.whole.nbytes) + COPIED_WORD * WORD_BYTES
        self._undo.callback(gpu.unmap_host, address)

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """One contiguous array, to write to. `start` must be aligned."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        strides = (shape[1], 1) if len(shape) > 1 else (1,)
        return typed.as_strided(shape, strides, start // dtype.itemsize)

    def mark_copied(self, stream: int, number: int) -> None:
        """Have the GPU write this number to the arena after all earlier work of the stream."""
        # Pairs with StagingArena.is_copied(): the driver puts a system-wide barrier before it.
        self._gpu.write(stream, self._copied_word, number)

    def close(self) -> None:
        """The GPU must have finished all its work on the arena."""
        self._undo.close()
