"""Takes named tensors and an engine; gives the engine new weights while it serves, or the reason.

The tensors are packed into buffers of our own; the engine reads one while the next is packed, and
serves with the old weights until all have come and every checksum holds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from clairai.serve.calls import Server
from clairai.weights.actors import ByActor, is_actor
from clairai.weights.carriers import Carrier
from clairai.weights.layout import BUFFER_BYTES, DEVICE_BUFFER_BYTES, Meant, lay_out
from clairai.weights.manifest import CPU, Manifest, Tensor, encode
from clairai.weights.pack import Packed, Packer
from clairai.weights.routes import Router, Through
from clairai.weights.sources import Item, Named, items
from clairai.weights.ways import Drain, InProcess, OverHttp, Way

Progress = Callable[[int, int], None]
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
    seconds: float  # all of it
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
        with ExitStack() as opened:
            found = items(named, opened)
            state = self._way.state()
            # Before the carrier: buffers are let go of when the engine has let go of them.
            buffers = opened.enter_context(ExitStack())
            route = self._router.route(found, state)
            opened.callback(route.carrier.close)
            if self._chosen is not None:
                self._chosen(route.home, route.why)
            home = state.device if route.home == "device" else CPU
            plan = self._plan(found, state.epoch, home, label)
            self._way.plan(encode(plan))
            packer = Packer(found, plan, route.device)
            tensors = _hand_over(packer, plan, route.carrier, buffers, progress or _silent)
            packed_s = time.perf_counter() - began_s
            manifest = msgspec.structs.replace(plan, tensors=tensors)
            committed = self._way.commit(encode(manifest))
        return Sent(
            version=committed.version,
            digest=committed.digest,
            bank_version=committed.bank_version,
            vectors_version=committed.vectors_version,
            num_tensors=len(tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            home=route.home,
            why=route.why,
            seconds=time.perf_counter() - began_s,
            packed_s=packed_s,
            load_s=committed.load_s,
        )

    def _plan(self, found: list[Item], epoch: str, device: str, label: str) -> Manifest:
        meant = Meant(secrets.token_hex(16), epoch, device, label)
        described = [item.described for item in found]
        usual = BUFFER_BYTES if device == CPU else DEVICE_BUFFER_BYTES
        return lay_out(described, meant, buffer_bytes=self._buffer_bytes or usual)


def _way(target: Any, server: Server | None, drain: Drain) -> Way:
    if server is not None:
        return OverHttp(server, drain)
    return ByActor(target, drain) if is_actor(target) else InProcess(target)


def _hand_over(
    packer: Packer, plan: Manifest, carrier: Carrier, buffers: ExitStack, progress: Progress
) -> tuple[Tensor, ...]:
    """Each buffer is carried on a thread while the next is packed; those of a GPU stay."""
    tensors: list[Tensor] = []
    done = 0
    with ThreadPoolExecutor(1) as carrying:
        before: Future[None] | None = None
        for index, nbytes in enumerate(plan.buffers):
            packed = packer.pack(index)
            buffers.callback(packed.close)
            if before is not None:
                before.result()
            before = carrying.submit(_carry, carrier, plan, index, packed)
            tensors += packed.tensors
            done += nbytes
            progress(done, sum(plan.buffers))
        if before is not None:
            before.result()
    return tuple(tensors)


def _carry(carrier: Carrier, plan: Manifest, index: int, packed: Packed) -> None:
    carrier.carry(plan, index, packed)
    if packed.home == "host":
        packed.close()  # the engine has the pages, or the server a copy


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
