"""Takes buffers and manifests; gives torch tensors in them, and checksums of memory on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from clairai.ring.cuda import DeviceMemory
from clairai.weights import checksum as words
from clairai.weights.buffers import HostLanded, Landed
from clairai.weights.manifest import Tensor

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
CHUNK_WORDS: Final = 1 << 21  # at once: temporaries of 16 MiB, which vLLM's budget does not know


class DeviceLanded:
    """A buffer of another process on this GPU."""

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        self._memory = memory
        self.extent = memory.extent
        self.bytes_N = device_bytes(memory, device)

    def checksum(self, offset: int, nbytes: int) -> str:
        return checksum(self.bytes_N[offset : offset + nbytes])

    def close(self) -> None:
        self.bytes_N = self.bytes_N[:0].clone()  # ours: nothing points at the mapping any more
        self._memory.close()


class _Span:
    """Memory of the driver's, in the form that torch reads without a copy."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory  # lives as long as a tensor does
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def device_bytes(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """All of it as bytes, in place."""
    return torch.as_tensor(_Span(memory), device=device)


def placed(tensors: Sequence[Tensor], buffers: Sequence[Landed]) -> Iterator[tuple[str, Any]]:
    """Each tensor in its buffer, by name; nothing is copied."""
    whole = [_bytes_of(buffer) for buffer in buffers]
    for tensor in tensors:
        bytes_N = whole[tensor.buffer][tensor.offset : tensor.offset + tensor.nbytes]
        yield tensor.name, bytes_N.view(DTYPES[tensor.dtype]).view(tensor.shape)


def _bytes_of(buffer: Landed) -> torch.Tensor:
    if isinstance(buffer, HostLanded):
        return torch.frombuffer(buffer.view, dtype=torch.uint8)
    assert isinstance(buffer, DeviceLanded)
    return buffer.bytes_N


def checksum(bytes_N: torch.Tensor) -> str:
    """The same number as checksum.checksum() of the same bytes, wherever they lie."""
    nbytes = len(bytes_N)
    count = nbytes // words.WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=bytes_N.device)
    words_N = bytes_N[: count * words.WORD_BYTES].view(torch.int64)
    for start in range(0, count, CHUNK_WORDS):
        total += _mixed(words_N[start : start + CHUNK_WORDS], start).sum()
    if tail := nbytes % words.WORD_BYTES:
        last = torch.zeros(words.WORD_BYTES, dtype=torch.uint8, device=bytes_N.device)
        last[:tail] = bytes_N[nbytes - tail :]
        total += _mixed(last.view(torch.int64), count).sum()
    return words.finish(int(total), nbytes)  # waits for the device, once


def _mixed(words_N: torch.Tensor, first: int) -> torch.Tensor:
    """int64 wraps as uint64 does; only its right shift drags the sign along."""
    places = torch.arange(len(words_N), dtype=torch.int64, device=words_N.device)
    x = places.mul_(_signed(words.PLACE)).add_(_signed(first * words.PLACE & words.MASK))
    x += words_N
    x ^= (x >> words.SHIFTS[0]) & ((1 << (64 - words.SHIFTS[0])) - 1)
    x *= _signed(words.MIX)
    x ^= (x >> words.SHIFTS[1]) & ((1 << (64 - words.SHIFTS[1])) - 1)
    return x


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
