"""Takes named tensors and an engine; gives the engine new weights while it serves, or the reason.

The tensors are packed into buffers of our own; the engine reads one while the next is packed, and
serves with the old weights until all have come and every checksum holds. Probes and vectors that
are small go in one question: the engine copies them from this process's memory, checks and serves.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from clairai.errors import EngineGoneError, UnsupportedError
from clairai.library.http_client import ServerClient
from clairai.local.shared_buffer import SharedBuffer
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
    DevicePacker,
    HostPacker,
    NamedTensors,
    TensorSource,
    TransferTarget,
    open_sources,
    plan_buffers,
)
from clairai.weights.transport import (
    ChosenTransport,
    DevicePipeline,
    HostPipeline,
    Pipeline,
    Progress,
    SocketTransport,
    TransportChoice,
    TransportChooser,
    TransportKind,
)
from clairai.wire.weights_messages import WeightsCommitted, WeightsState

OnTransportChosen = Callable[[str, str], None]  # told which way and why, before anything is packed


@dataclass(frozen=True)
class Sent:
    """What one hand-over did; the engine serves with `version` from now on."""

    version: int
    digest: str  # of the content, as the engine computed it from the bytes it read
    bank_version: int | None  # of the probes, if any were sent
    vectors_version: int | None  # of the steering vectors, likewise
    num_tensors: int
    nbytes: int
    home: str  # "device", "host" or "http": what it went through
    why: str  # that way and no other
    seconds: float  # until the engine served with them; to free what they took comes after
    packed_s: float  # of that, until the last buffer had been read; what was lent: packed
    load_s: float  # and vLLM's own loading

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class _Request:
    """What is to be sent."""

    found: list[TensorSource]
    label: str
    progress: Progress


@dataclass(frozen=True)
class _Outcome:
    """A hand-over that has come to its end."""

    state: WeightsState
    home: TransportKind
    why: str
    tensors: tuple[PlannedTensor, ...]
    committed: WeightsCommitted
    packed_s: float  # of the clock
    serves_s: float


class Sender:
    """`target` is a server's address, vLLM's LLM, or a Ray actor of it; `through`: routes.py."""

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
        self._way = _engine_client(target, server, drain)
        self._router = TransportChooser(server, runtime_dir, through)
        self._chosen = chosen
        self._buffer_bytes = buffer_bytes
        self._known: WeightsState | None = None  # as the last hand-over found it
        self._shelf: SharedBuffer | None = None
        self._sending = threading.Lock()  # all fill the same shelf
        self._may_lend = True  # until an engine could not read it

    def check(self, named: NamedTensors, *, label: str = "") -> int:
        """A dry run: names, types and shapes are held against the engine; bytes it would take."""
        with ExitStack() as opened:
            found = open_sources(named, opened)
            state = self._way.state()
            plan = self._plan(found, state.epoch, CPU, label)
            self._way.check(encode_manifest(plan))
            return sum(tensor.nbytes for tensor in plan.tensors)

    def send(
        self, named: NamedTensors, *, label: str = "", progress: Progress | None = None
    ) -> Sent:
        """All of it, or an error and the old weights; `progress` is told bytes done and in all."""
        began_s = time.perf_counter()
        with self._sending, ExitStack() as opened:
            known, self._known = self._known, None  # until this one has come to its end
            load = _Request(open_sources(named, opened), label, progress or _ignore_progress)
            over = self._lent(load, known) or self._brought(load, known, opened)
        self._known = over.state
        return _sent(over, began_s)

    def _lent(self, load: _Request, known: WeightsState | None) -> _Outcome | None:
        """All of it in one question; None for what cannot go so."""
        is_model = any(kind_of(item.described.name) == "model" for item in load.found)
        if is_model or not self._may_lend or not isinstance(self._way, LlmEngine):
            return None
        state = known or self._way.state()
        why = self._router.lending(load.found, state)
        plan = self._plan(load.found, state.epoch, CPU, load.label)
        if why is None or not _is_small(plan):
            return None
        if self._chosen is not None:
            self._chosen("host", why)
        shelf, self._shelf = self._shelf or SharedBuffer(), None  # while it may yet be read
        packed = HostPacker(load.found, plan, shelf).pack(0)
        packed_s = time.perf_counter()
        manifest = encode_manifest(msgspec.structs.replace(plan, tensors=packed.tensors))
        try:
            committed = self._way.commit_shared(manifest, shelf.reference(plan.buffers[0]))
        except UnsupportedError:
            self._may_lend = False
            return None
        self._shelf = shelf
        load.progress(plan.buffers[0], plan.buffers[0])
        serves_s = time.perf_counter()
        return _Outcome(state, "host", why, packed.tensors, committed, packed_s, serves_s)

    def _brought(self, load: _Request, known: WeightsState | None, opened: ExitStack) -> _Outcome:
        """It is planned, its buffers go over the socket or HTTP, and then it is committed."""
        # Before the carrier: buffers are let go of when the engine has let go of them.
        buffers = opened.enter_context(ExitStack())
        state, route = self._reach(load.found, known)
        opened.callback(route.carrier.close)
        if self._chosen is not None:
            self._chosen(route.home, route.why)
        home = state.device if route.home == "device" else CPU
        plan = self._plan(load.found, state.epoch, home, load.label)
        handing = self._handing(load, plan, route, buffers)
        tensors = handing.over(lambda: self._way.plan(encode_manifest(plan)))
        packed_s = time.perf_counter()
        manifest = msgspec.structs.replace(plan, tensors=tensors)
        committed = self._way.commit(encode_manifest(manifest))
        serves_s = time.perf_counter()
        return _Outcome(state, route.home, route.why, tensors, committed, packed_s, serves_s)

    def _reach(
        self, found: list[TensorSource], known: WeightsState | None
    ) -> tuple[WeightsState, ChosenTransport]:
        """The engine of the last time, if its socket still answers as that; else one is asked."""
        if known is not None and self._router.through != "http":
            with suppress(EngineGoneError):
                return known, self._router.by_socket(found, known)
        state = self._way.state()
        return state, self._router.route(found, state)

    def _handing(
        self, load: _Request, plan: Manifest, route: ChosenTransport, buffers: ExitStack
    ) -> Pipeline:
        """`buffers` are let go of with it."""
        found, progress = load.found, load.progress
        is_whole = all(item.is_whole for item in found)
        if route.home == "device":
            assert isinstance(route.carrier, SocketTransport)
            packer = DevicePacker(found, plan, route.device)
            buffers.callback(packer.close)
            return DevicePipeline(packer, is_whole, plan, route.carrier, progress)
        on_host = HostPacker(found, plan, self._shelf_for(plan, route))
        return HostPipeline(on_host, is_whole, plan, route.carrier, buffers, progress)

    def _shelf_for(self, plan: Manifest, route: ChosenTransport) -> SharedBuffer | None:
        """What is small and goes by the host's memory goes in memory that was used before."""
        if route.home != "host" or not _is_small(plan):
            return None
        self._shelf = self._shelf or SharedBuffer()
        return self._shelf

    def _plan(self, found: list[TensorSource], epoch: str, device: str, label: str) -> Manifest:
        meant = TransferTarget(secrets.token_hex(16), epoch, device, label)
        described = [item.described for item in found]
        usual = HOST_BUFFER_BYTES if device == CPU else DEVICE_BUFFER_BYTES
        return plan_buffers(described, meant, buffer_bytes=self._buffer_bytes or usual)


def _sent(over: _Outcome, began_s: float) -> Sent:
    return Sent(
        version=over.committed.version,
        digest=over.committed.digest,
        bank_version=over.committed.bank_version,
        vectors_version=over.committed.vectors_version,
        num_tensors=len(over.tensors),
        nbytes=sum(tensor.nbytes for tensor in over.tensors),
        home=over.home,
        why=over.why,
        seconds=over.serves_s - began_s,
        packed_s=over.packed_s - began_s,
        load_s=over.committed.load_s,
    )


def _is_small(plan: Manifest) -> bool:
    """The engine makes a copy of its own of that."""
    return len(plan.buffers) == 1 and plan.buffers[0] <= MAX_COPIED_BYTES


def _engine_client(target: Any, server: ServerClient | None, drain: Drain) -> EngineClient:
    if server is not None:
        return HttpEngine(server, drain)
    return RayEngine(target, drain) if is_ray_actor(target) else LlmEngine(target)


def _ignore_progress(done: int, total: int) -> None:
    """Nobody wants to know."""
