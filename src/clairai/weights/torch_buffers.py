"""Torch views of the tensors in received buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.local.gpu_memory import DeviceBlock
from clairai.weights import device_checksum
from clairai.weights.host_buffers import CopiedBuffer, ReceivedBuffer, ReceivedHostBuffer
from clairai.weights.manifest import PlannedTensor

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class ReceivedDeviceBuffer:
    """Another process's buffer on this GPU, read on a stream that waits for no forward pass."""

    def __init__(self, block: DeviceBlock, stream: torch.cuda.Stream) -> None:
        self._block, self._stream = block, stream
        self.extent = block.extent
        self.bytes_N = device_bytes(block, stream.device)

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        with torch.cuda.stream(self._stream):
            return device_checksum.checksums([tensor_bytes(self.bytes_N, each) for each in tensors])

    def close(self) -> None:
        torch.cuda.synchronize(self._stream.device)  # a failed load may still be reading
        self.bytes_N = self.bytes_N[:0].clone()  # our own memory: nothing points at the mapping now
        self._block.close()


class _CudaArray:
    """Driver memory in the form that torch wraps without a copy."""

    def __init__(self, block: DeviceBlock) -> None:
        self._block = block  # kept alive by every tensor of it
        self.__cuda_array_interface__ = {
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


def device_bytes(block: DeviceBlock, device: torch.device) -> torch.Tensor:
    """The whole block as bytes, without a copy."""
    return torch.as_tensor(_CudaArray(block), device=device)


def pinned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Allocate pinned host memory."""
    pages_N: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pages_N


def tensor_views(
    tensors: Sequence[PlannedTensor], buffers: Sequence[ReceivedBuffer]
) -> Iterator[tuple[str, Any]]:
    """Yield each tensor by name, as a view of its buffer."""
    whole = [_buffer_bytes(buffer) for buffer in buffers]
    for tensor in tensors:
        bytes_N = tensor_bytes(whole[tensor.buffer], tensor)
        yield tensor.name, bytes_N.view(DTYPES[tensor.dtype]).view(tensor.shape)


def tensor_bytes(bytes_N: torch.Tensor, tensor: PlannedTensor) -> torch.Tensor:
    """The bytes of one tensor in its buffer."""
    return bytes_N[tensor.offset : tensor.offset + tensor.nbytes]


def _buffer_bytes(buffer: ReceivedBuffer) -> torch.Tensor:
    if isinstance(buffer, ReceivedHostBuffer):
        return torch.frombuffer(buffer.view, dtype=torch.uint8)
    if isinstance(buffer, CopiedBuffer):
        return torch.from_numpy(buffer.bytes_N)
    assert isinstance(buffer, ReceivedDeviceBuffer)
    return buffer.bytes_N
