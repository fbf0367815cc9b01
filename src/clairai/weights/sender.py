"""Takes named tensors and an engine; gives the engine new weights while it serves, or the reason.

The tensors are packed into buffers of our own; the engine reads one while the next is packed, and
serves with the old weights until all have come and every checksum holds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from clairai.errors import EngineGoneError
from clairai.lent import Shelf
from clairai.serve.calls import Server
from clairai.weights.actors import ByActor, is_actor
from clairai.weights.carriers import OverSocket
from clairai.weights.device_pack import DevicePacker
from clairai.weights.handing import ByDevice, ByHost, Handing, Progress
from clairai.weights.layout import BUFFER_BYTES, DEVICE_BUFFER_BYTES, Meant, lay_out
from clairai.weights.manifest import CPU, Manifest, encode
from clairai.weights.pack import Packer
from clairai.weights.routes import Route, Router, Through
from clairai.weights.shelf import COPIED_BYTES
from clairai.weights.sources import Item, Named, items
from clairai.weights.ways import Drain, InProcess, OverHttp, Way
from clairai.wire_weights import WeightsState

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
    packed_s: float  # of that, until the last buffer had been read
    load_s: float  # and vLLM's own loading

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


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
        known, self._known = self._known, None  # until this one has come to its end
        with ExitStack() as opened:
            found = items(named, opened)
            # Before the carrier: buffers are let go of when the engine has let go of them.
            buffers = opened.enter_context(ExitStack())
            state, route = self._reach(found, known)
            opened.callback(route.carrier.close)
            if self._chosen is not None:
                self._chosen(route.home, route.why)
            home = state.device if route.home == "device" else CPU
            plan = self._plan(found, state.epoch, home, label)
            handing = self._handing(found, plan, route, buffers, progress or _silent)
            tensors = handing.over(lambda: self._way.plan(encode(plan)))
            packed_s = time.perf_counter() - began_s
            manifest = msgspec.structs.replace(plan, tensors=tensors)
            committed = self._way.commit(encode(manifest))
            serves_s = time.perf_counter() - began_s
        self._known = state
        return Sent(
            version=committed.version,
            digest=committed.digest,
            bank_version=committed.bank_version,
            vectors_version=committed.vectors_version,
            num_tensors=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            home=route.home,
            why=route.why,
            seconds=serves_s,
            packed_s=packed_s,
            load_s=committed.load_s,
        )

    def _reach(self, found: list[Item], known: WeightsState | None) -> tuple[WeightsState, Route]:
        """The engine of the last time, if its socket still answers as that; else one is asked."""
        if known is not None and self._router.through != "http":
            with suppress(EngineGoneError):
                return known, self._router.by_socket(found, known)
        state = self._way.state()
        return state, self._router.route(found, state)

    def _handing(
        self,
        found: list[Item],
        plan: Manifest,
        route: Route,
        buffers: ExitStack,
        progress: Progress,
    ) -> Handing:
        """`buffers` are let go of with it."""
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
        is_small = len(plan.buffers) == 1 and plan.buffers[0] <= COPIED_BYTES
        if route.home != "host" or not is_small:
            return None
        self._shelf = self._shelf or Shelf()
        return self._shelf

    def _plan(self, found: list[Item], epoch: str, device: str, label: str) -> Manifest:
        meant = Meant(secrets.token_hex(16), epoch, device, label)
        described = [item.described for item in found]
        usual = BUFFER_BYTES if device == CPU else DEVICE_BUFFER_BYTES
        return lay_out(described, meant, buffer_bytes=self._buffer_bytes or usual)


def _way(target: Any, server: Server | None, drain: Drain) -> Way:
    if server is not None:
        return OverHttp(server, drain)
    return ByActor(target, drain) if is_actor(target) else InProcess(target)


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
