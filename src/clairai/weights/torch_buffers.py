"""Takes buffers and manifests; gives torch tensors in them."""

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
    """A buffer of another process on this GPU, read on a stream that waits for no forward."""

    def __init__(self, block: DeviceBlock, stream: torch.cuda.Stream) -> None:
        self._block, self._stream = block, stream
        self.extent = block.extent
        self.bytes_N = device_bytes(block, stream.device)

    def checksums(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        with torch.cuda.stream(self._stream):
            return device_checksum.checksums([tensor_bytes(self.bytes_N, each) for each in tensors])

    def close(self) -> None:
        torch.cuda.synchronize(self._stream.device)  # a load that failed may still be reading
        self.bytes_N = self.bytes_N[:0].clone()  # ours: nothing points at the mapping any more
        self._block.close()


class _CudaArray:
    """Memory of the driver's, in the form that torch reads without a copy."""

    def __init__(self, block: DeviceBlock) -> None:
        self._block = block  # lives as long as a tensor does
        self.__cuda_array_interface__ = {
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


def device_bytes(block: DeviceBlock, device: torch.device) -> torch.Tensor:
    """All of it as bytes, in place."""
    return torch.as_tensor(_CudaArray(block), device=device)


def pinned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Host memory that a GPU fetches from by itself."""
    pages_N: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pages_N


def tensor_views(
    tensors: Sequence[PlannedTensor], buffers: Sequence[ReceivedBuffer]
) -> Iterator[tuple[str, Any]]:
    """Each tensor in its buffer, by name; nothing is copied."""
    whole = [_buffer_bytes(buffer) for buffer in buffers]
    for tensor in tensors:
        bytes_N = tensor_bytes(whole[tensor.buffer], tensor)
        yield tensor.name, bytes_N.view(DTYPES[tensor.dtype]).view(tensor.shape)


def tensor_bytes(bytes_N: torch.Tensor, tensor: PlannedTensor) -> torch.Tensor:
    """The bytes of one tensor in its buffer's."""
    return bytes_N[tensor.offset : tensor.offset + tensor.nbytes]


def _buffer_bytes(buffer: ReceivedBuffer) -> torch.Tensor:
    if isinstance(buffer, ReceivedHostBuffer):
        return torch.frombuffer(buffer.view, dtype=torch.uint8)
    if isinstance(buffer, CopiedBuffer):
        return torch.from_numpy(buffer.bytes_N)
    assert isinstance(buffer, ReceivedDeviceBuffer)
    return buffer.bytes_N
