"""How the buffers of a transfer reach the engine, and how that way is chosen.

| transport | when | what is passed on |
|---|---|---|
| device | sender and engine use the same GPU | a CUDA IPC handle |
| host | they share a machine | the descriptor of a memfd |
| http | they share neither | the numbers, as safetensors files |

Runs in: the trainer. Each transport packs a buffer while the engine reads the one before.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Protocol, get_args

import torch

from clairai.errors import EngineGoneError, WeightsError, quote
from clairai.library.http_client import ServerClient
from clairai.local.gpu_memory import Gpu
from clairai.local.private_socket import runtime_dir
from clairai.local.shared_buffer import SharedBuffer
from clairai.weights.manifest import CPU, Manifest, PlannedTensor, kind_of
from clairai.weights.pack import (
    CPU_DEVICE,
    DevicePacker,
    FillingBuffer,
    HostPacker,
    PackedBuffer,
    TensorSource,
)
from clairai.weights.room import require_sender_room
from clairai.weights.socket_client import (
    BufferClient,
    BufferTaker,
    RankClients,
    connect_ranks,
    has_socket,
)
from clairai.weights.upload import safetensors_header
from clairai.wire.weights_messages import BufferFilled, BufferOffer, WeightsState

TransportKind = Literal["device", "host", "http"]
TransportChoice = Literal["auto", "device", "host", "http"]
PIECE_BYTES: Final = 1 << 20
MIN_THREAD_BYTES: Final = 4 << 20  # below this, starting a thread takes longer than it saves
_FillingBuffers = dict[torch.device, FillingBuffer]  # of one buffer of the plan, by GPU
_REQUESTED: Final = "it was asked for"
_SAME_PROCESS: Final = "the engine is in this process, and CUDA opens no handle where it was made"


@dataclass(frozen=True)
class Job:
    """One plan, the tensors it places, and whom to tell."""

    sources: Sequence[TensorSource]
    plan: Manifest
    send_plan: Callable[[], None]  # tells the engine of the plan; the first buffer may be ready
    progress: Callable[[int, int], None]  # bytes done, bytes in all

    @property
    def is_whole(self) -> bool:
        """False if a tensor is sharded: the sending thread gathers it, one buffer at a time."""
        return all(source.is_whole for source in self.sources)

    def report(self, index: int) -> None:
        self.progress(sum(self.plan.buffers[: index + 1]), sum(self.plan.buffers))


class Transport(Protocol):
    """One way to one engine. An error leaves buffers with the engine until `close`."""

    @property
    def kind(self) -> TransportKind: ...

    @property
    def reason(self) -> str:
        """Why this transport was chosen."""

    def send(self, job: Job) -> tuple[PlannedTensor, ...]:
        """Deliver all buffers; return the tensors with their checksums."""

    def pack(self, sources: Sequence[TensorSource], plan: Manifest) -> tuple[PlannedTensor, ...]:
        """Pack a part of a transfer now, for `deliver`; the tensors with their checksums."""

    def deliver(self, plan: Manifest, progress: Callable[[int, int], None]) -> None:
        """Deliver all that was packed: together it is the plan, which the engine has accepted."""

    def close(self) -> None:
        """Hang up, wait until the engine reads no buffer any more, then free them."""


class _HostTransport(ABC):
    """Packs buffers in host memory; one is delivered on a thread while the next is packed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self._buffers = ExitStack()
        self._packed: list[PackedBuffer] = []

    def pack(self, sources: Sequence[TensorSource], plan: Manifest) -> tuple[PlannedTensor, ...]:
        packer = HostPacker(sources, plan)
        packed = [self._pack(packer, index) for index in range(len(plan.buffers))]
        self._packed += packed
        return tuple(tensor for buffer in packed for tensor in buffer.tensors)

    def deliver(self, plan: Manifest, progress: Callable[[int, int], None]) -> None:
        for index, packed in enumerate(self._packed):
            tensors = tuple(tensor for tensor in plan.tensors if tensor.buffer == index)
            self._deliver_and_close(plan, index, packed._replace(tensors=tensors))
            progress(sum(plan.buffers[: index + 1]), sum(plan.buffers))

    @abstractmethod
    def _deliver(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        """Returns once the engine has read the buffer, or the server has a copy."""

    def send(self, job: Job) -> tuple[PlannedTensor, ...]:
        packer = self._make_packer(job)
        num_buffers, first_nbytes = len(job.plan.buffers), job.plan.buffers[0]
        if num_buffers > 1 or (job.is_whole and first_nbytes >= MIN_THREAD_BYTES):
            return self._send_overlapped(job, packer)
        job.send_plan()
        packed = self._pack(packer, 0)
        self._deliver_and_close(job.plan, 0, packed)
        job.report(0)
        return packed.tensors

    def _send_overlapped(self, job: Job, packer: HostPacker) -> tuple[PlannedTensor, ...]:
        tensors: list[PlannedTensor] = []
        with ThreadPoolExecutor(1) as thread:
            # Whole tensors are packed while the engine checks the plan.
            first = thread.submit(self._pack, packer, 0) if job.is_whole else None
            job.send_plan()
            delivery: Future[None] | None = None
            for index in range(len(job.plan.buffers)):
                packed = first.result() if first and index == 0 else self._pack(packer, index)
                if delivery is not None:
                    delivery.result()
                delivery = thread.submit(self._deliver_and_close, job.plan, index, packed)
                tensors += packed.tensors
                job.report(index)
            assert delivery is not None
            delivery.result()
        return tuple(tensors)

    def _make_packer(self, job: Job) -> HostPacker:
        return HostPacker(job.sources, job.plan)

    def _pack(self, packer: HostPacker, index: int) -> PackedBuffer:
        packed = packer.pack(index)
        self._buffers.callback(packed.close)
        return packed

    def _deliver_and_close(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        self._deliver(plan, index, packed)
        packed.close()

    def close(self) -> None:
        self._buffers.close()


class HostTransport(_HostTransport):
    """Through the sockets of the engine's ranks, as descriptors of host memory that all map."""

    kind: ClassVar[TransportKind] = "host"

    def __init__(self, client: BufferTaker, reason: str) -> None:
        super().__init__(reason)
        self._client = client
        self.reused: SharedBuffer | None = None  # for a plan of one small buffer

    def send(self, job: Job) -> tuple[PlannedTensor, ...]:
        if self.reused is None:
            # The engine keeps all buffers, in this process's account, until it has loaded them.
            require_sender_room(sum(job.plan.buffers))
        return super().send(job)

    def pack(self, sources: Sequence[TensorSource], plan: Manifest) -> tuple[PlannedTensor, ...]:
        require_sender_room(sum(plan.buffers))
        return super().pack(sources, plan)

    def _make_packer(self, job: Job) -> HostPacker:
        return HostPacker(job.sources, job.plan, self.reused)

    def _deliver(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        offer = BufferOffer(plan.transfer, index, plan.buffers[index], packed.home)
        self._client.offer(offer, packed.fds)

    def close(self) -> None:
        self._client.close()
        super().close()


class HttpTransport(_HostTransport):
    """To the API server, one safetensors file for each buffer."""

    kind: ClassVar[TransportKind] = "http"

    def __init__(self, server: ServerClient, reason: str) -> None:
        super().__init__(reason)
        self._server = server

    def _deliver(self, plan: Manifest, index: int, packed: PackedBuffer) -> None:
        header = safetensors_header(packed.tensors)
        nbytes = len(header) + sum(tensor.nbytes for tensor in packed.tensors)
        body = _file_pieces(header, packed, plan.buffers[index])
        self._server.put_weights(plan.transfer, index, body, nbytes)


def _file_pieces(header: bytes, packed: PackedBuffer, nbytes: int) -> Iterator[bytes]:
    yield header
    with closing(mmap.mmap(packed.fds[0], nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)) as pages:
        for tensor in packed.tensors:
            end = tensor.offset + tensor.nbytes
            for start in range(tensor.offset, end, PIECE_BYTES):
                yield pages[start : min(start + PIECE_BYTES, end)]


class DeviceTransport:
    """Through the sockets of the engine's ranks, as handles of memory of each one's own GPU.

    A rank opens a buffer while it is filled, and reads it while the next one is filled.
    """

    kind: ClassVar[TransportKind] = "device"

    def __init__(self, clients: RankClients, devices: Sequence[torch.device], reason: str) -> None:
        """`devices` are the GPUs of the ranks, as this process counts them."""
        self.reason = reason
        self._clients = clients
        self._devices = tuple(devices)
        self._buffers = ExitStack()
        self._packed: list[_FillingBuffers] = []

    def pack(self, sources: Sequence[TensorSource], plan: Manifest) -> tuple[PlannedTensor, ...]:
        packer = _DevicePackers(sources, plan, dict.fromkeys(self._devices))
        self._buffers.callback(packer.close)
        tensors: list[PlannedTensor] = []
        for index in range(len(plan.buffers)):
            buffers = packer.begin(index)
            tensors += _finish_all(buffers)
            self._packed.append(buffers)
        return tuple(tensors)

    def deliver(self, plan: Manifest, progress: Callable[[int, int], None]) -> None:
        for index, buffers in enumerate(self._packed):
            self._offer_early(plan, index, buffers)
            for client in self._clients.clients:
                client.finish(BufferFilled(plan.transfer, index), plan.buffers[index])
            progress(sum(plan.buffers[: index + 1]), sum(plan.buffers))

    def send(self, job: Job) -> tuple[PlannedTensor, ...]:
        packer = _DevicePackers(job.sources, job.plan, dict.fromkeys(self._devices))
        self._buffers.callback(packer.close)
        # Whole tensors of two buffers exist at once anyway: fill the first while the engine checks
        # the plan, and let the GPU fill the next one while this thread waits.
        first = packer.begin(0) if job.is_whole else None
        max_filling = 1 if job.is_whole else 0
        job.send_plan()
        tensors: list[PlannedTensor] = []
        with ExitStack() as threads:
            # One for each rank: it reads its buffers in order, and waits for no other rank.
            waiting = [
                (client, threads.enter_context(ThreadPoolExecutor(1)))
                for client in self._clients.clients
            ]
            filling, reads = deque[tuple[int, _FillingBuffers]](), list[Future[None]]()
            for index in range(len(job.plan.buffers)):
                buffer = first if first is not None and index == 0 else packer.begin(index)
                self._offer_early(job.plan, index, buffer)
                filling.append((index, buffer))
                if len(filling) > max_filling:
                    tensors += self._finish(job, *filling.popleft(), waiting, reads)
            for each in filling:
                tensors += self._finish(job, *each, waiting, reads)
            for read in reads:
                read.result()
        return tuple(tensors)

    def _offer_early(self, plan: Manifest, index: int, buffers: _FillingBuffers) -> None:
        nbytes = plan.buffers[index]
        for client, device in zip(self._clients.clients, self._devices, strict=True):
            handle = buffers[device].handle
            client.offer_early(BufferOffer(plan.transfer, index, nbytes, "device", handle))

    def _finish(
        self,
        job: Job,
        index: int,
        buffers: _FillingBuffers,
        waiting: Sequence[tuple[BufferClient, ThreadPoolExecutor]],
        reads: list[Future[None]],
    ) -> tuple[PlannedTensor, ...]:
        """Wait until the buffer is full; the engine then reads it on other threads' time."""
        tensors = _finish_all(buffers)
        filled, nbytes = BufferFilled(job.plan.transfer, index), job.plan.buffers[index]
        reads += [thread.submit(client.finish, filled, nbytes) for client, thread in waiting]
        for read in reads:
            if read.done():
                read.result()  # a refusal stops the sender before it fills the last buffer
        job.report(index)
        return tensors

    def close(self) -> None:
        self._clients.close()
        self._buffers.close()


def _finish_all(buffers: _FillingBuffers) -> tuple[PlannedTensor, ...]:
    """Wait until a buffer is full on every GPU; its content is the same, and each rank sums it."""
    return [buffer.finish() for buffer in buffers.values()][-1]


class _DevicePackers:
    """Packs the same plan on several GPUs."""

    def __init__(
        self, sources: Sequence[TensorSource], plan: Manifest, devices: Iterable[torch.device]
    ) -> None:
        self._packers: dict[torch.device, DevicePacker] = {}
        try:
            for device in devices:
                self._packers[device] = DevicePacker(sources, plan, device)
        except BaseException:
            self.close()
            raise

    def begin(self, index: int) -> _FillingBuffers:
        """Read each tensor once, whatever the number of GPUs: gathering it is not for free."""
        (first, *others) = self._packers.items()
        given = first[1].read(index)
        return {device: packer.begin(index, given) for device, packer in (first, *others)}

    def close(self) -> None:
        with ExitStack() as closing:
            for packer in self._packers.values():
                closing.callback(packer.close)


@dataclass(frozen=True)
class TransportChooser:
    """Chooses by where tensors and engine are; `through` asks for one, or is refused.

    `server` is None if the engine is reached from Python, and so is on this machine.
    """

    server: ServerClient | None
    runtime_dir: str | None
    through: TransportChoice

    def __post_init__(self) -> None:
        if self.through not in get_args(TransportChoice):
            choices = ", ".join(get_args(TransportChoice))
            raise WeightsError(f"through is {quote(self.through)}; give one of {choices}")
        if self.through == "http" and self.server is None:
            raise WeightsError("through http needs the address of a server; give one")

    def choose(self, sources: Sequence[TensorSource], state: WeightsState) -> Transport:
        """Open the best transport to an engine."""
        if self.through == "http":
            return self._over_http(_REQUESTED)
        try:
            return self.connect(sources, state)
        except EngineGoneError as error:
            if self.server is None or self.through != "auto":
                raise
            return self._over_http(f"the engine's socket is not here: {error.reason}")

    def connect(self, sources: Sequence[TensorSource], state: WeightsState) -> Transport:
        """Open a transport through the sockets; EngineGoneError if that engine does not answer.

        Probes and vectors alone go to the ranks that have them.
        """
        is_model = any(kind_of(source.spec.name) == "model" for source in sources)
        taking = [
            (rank, device)
            for rank, device in zip(state.ranks, state.devices, strict=True)
            if is_model or rank.has_bank
        ]
        clients = connect_ranks(runtime_dir(self.runtime_dir), [rank for rank, _ in taking])
        try:
            return self._over_sockets(clients, sources, [device for _, device in taking])
        except BaseException:
            clients.close()
            raise

    def why_shared(self, sources: Sequence[TensorSource], state: WeightsState) -> str | None:
        """Why host memory is best, if the engine may copy it from this process; else None."""
        if self.server is not None or self.through not in ("auto", "host"):
            return None
        if not has_socket(runtime_dir(self.runtime_dir), state.epoch):
            return None
        if self.through == "host":
            return _REQUESTED
        device, reason = choose_memory(sources, state.device)
        return reason if device == CPU_DEVICE else None

    def _over_http(self, reason: str) -> Transport:
        assert self.server is not None
        return HttpTransport(self.server, reason)

    def _over_sockets(
        self, clients: RankClients, sources: Sequence[TensorSource], engine: Sequence[str]
    ) -> Transport:
        if self.through == "host":
            return HostTransport(clients, _REQUESTED)
        devices, reason = choose_memories(sources, engine)
        if devices and clients.is_same_process:
            devices, reason = (), _SAME_PROCESS
        if devices:
            return DeviceTransport(clients, devices, reason)
        if self.through == "device":
            raise WeightsError(
                f"nothing can go by the GPU's memory: {reason}; leave `through` out, or say host"
            )
        return HostTransport(clients, reason)


def choose_memories(
    sources: Sequence[TensorSource], engine: Sequence[str]
) -> tuple[tuple[torch.device, ...], str]:
    """The GPU of each rank, or none for host memory; and the reason."""
    if len(engine) == 1:
        device, reason = choose_memory(sources, engine[0])
        return (() if device == CPU_DEVICE else (device,)), reason
    if CPU in engine:
        return (), "the engine has no GPU"
    if all(source.device.type != "cuda" for source in sources):
        return (), "the tensors are in host memory"
    visible = {Gpu(at).uuid: torch.device("cuda", at) for at in range(torch.cuda.device_count())}
    hidden = [uuid for uuid in engine if uuid not in visible]
    if hidden:
        return (), f"GPU {hidden[0]} of a rank cannot be seen from this process"
    return tuple(visible[uuid] for uuid in engine), "this process sees the GPUs of all ranks"


def choose_memory(sources: Sequence[TensorSource], engine: str) -> tuple[torch.device, str]:
    """The engine's GPU if a tensor is on it, else host memory; and the reason.

    Everything else in the transfer (a probe, a vector) is small and copied to that GPU.
    """
    if engine == CPU:
        return CPU_DEVICE, "the engine has no GPU"
    devices = {source.device for source in sources if source.device.type == "cuda"}
    uuids = {device: Gpu(device.index).uuid for device in devices}
    for device, uuid in uuids.items():
        if uuid == engine:
            return device, "the tensors are on the engine's own GPU"
    if not uuids:
        return CPU_DEVICE, "the tensors are in host memory"
    return CPU_DEVICE, f"the tensors are on GPU {min(uuids.values())}, the engine is on {engine}"
