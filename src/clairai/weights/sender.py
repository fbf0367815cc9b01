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
from clairai.lent import Shelf
from clairai.serve.calls import Server
from clairai.weights.actors import ByActor, is_actor
from clairai.weights.carriers import OverSocket
from clairai.weights.device_pack import DevicePacker
from clairai.weights.handing import ByDevice, ByHost, Handing, Progress
from clairai.weights.layout import BUFFER_BYTES, DEVICE_BUFFER_BYTES, Meant, lay_out
from clairai.weights.manifest import CPU, Manifest, Tensor, encode, kind_of
from clairai.weights.pack import Packer
from clairai.weights.routes import Home, Route, Router, Through
from clairai.weights.shelf import COPIED_BYTES
from clairai.weights.sources import Item, Named, items
from clairai.weights.ways import Drain, InProcess, OverHttp, Way
from clairai.wire_weights import WeightsCommitted, WeightsState

Chosen = Callable[[str, str], None]  # told which way and why, before anything is packed


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
class _Load:
    """What is to be sent."""

    found: list[Item]
    label: str
    progress: Progress


@dataclass(frozen=True)
class _Over:
    """A hand-over that has come to its end."""

    state: WeightsState
    home: Home
    why: str
    tensors: tuple[Tensor, ...]
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
        through: Through = "auto",
        chosen: Chosen | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        server = Server(target, api_key) if isinstance(target, str) else None
        self._way = _way(target, server, drain)
        self._router = Router(server, runtime_dir, through)
        self._chosen = chosen
        self._buffer_bytes = buffer_bytes
        self._known: WeightsState | None = None  # as the last hand-over found it
        self._shelf: Shelf | None = None
        self._sending = threading.Lock()  # all fill the same shelf
        self._may_lend = True  # until an engine could not read it

    def check(self, named: Named, *, label: str = "") -> int:
        """A dry run: names, types and shapes are held against the engine; bytes it would take."""
        with ExitStack() as opened:
            found = items(named, opened)
            state = self._way.state()
            plan = self._plan(found, state.epoch, CPU, label)
            self._way.check(encode(plan))
            return sum(tensor.nbytes for tensor in plan.tensors)

    def send(self, named: Named, *, label: str = "", progress: Progress | None = None) -> Sent:
        """All of it, or an error and the old weights; `progress` is told bytes done and in all."""
        began_s = time.perf_counter()
        with self._sending, ExitStack() as opened:
            known, self._known = self._known, None  # until this one has come to its end
            load = _Load(items(named, opened), label, progress or _silent)
            over = self._lent(load, known) or self._brought(load, known, opened)
        self._known = over.state
        return _sent(over, began_s)

    def _lent(self, load: _Load, known: WeightsState | None) -> _Over | None:
        """All of it in one question; None for what cannot go so."""
        is_model = any(kind_of(item.described.name) == "model" for item in load.found)
        if is_model or not self._may_lend or not isinstance(self._way, InProcess):
            return None
        state = known or self._way.state()
        why = self._router.lending(load.found, state)
        plan = self._plan(load.found, state.epoch, CPU, load.label)
        if why is None or not _is_small(plan):
            return None
        if self._chosen is not None:
            self._chosen("host", why)
        shelf, self._shelf = self._shelf or Shelf(), None  # while it may yet be read
        packed = Packer(load.found, plan, shelf).pack(0)
        packed_s = time.perf_counter()
        manifest = encode(msgspec.structs.replace(plan, tensors=packed.tensors))
        try:
            committed = self._way.commit_lent(manifest, shelf.lent(plan.buffers[0]))
        except UnsupportedError:
            self._may_lend = False
            return None
        self._shelf = shelf
        load.progress(plan.buffers[0], plan.buffers[0])
        serves_s = time.perf_counter()
        return _Over(state, "host", why, packed.tensors, committed, packed_s, serves_s)

    def _brought(self, load: _Load, known: WeightsState | None, opened: ExitStack) -> _Over:
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
        tensors = handing.over(lambda: self._way.plan(encode(plan)))
        packed_s = time.perf_counter()
        manifest = msgspec.structs.replace(plan, tensors=tensors)
        committed = self._way.commit(encode(manifest))
        serves_s = time.perf_counter()
        return _Over(state, route.home, route.why, tensors, committed, packed_s, serves_s)

    def _reach(self, found: list[Item], known: WeightsState | None) -> tuple[WeightsState, Route]:
        """The engine of the last time, if its socket still answers as that; else one is asked."""
        if known is not None and self._router.through != "http":
            with suppress(EngineGoneError):
                return known, self._router.by_socket(found, known)
        state = self._way.state()
        return state, self._router.route(found, state)

    def _handing(self, load: _Load, plan: Manifest, route: Route, buffers: ExitStack) -> Handing:
        """`buffers` are let go of with it."""
        found, progress = load.found, load.progress
        is_whole = all(item.is_whole for item in found)
        if route.home == "device":
            assert isinstance(route.carrier, OverSocket)
            packer = DevicePacker(found, plan, route.device)
            buffers.callback(packer.close)
            return ByDevice(packer, is_whole, plan, route.carrier, progress)
        on_host = Packer(found, plan, self._shelf_for(plan, route))
        return ByHost(on_host, is_whole, plan, route.carrier, buffers, progress)

    def _shelf_for(self, plan: Manifest, route: Route) -> Shelf | None:
        """What is small and goes by the host's memory goes in memory that was used before."""
        if route.home != "host" or not _is_small(plan):
            return None
        self._shelf = self._shelf or Shelf()
        return self._shelf

    def _plan(self, found: list[Item], epoch: str, device: str, label: str) -> Manifest:
        meant = Meant(secrets.token_hex(16), epoch, device, label)
        described = [item.described for item in found]
        usual = BUFFER_BYTES if device == CPU else DEVICE_BUFFER_BYTES
        return lay_out(described, meant, buffer_bytes=self._buffer_bytes or usual)


def _sent(over: _Over, began_s: float) -> Sent:
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
    return len(plan.buffers) == 1 and plan.buffers[0] <= COPIED_BYTES


def _way(target: Any, server: Server | None, drain: Drain) -> Way:
    if server is not None:
        return OverHttp(server, drain)
    return ByActor(target, drain) if is_actor(target) else InProcess(target)


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
