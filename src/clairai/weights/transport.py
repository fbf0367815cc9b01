"""Takes packed buffers; gives them to an engine: over its own socket, or as files over HTTP."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

import torch

from clairai.errors import EngineGoneError, WeightsError
from clairai.library.http_client import ServerClient
from clairai.local.gpu_memory import Gpu
from clairai.local.private_socket import runtime_dir as meeting_folder
from clairai.points import quote
from clairai.weights.manifest import CPU, Manifest, PlannedTensor
from clairai.weights.pack import (
    CPU_DEVICE,
    DevicePacker,
    FillingBuffer,
    HostPacker,
    PackedBuffer,
    TensorSource,
)
from clairai.weights.socket_client import BufferClient, has_socket
from clairai.weights.upload import safetensors_header
from clairai.wire.weights_messages import BufferFilled, BufferHome, BufferOffer, WeightsState

PIECE_BYTES: Final = 1 << 20


class Transport(Protocol):
    """How buffers come to an engine; on return of close() it reads none of them any more."""

    def carry(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        """Returns once the engine has read it."""

    def close(self) -> None: ...


class SocketTransport:
    """On the engine's machine: what travels is a descriptor, or a handle."""

    def __init__(self, port: BufferClient) -> None:
        self._port = port

    def carry(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        self._port.offer(_make_offer(plan, index, packed.home, b""), packed.fds)

    def show(self, plan: Manifest, index: int, handle: bytes) -> None:
        """A buffer of a GPU that is being filled; does not wait, nor say what goes wrong."""
        self._port.offer_early(_make_offer(plan, index, "device", handle))

    def full(self, plan: Manifest, index: int) -> None:
        """That one is filled; returns once the engine has read it."""
        self._port.finish(BufferFilled(plan.transfer, index), plan.buffers[index])

    def close(self) -> None:
        self._port.close()


class HttpTransport:
    """From anywhere: what travels is the numbers, a safetensors file for each buffer."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server

    def carry(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        first = safetensors_header(packed.tensors)
        nbytes = len(first) + sum(tensor.nbytes for tensor in packed.tensors)
        body = _file_pieces(first, packed, plan.buffers[index])
        self._server.put_weights(plan.transfer, index, body, nbytes)

    def close(self) -> None:
        """Nothing of ours is read: the server has its own copy."""


def _make_offer(plan: Manifest, index: int, home: BufferHome, handle: bytes) -> BufferOffer:
    return BufferOffer(plan.transfer, index, plan.buffers[index], home, handle)


def _file_pieces(first: bytes, packed: PackedBuffer, nbytes: int) -> Iterator[bytes]:
    yield first
    with closing(mmap.mmap(packed.fds[0], nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)) as pages:
        for tensor in packed.tensors:
            end = tensor.offset + tensor.nbytes
            for start in range(tensor.offset, end, PIECE_BYTES):
                yield pages[start : min(start + PIECE_BYTES, end)]


# MERGED
# Takes where tensors are and where the engine is; gives the way between them, and says why that.
#
# By the GPU's own memory where both are on it, through the host's where they share a machine, and
# over HTTP where they share neither; `through` asks for one of them, and is refused if it cannot
# be.


TransportKind = Literal["device", "host", "http"]
TransportChoice = Literal["auto", "device", "host", "http"]
_REQUESTED: Final = "it was asked for"
_SAME_PROCESS: Final = "the engine is in this process, and CUDA opens no handle where it was made"


@dataclass(frozen=True)
class ChosenTransport:
    """One way to one engine."""

    home: TransportKind
    why: str
    device: torch.device  # where buffers are packed
    carrier: Transport


@dataclass(frozen=True)
class TransportChooser:
    """`server` is None where the engine is reached by Python, and so on this machine."""

    server: ServerClient | None
    runtime_dir: str | None
    through: TransportChoice

    def __post_init__(self) -> None:
        if self.through not in get_args(TransportChoice):
            ways = ", ".join(get_args(TransportChoice))
            raise WeightsError(f"through is {quote(self.through)}; give one of {ways}")
        if self.through == "http" and self.server is None:
            raise WeightsError("through http needs the address of a server; give one")

    def route(self, found: Sequence[TensorSource], state: WeightsState) -> ChosenTransport:
        """Its carrier is open."""
        if self.through == "http":
            return self._over_http(_REQUESTED)
        try:
            return self.by_socket(found, state)
        except EngineGoneError as error:
            if self.server is None or self.through != "auto":
                raise
            return self._over_http(f"the engine's socket is not here: {error.reason}")

    def by_socket(self, found: Sequence[TensorSource], state: WeightsState) -> ChosenTransport:
        """EngineGoneError if no engine of this epoch answers there."""
        port = BufferClient(meeting_folder(self.runtime_dir), state.epoch)
        try:
            return self._over_socket(port, found, state.device)
        except BaseException:
            port.close()
            raise

    def lending(self, found: Sequence[TensorSource], state: WeightsState) -> str | None:
        """Why the host's memory is the way, if the engine may copy it from this process."""
        if self.server is not None or self.through not in ("auto", "host"):
            return None
        if not has_socket(meeting_folder(self.runtime_dir), state.epoch):
            return None
        if self.through == "host":
            return _REQUESTED
        device, why = choose_memory(found, state.device)
        return why if device == CPU_DEVICE else None

    def _over_http(self, why: str) -> ChosenTransport:
        assert self.server is not None
        return ChosenTransport("http", why, CPU_DEVICE, HttpTransport(self.server))

    def _over_socket(
        self, port: BufferClient, found: Sequence[TensorSource], engine: str
    ) -> ChosenTransport:
        if self.through == "host":
            return ChosenTransport("host", _REQUESTED, CPU_DEVICE, SocketTransport(port))
        device, why = choose_memory(found, engine)
        if device != CPU_DEVICE and port.is_same_process:
            device, why = CPU_DEVICE, _SAME_PROCESS
        if self.through == "device" and device == CPU_DEVICE:
            raise WeightsError(
                f"nothing can go by the GPU's memory: {why}; leave `through` out, or say host"
            )
        return ChosenTransport(
            "host" if device == CPU_DEVICE else "device", why, device, SocketTransport(port)
        )


def choose_memory(found: Sequence[TensorSource], engine: str) -> tuple[torch.device, str]:
    """The engine's GPU if a tensor is there, else the host's memory, which all can reach; and why.

    What else comes along (a probe, a vector) is copied to that GPU: it is less than the model.
    """
    if engine == CPU:
        return CPU_DEVICE, "the engine has no GPU"
    devices = {item.device for item in found if item.device.type == "cuda"}
    uuids = {device: Gpu(device.index).uuid for device in devices}
    for device, uuid in uuids.items():
        if uuid == engine:
            return device, "the tensors are on the engine's own GPU"
    if not uuids:
        return CPU_DEVICE, "the tensors are in host memory"
    return CPU_DEVICE, f"the tensors are on GPU {min(uuids.values())}, the engine is on {engine}"


# MERGED
# Takes a packer and a carrier; gives an engine the buffers of a plan, one while the next is made.
#
# Whatever goes wrong is raised, and what the engine has been given stays until its sender is
# closed.


THREAD_BYTES: Final = 4 << 20  # of less, a thread takes longer than it saves
Progress = Callable[[int, int], None]
SendPlan = Callable[[], None]


class Pipeline(Protocol):
    """One plan, on its way."""

    def over(self, announce: SendPlan) -> tuple[PlannedTensor, ...]:
        """All of it, once the engine has been told; its tensors, with their checksums."""


@dataclass(frozen=True)
class HostPipeline:
    """Each buffer is carried on a thread while the next is packed."""

    packer: HostPacker
    is_whole: bool  # any thread may read what is packed
    plan: Manifest
    carrier: Transport
    buffers: ExitStack
    progress: Progress

    def over(self, announce: SendPlan) -> tuple[PlannedTensor, ...]:
        first = self.plan.buffers[0]
        if len(self.plan.buffers) > 1 or (self.is_whole and first >= THREAD_BYTES):
            return self._at_once(announce)
        announce()
        packed = self._packed(0)
        self._carry(0, packed)
        self.progress(first, first)
        return packed.tensors

    def _at_once(self, announce: SendPlan) -> tuple[PlannedTensor, ...]:
        """What is whole is packed while the engine is told; one is carried, the next is packed."""
        tensors: list[PlannedTensor] = []
        with ThreadPoolExecutor(1) as thread:
            early = thread.submit(self._packed, 0) if self.is_whole else None
            announce()
            before: Future[None] | None = None
            for index in range(len(self.plan.buffers)):
                packed = early.result() if early and index == 0 else self._packed(index)
                if before is not None:
                    before.result()
                before = thread.submit(self._carry, index, packed)
                tensors += packed.tensors
                _report_progress(self.progress, self.plan, index)
            assert before is not None
            before.result()
        return tuple(tensors)

    def _packed(self, index: int) -> PackedBuffer:
        packed = self.packer.pack(index)
        self.buffers.callback(packed.close)
        return packed

    def _carry(self, index: int, packed: PackedBuffer) -> None:
        self.carrier.carry(self.plan, index, packed)
        packed.close()  # the engine has the pages, or the server a copy


@dataclass(frozen=True)
class DevicePipeline:
    """The engine opens a buffer while it is filled, and reads it while the next one is."""

    packer: DevicePacker
    is_whole: bool  # two buffers' tensors are there at once, whatever we do
    plan: Manifest
    carrier: SocketTransport
    progress: Progress

    def over(self, announce: SendPlan) -> tuple[PlannedTensor, ...]:
        first = self.packer.begin(0) if self.is_whole else None  # while the engine is told
        announce()
        tensors: list[PlannedTensor] = []
        ahead = 1 if self.is_whole else 0  # the GPU has the next to do while we wait for one
        with ThreadPoolExecutor(1) as thread:
            under_way, reading = deque[tuple[int, FillingBuffer]](), list[Future[None]]()
            for index in range(len(self.plan.buffers)):
                begun = first if first is not None and index == 0 else self.packer.begin(index)
                self.carrier.show(self.plan, index, begun.handle)
                under_way.append((index, begun))
                if len(under_way) > ahead:
                    tensors += self._full(*under_way.popleft(), thread, reading)
            for each in under_way:
                tensors += self._full(*each, thread, reading)
            for read in reading:
                read.result()
        return tuple(tensors)

    def _full(
        self,
        index: int,
        begun: FillingBuffer,
        thread: ThreadPoolExecutor,
        reading: list[Future[None]],
    ) -> tuple[PlannedTensor, ...]:
        """Wait until it is filled; then the engine reads it, while we go on."""
        tensors = begun.finish()
        reading.append(thread.submit(self.carrier.full, self.plan, index))
        for each in reading:
            if each.done():
                each.result()  # what was refused is known before the last buffer is filled
        _report_progress(self.progress, self.plan, index)
        return tensors


def _report_progress(progress: Progress, plan: Manifest, index: int) -> None:
    progress(sum(plan.buffers[: index + 1]), sum(plan.buffers))
