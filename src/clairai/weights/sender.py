"""Send new weights, probes and vectors to an engine while it serves.

Runs in: the trainer. The tensors are packed into buffers; the engine reads one while the next is
packed, and serves the old weights until everything has arrived and every checksum matches. Small
probes and vectors go in one question: the engine copies them from this process's memory.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from clairai.errors import EngineGoneError, UnsupportedError, WeightsError
from clairai.library.http_client import ServerClient
from clairai.local.shared_buffer import ReusableBuffer
from clairai.weights.engine_client import (
    Drain,
    EngineClient,
    HttpEngine,
    LlmEngine,
    RayEngine,
    is_ray_actor,
)
from clairai.weights.host_buffers import MAX_COPIED_BYTES
from clairai.weights.manifest import CPU, Manifest, PlannedTensor, encode_manifest, kind_of
from clairai.weights.pack import (
    DEVICE_BUFFER_BYTES,
    HOST_BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    HostPacker,
    NamedTensors,
    TensorSource,
    is_read_once,
    open_sources,
    plan_buffers,
    read_parts,
)
from clairai.weights.room import fit_buffer_bytes
from clairai.weights.transport import (
    HostTransport,
    Job,
    Transport,
    TransportChoice,
    TransportChooser,
)
from clairai.wire.weights_messages import WeightsCommitted, WeightsState

Progress = Callable[[int, int], None]  # bytes done, bytes in all
OnTransportChosen = Callable[[str, str], None]  # which one and why, before anything is packed


@dataclass(frozen=True)
class Sent:
    """The result of one transfer; the engine serves `version` from now on."""

    version: int
    digest: str  # of the content, computed by the engine from the bytes it read
    bank_version: int | None  # of the probes, if any were sent
    vectors_version: int | None  # of the steering vectors, if any were sent
    num_tensors: int
    nbytes: int
    home: str  # the transport: "device", "host" or "http"
    why: str  # this transport was chosen
    seconds: float  # until the engine served them; freeing the buffers comes after
    packed_s: float  # of that, until the last buffer was read, or packed if it was shared
    load_s: float  # of that, vLLM's own loading

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


class _Outcome(NamedTuple):
    state: WeightsState
    home: str
    why: str
    tensors: tuple[PlannedTensor, ...]
    committed: WeightsCommitted
    packed_at_s: float  # of time.perf_counter(), as the next
    served_at_s: float


class Sender:
    """Sends to a server's address, vLLM's LLM, or a Ray actor of it; or through an EngineClient.

    Reuse one `Sender`: it caches the engine's state and its buffers. `through` asks for one
    transport (transport.py); `chosen` is told which one was chosen and why.
    """

    def __init__(
        self,
        target: str | Any,
        *,
        api_key: str | None = None,
        runtime_dir: str | None = None,
        drain: Drain = "wait",
        through: TransportChoice = "auto",
        chosen: OnTransportChosen | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        server = ServerClient(target, api_key) if isinstance(target, str) else None
        self._engine = _engine_client(target, server, drain)
        self._chooser = TransportChooser(server, runtime_dir, through)
        self._on_chosen = chosen or _ignore
        self._buffer_bytes = buffer_bytes
        self._state: WeightsState | None = None  # of the last transfer, unless it failed
        self._shared = ReusableBuffer()
        self._sending = threading.Lock()

    def check(self, named: NamedTensors, *, label: str = "") -> int:
        """Check names, types and shapes with the engine; return the bytes a transfer would take."""
        with ExitStack() as opened:
            sources = open_sources(named, opened)
            plan = self._plan(sources, self._engine.state().epoch, CPU, label)
            self._engine.check(encode_manifest(plan))
            return sum(tensor.nbytes for tensor in plan.tensors)

    def send(
        self, named: NamedTensors, *, label: str = "", progress: Progress | None = None
    ) -> Sent:
        """Send all of it, or raise and leave the old weights; `progress` is called with bytes."""
        began_s = time.perf_counter()
        with self._sending, ExitStack() as opened:
            known, self._state = self._state, None  # asked again unless this transfer succeeds
            report = progress or _ignore
            if is_read_once(named):
                done = self._send_as_read(iter(named), label, known, report, opened)
            else:
                done = self._send_listed(open_sources(named, opened), label, known, report, opened)
        self._state = done.state
        return Sent(
            version=done.committed.version,
            digest=done.committed.digest,
            bank_version=done.committed.bank_version,
            vectors_version=done.committed.vectors_version,
            num_tensors=len(done.tensors),
            nbytes=sum(tensor.nbytes for tensor in done.tensors),
            home=done.home,
            why=done.why,
            seconds=done.served_at_s - began_s,
            packed_s=done.packed_at_s - began_s,
            load_s=done.committed.load_s,
        )

    def _send_listed(
        self,
        sources: list[TensorSource],
        label: str,
        known: WeightsState | None,
        progress: Progress,
        opened: ExitStack,
    ) -> _Outcome:
        return self._send_shared(sources, label, known, progress) or self._send_buffers(
            sources, label, known, progress, opened
        )

    def _send_as_read(
        self,
        pairs: Iterator[tuple[str, Any]],
        label: str,
        known: WeightsState | None,
        progress: Progress,
        opened: ExitStack,
    ) -> _Outcome:
        """Pack tensors that exist only until the next one is asked for; then plan and deliver.

        A buffer's worth of them is copied before it is packed. The engine hears of it all at once.
        """
        parts = read_parts(pairs, self._buffer_bytes or HOST_BUFFER_BYTES)
        first = next(parts, None)
        if first is None:
            raise WeightsError("the iterator has no tensor; send one or more")
        state, transport = self._open_transport(first, known)
        opened.callback(transport.close)
        self._on_chosen(transport.kind, transport.reason)
        device = _buffer_device(state, transport)
        whole = self._plan([], state.epoch, device, label)
        for part in chain((first,), parts):
            plan = self._plan(part, state.epoch, device, label)
            tensors = transport.pack(part, plan)
            whole = _append(whole, plan.buffers, tensors)
        packed_at_s = time.perf_counter()
        self._engine.plan(encode_manifest(_without_checksums(whole)))
        transport.deliver(whole, progress)
        committed = self._engine.commit(encode_manifest(whole))
        served_at_s = time.perf_counter()
        kind, why = transport.kind, transport.reason
        return _Outcome(state, kind, why, whole.tensors, committed, packed_at_s, served_at_s)

    def _send_shared(
        self,
        sources: list[TensorSource],
        label: str,
        known: WeightsState | None,
        progress: Progress,
    ) -> _Outcome | None:
        """Send small probes and vectors in one question; None if they cannot go that way."""
        is_model = any(kind_of(source.spec.name) == "model" for source in sources)
        if is_model or not isinstance(self._engine, LlmEngine) or not self._shared.is_readable:
            return None
        state = known or self._engine.state()
        why = self._chooser.why_shared(sources, state)
        plan = self._plan(sources, state.epoch, CPU, label)
        if why is None or not _is_small(plan):
            return None
        self._on_chosen("host", why)
        nbytes = plan.buffers[0]
        with suppress(UnsupportedError), self._shared.lock() as buffer:
            tensors = HostPacker(sources, plan, buffer).pack(0).tensors
            packed_at_s = time.perf_counter()
            manifest = encode_manifest(msgspec.structs.replace(plan, tensors=tensors))
            committed = self._engine.commit_shared(manifest, buffer.reference(nbytes))
            progress(nbytes, nbytes)
            return _Outcome(
                state, "host", why, tensors, committed, packed_at_s, time.perf_counter()
            )
        return None

    def _send_buffers(
        self,
        sources: list[TensorSource],
        label: str,
        known: WeightsState | None,
        progress: Progress,
        opened: ExitStack,
    ) -> _Outcome:
        """Plan, deliver the buffers by a transport, commit."""
        state, transport = self._open_transport(sources, known)
        opened.callback(transport.close)
        self._on_chosen(transport.kind, transport.reason)
        plan = self._plan(sources, state.epoch, _buffer_device(state, transport), label)
        if isinstance(transport, HostTransport) and _is_small(plan):
            transport.reused = opened.enter_context(self._shared.lock())

        def send_plan() -> None:
            self._engine.plan(encode_manifest(plan))

        tensors = transport.send(Job(sources, plan, send_plan, progress))
        packed_at_s = time.perf_counter()
        manifest = encode_manifest(msgspec.structs.replace(plan, tensors=tensors))
        committed = self._engine.commit(manifest)
        served_at_s = time.perf_counter()
        kind, why = transport.kind, transport.reason
        return _Outcome(state, kind, why, tensors, committed, packed_at_s, served_at_s)

    def _open_transport(
        self, sources: list[TensorSource], known: WeightsState | None
    ) -> tuple[WeightsState, Transport]:
        """Try the engine of the last transfer first: if its socket answers, it is still that."""
        if known is not None and self._chooser.through != "http":
            with suppress(EngineGoneError):
                return known, self._chooser.connect(sources, known)
        state = self._engine.state()
        return state, self._chooser.choose(sources, state)

    def _plan(
        self, sources: list[TensorSource], epoch: str, device: str | tuple[str, ...], label: str
    ) -> Manifest:
        is_model = any(kind_of(source.spec.name) == "model" for source in sources)
        usual = DEVICE_BUFFER_BYTES
        if device == CPU:
            usual = HOST_BUFFER_BYTES
            if is_model and self._buffer_bytes is None:
                usual = fit_buffer_bytes(usual, least=MIN_BUFFER_BYTES)
        return plan_buffers(
            [source.spec for source in sources],
            transfer=secrets.token_hex(16),
            epoch=epoch,
            device=device,
            label=label,
            buffer_bytes=self._buffer_bytes or usual,
        )


def _buffer_device(state: WeightsState, transport: Transport) -> str | tuple[str, ...]:
    if transport.kind != "device":
        return CPU
    return state.devices if len(state.devices) > 1 else state.device


def _append(whole: Manifest, buffers: Sequence[int], tensors: Sequence[PlannedTensor]) -> Manifest:
    """The manifest with more buffers after its own."""
    moved = (
        msgspec.structs.replace(tensor, buffer=tensor.buffer + len(whole.buffers))
        for tensor in tensors
    )
    return msgspec.structs.replace(
        whole, buffers=(*whole.buffers, *buffers), tensors=(*whole.tensors, *moved)
    )


def _without_checksums(manifest: Manifest) -> Manifest:
    tensors = (msgspec.structs.replace(tensor, checksum="") for tensor in manifest.tensors)
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def _is_small(plan: Manifest) -> bool:
    """True if the engine copies the buffer instead of mapping it."""
    return len(plan.buffers) == 1 and plan.buffers[0] <= MAX_COPIED_BYTES


def _engine_client(target: Any, server: ServerClient | None, drain: Drain) -> EngineClient:
    if server is not None:
        return HttpEngine(server, drain)
    if isinstance(target, EngineClient):
        return target
    return RayEngine(target, drain) if is_ray_actor(target) else LlmEngine(target)


def _ignore(*_: object) -> None:
    """For callbacks that were not given."""
