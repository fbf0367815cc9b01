"""Takes buffers and manifests; gives torch tensors in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clairai.ring.cuda import DeviceBlock
from clairai.weights import device_sums
from clairai.weights.buffers import HostLanded, Landed
from clairai.weights.manifest import Tensor
from clairai.weights.shelf import Copied

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
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class DeviceLanded:
    """A buffer of another process on this GPU, read on a stream that waits for no forward."""

    def __init__(self, block: DeviceBlock, stream: torch.cuda.Stream) -> None:
        self._block, self._stream = block, stream
        self.extent = block.extent
        self.bytes_N = device_bytes(block, stream.device)

    def checksums(self, tensors: Sequence[Tensor]) -> list[str]:
        with torch.cuda.stream(self._stream):
            return device_sums.checksums([span(self.bytes_N, each) for each in tensors])

    def close(self) -> None:
        torch.cuda.synchronize(self._stream.device)  # a load that failed may still be reading
        self.bytes_N = self.bytes_N[:0].clone()  # ours: nothing points at the mapping any more
        self._block.close()


class _Span:
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
    return torch.as_tensor(_Span(block), device=device)


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Host memory that a GPU fetches from by itself."""
    pages_N: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pages_N


def placed(tensors: Sequence[Tensor], buffers: Sequence[Landed]) -> Iterator[tuple[str, Any]]:
    """Each tensor in its buffer, by name; nothing is copied."""
    whole = [_bytes_of(buffer) for buffer in buffers]
    for tensor in tensors:
        bytes_N = span(whole[tensor.buffer], tensor)
        yield tensor.name, bytes_N.view(DTYPES[tensor.dtype]).view(tensor.shape)


def span(bytes_N: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The bytes of one tensor in its buffer's."""
    return bytes_N[tensor.offset : tensor.offset + tensor.nbytes]


def _bytes_of(buffer: Landed) -> torch.Tensor:
    if isinstance(buffer, HostLanded):
        return torch.frombuffer(buffer.view, dtype=torch.uint8)
    if isinstance(buffer, Copied):
        return torch.from_numpy(buffer.bytes_N)
    assert isinstance(buffer, DeviceLanded)
    return buffer.bytes_N
