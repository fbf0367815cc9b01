"""Turn a trainer's tensors into the full buffers of a plan, in host or in GPU memory.

Runs in: the trainer. A tensor is read when its buffer is packed, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import torch

from clairai.errors import RingError, WeightsError, quote
from clairai.local.gpu_memory import DeviceBlock
from clairai.local.shared_buffer import SharedBuffer
from clairai.weights import checkpoint, device_checksum, torch_buffers
from clairai.weights.check_manifest import tensor_nbytes
from clairai.weights.checksum import copy_and_checksum
from clairai.weights.host_buffers import HostBuffer
from clairai.weights.manifest import ALIGNMENT, GRANULE_BYTES, Manifest, PlannedTensor, round_up
from clairai.weights.torch_buffers import DTYPE_NAMES

HOST_BUFFER_BYTES: Final = 128 << 20  # one is packed while the engine reads the one before
MIN_BUFFER_BYTES: Final = 8 << 20  # where there is no room for more; a larger tensor has its own
# A GPU fills a buffer faster than one can be allocated, offered and opened. 16 GB on an H200,
# without vLLM's loading: 57 ms with 512 MiB, 44 with 1 GiB, 41 with 2, 38 with 4 or with a single
# buffer. Not larger, because a trainer with sharded weights gathers a whole buffer at once.
DEVICE_BUFFER_BYTES: Final = 2 << 30
CPU_DEVICE: Final = torch.device("cpu")
NamedTensors: TypeAlias = Any  # a module, a mapping of tensors, pairs, or a folder of safetensors


class TensorSpec(NamedTuple):
    """What a tensor is, without its numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def plan_buffers(
    specs: Iterable[TensorSpec],
    *,
    transfer: str,
    epoch: str,
    device: str | tuple[str, ...],
    label: str = "",
    buffer_bytes: int = HOST_BUFFER_BYTES,
) -> Manifest:
    """Place tensors one after the other; a full buffer is followed by a new one.

    A tensor that is larger than `buffer_bytes` gets a buffer of its own. `device` is where the
    buffers are: the UUID of a GPU, one for each rank of an engine that has several, or `cpu`.
    """
    tensors: list[PlannedTensor] = []
    buffers: list[int] = []
    end = 0
    for name, dtype, shape in specs:
        nbytes = tensor_nbytes(shape, dtype)
        start = round_up(end, ALIGNMENT)
        if not buffers or (end and start + nbytes > buffer_bytes):
            buffers.append(0)
            start = 0
        end = start + nbytes
        buffers[-1] = round_up(max(end, 1), GRANULE_BYTES)
        index = len(buffers) - 1
        tensors.append(
            PlannedTensor(name, dtype, shape, index, start, nbytes)  # type: ignore[arg-type]
        )
    return Manifest(
        version=1,
        transfer=transfer,
        epoch=epoch,
        device=device,
        buffers=tuple(buffers),
        tensors=tuple(tensors),
        label=label,
    )


class TensorSource(NamedTuple):
    """One tensor to send: what it is, where it is, and how to read it."""

    spec: TensorSpec
    device: torch.device
    read: Callable[[], torch.Tensor]
    is_whole: bool = True  # any thread may read it; a shard is gathered by the sending thread


def open_sources(named: NamedTensors, opened: ExitStack) -> list[TensorSource]:
    """List what is to be sent; files stay open until `opened` is closed."""
    if isinstance(named, str | Path):
        return _sources_of_folder(Path(named), opened)
    pairs = _named_pairs(named)
    return [_source_of_tensor(name, tensor) for name, tensor in pairs]


def is_read_once(named: NamedTensors) -> bool:
    """True for an iterator: its tensors may exist only until the next one is asked for."""
    return isinstance(named, Iterator)


def read_parts(pairs: Iterator[tuple[str, Any]], buffer_bytes: int) -> Iterator[list[TensorSource]]:
    """Copy an iterator's tensors, a buffer's worth at a time: the next may use their memory.

    FSDP shards are gathered as they come, by the thread that asks.
    """
    part: list[TensorSource] = []
    nbytes = 0
    for name, tensor in pairs:
        copy = _gather(tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor))
        part.append(_source_of_tensor(name, copy.clone(memory_format=torch.contiguous_format)))
        nbytes += copy.nbytes
        if nbytes >= buffer_bytes:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _named_pairs(named: Any) -> Iterable[tuple[str, Any]]:
    pairs: Iterable[tuple[str, Any]] = named
    if isinstance(named, torch.nn.Module):
        pairs = named.named_parameters()
    elif isinstance(named, Mapping):
        pairs = named.items()
    return pairs


def _source_of_tensor(name: str, tensor: Any) -> TensorSource:
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.as_tensor(tensor)
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise WeightsError(f"{quote(name)} is a {tensor.dtype} {tensor.layout}; send dense numbers")
    spec = TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    is_whole = not hasattr(tensor, "full_tensor")
    return TensorSource(spec, tensor.device, partial(_gather, tensor), is_whole)


def _gather(tensor: Any) -> torch.Tensor:
    """Gather an FSDP shard; other tensors are whole already."""
    gather = getattr(tensor, "full_tensor", None)
    whole: torch.Tensor = gather() if callable(gather) else tensor
    return whole.detach()


def _sources_of_folder(folder: Path, opened: ExitStack) -> list[TensorSource]:
    from safetensors import SafetensorError, safe_open

    specs = [TensorSpec(*each) for each in checkpoint.list_tensors(folder)]
    holders: dict[str, Any] = {}
    for file in checkpoint.weight_files(folder):
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except SafetensorError as error:
            raise WeightsError(f"{file.name}: {error}; copy it again") from None
        holders |= dict.fromkeys(handle.keys(), handle)
    return [
        TensorSource(spec, CPU_DEVICE, partial(holders[spec.name].get_tensor, spec.name))
        for spec in specs
    ]


class PackedBuffer(NamedTuple):
    """A full buffer in host memory, and its tensors with their checksums."""

    tensors: tuple[PlannedTensor, ...]
    home: Literal["host", "copied"]  # sealed, or in the sender's reused memory
    fds: tuple[int, ...]
    close: Callable[[], None]


class HostPacker:
    """Fills the buffers of one plan in host memory."""

    def __init__(
        self,
        sources: Sequence[TensorSource],
        plan: Manifest,
        reused: SharedBuffer | None = None,
    ) -> None:
        """A plan of one small buffer may be packed into memory that was `reused` before."""
        self._reused = reused
        self._sources = {source.spec.name: source for source in sources}
        self._sizes = plan.buffers
        self._tensors = _by_buffer(plan)

    def pack(self, index: int) -> PackedBuffer:
        tensors, nbytes = self._tensors[index], self._sizes[index]
        if self._reused is not None:
            packed = self._fill(self._reused.view(nbytes).data, tensors)
            return PackedBuffer(packed, "copied", self._reused.fds, _keep)
        buffer = HostBuffer(nbytes)
        try:
            with buffer.view as view:  # no view may be held when the memory is sealed
                packed = self._fill(view, tensors)
            buffer.seal()
        except BaseException:
            buffer.close()
            raise
        return PackedBuffer(packed, "host", buffer.fds, buffer.close)

    def _fill(
        self, target: memoryview, tensors: tuple[PlannedTensor, ...]
    ) -> tuple[PlannedTensor, ...]:
        checksums = []
        for tensor in tensors:
            source_N = _flat_bytes(_read(self._sources, tensor)).cpu().numpy()
            with target[tensor.offset : tensor.offset + tensor.nbytes] as place:
                checksums.append(copy_and_checksum(place, source_N.data))
        return _with_checksums(tensors, checksums)


def _keep() -> None:
    """Reused memory is not freed."""


class FillingBuffer(NamedTuple):
    """A GPU buffer that is being filled: another process may open it, and read it once full."""

    handle: bytes
    finish: Callable[[], tuple[PlannedTensor, ...]]  # waits; the tensors with their checksums


class DevicePacker:
    """Fills the buffers of one plan in GPU memory, copying and summing in one pass.

    A thread allocates ahead. All memory is kept until `close`.
    """

    def __init__(
        self, sources: Sequence[TensorSource], plan: Manifest, device: torch.device
    ) -> None:
        self._sources = {source.spec.name: source for source in sources}
        self._device = device
        torch.cuda.synchronize(device)  # whatever stream the trainer's last step wrote on
        self._tensors = _by_buffer(plan)
        self._thread = ThreadPoolExecutor(1)
        self._blocks = [self._thread.submit(_allocate, size, device) for size in plan.buffers]

    def read(self, index: int) -> list[torch.Tensor]:
        """Read the tensors of a buffer."""
        return [_read(self._sources, tensor) for tensor in self._tensors[index]]

    def begin(self, index: int, given: Sequence[torch.Tensor] | None = None) -> FillingBuffer:
        """Start to fill a buffer; the tensors that are read must not change until it is full.

        `given` are the tensors, if they have been read for another GPU already.
        """
        tensors, block = self._tensors[index], self._blocks[index].result()
        bytes_N = torch_buffers.device_bytes(block, self._device)
        targets = [torch_buffers.tensor_bytes(bytes_N, tensor) for tensor in tensors]
        with torch.cuda.device(self._device):
            found = self.read(index) if given is None else given
            spans = [_flat_bytes(each.to(self._device)) for each in found]
            wait = device_checksum.begin_copy_and_checksum(spans, targets)
        return FillingBuffer(block.handle, partial(self._finish, tensors, wait))

    def _finish(
        self, tensors: tuple[PlannedTensor, ...], wait: Callable[[], list[str]]
    ) -> tuple[PlannedTensor, ...]:
        with torch.cuda.device(self._device):
            return _with_checksums(tensors, wait())

    def close(self) -> None:
        """Free all memory; no other process may read it any more."""
        self._thread.shutdown(cancel_futures=True)
        for block in self._blocks:
            if not block.cancelled() and block.exception() is None:
                block.result().close()


def _allocate(nbytes: int, device: torch.device) -> DeviceBlock:
    try:
        return DeviceBlock.create(nbytes, device.index)
    except RingError as error:
        raise WeightsError(
            f"no {nbytes} bytes more on {device} ({error.reason}); free some: while they are sent, "
            f"weights take their room twice"
        ) from error


def _by_buffer(plan: Manifest) -> list[tuple[PlannedTensor, ...]]:
    return [tuple(group) for _, group in groupby(plan.tensors, lambda tensor: tensor.buffer)]


def _read(sources: Mapping[str, TensorSource], planned: PlannedTensor) -> torch.Tensor:
    """Read a tensor; WeightsError if it is no longer what was planned."""
    tensor = sources[planned.name].read()
    found = TensorSpec(planned.name, DTYPE_NAMES.get(tensor.dtype, ""), tuple(tensor.shape))
    if found != (planned.name, planned.dtype, planned.shape):
        raise WeightsError(
            f"{quote(planned.name)} was {planned.dtype} {list(planned.shape)} when it was planned "
            f"and is {found.dtype} {list(found.shape)} now; do not change it while it is sent"
        )
    return tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _with_checksums(
    tensors: tuple[PlannedTensor, ...], checksums: Sequence[str]
) -> tuple[PlannedTensor, ...]:
    return tuple(
        msgspec.structs.replace(tensor, checksum=checksum)
        for tensor, checksum in zip(tensors, checksums, strict=True)
    )
