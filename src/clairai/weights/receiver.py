"""Takes manifests and what came on the socket; gives verified tensors to load, or the reason not.

One for each engine that takes weights. It knows nothing of vLLM: who loads them is not its matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clairai.borrow import Borrower
from clairai.weights import check
from clairai.weights.check import Holding, Slot
from clairai.weights.checksum import native_sum
from clairai.weights.dock import Cargo, Dock, OpenDevice
from clairai.weights.link import Link
from clairai.weights.manifest import CPU, Manifest, digest, kind_of, parse
from clairai.wire_weights import Lent

Slots = Callable[[], Mapping[str, Slot]]


@dataclass(frozen=True)
class Shipment:
    """Tensors whose bytes are those that were packed, by name; valid while it is open."""

    manifest: Manifest
    digest: str
    nbytes: int
    tensors: tuple[tuple[str, Any], ...]

    def of(self, kind: str) -> list[tuple[str, Any]]:
        return [(name, tensor) for name, tensor in self.tensors if kind_of(name) == kind]


class Receiver:
    """`slots` is asked each time: what banks hold changes."""

    def __init__(self, folder: Path, device: str, slots: Slots, open_device: OpenDevice) -> None:
        native_sum()  # compiled now: the first sender would wait for it
        self.epoch = secrets.randbits(63) + 1
        self.device = device
        self._slots = slots
        self._dock = Dock(open_device, _borrower(device))
        self._link = Link(folder, self.epoch, device, self._dock)

    @property
    def path(self) -> Path:
        return self._link.path

    def holding(self) -> Holding:
        return Holding(f"{self.epoch:016x}", self.device, self._slots())

    def check(self, raw: bytes) -> Manifest:
        """The manifest, if its plan is good; touches no buffer."""
        manifest = parse(raw)
        check.check_plan(manifest, self.holding())
        return manifest

    def plan(self, raw: bytes) -> Manifest:
        """As check; from now on its buffers are taken."""
        manifest = self.check(raw)
        self._dock.expect(manifest)
        return manifest

    def verify(self, raw: bytes) -> Manifest:
        """As unpack, and nothing is taken: what would be refused is known before anybody waits."""
        manifest = self.check(raw)
        _check_cargo(manifest, self._dock.look(manifest.transfer))
        return manifest

    @contextmanager
    def unpack(self, raw: bytes, lent: Lent | None = None) -> Iterator[Shipment]:
        """All that came, or is lent, verified; raises before anybody has seen a tensor."""
        manifest = self.check(raw)
        if lent is None:
            cargo = self._dock.take(manifest.transfer)
        else:
            cargo = self._dock.borrow(manifest, lent)
        try:
            _check_cargo(manifest, cargo)
            yield _shipment(manifest, cargo.buffers)
        finally:
            self._dock.done(cargo)

    def close(self) -> None:
        self._link.close()


def _borrower(device: str) -> Borrower:
    """A GPU fetches new rows of a bank from where they were copied to, if that is pinned."""
    if device == CPU:
        return Borrower()
    from clairai.weights.tensors import pinned

    return Borrower(pinned)


def _check_cargo(manifest: Manifest, cargo: Cargo) -> None:
    check.check_same(manifest, cargo.plan)
    check.check_extents(manifest, [buffer.extent for buffer in cargo.buffers[: cargo.num_read]])
    check.check_checksums(manifest, cargo.checksums)


def _shipment(manifest: Manifest, buffers: list[Any]) -> Shipment:
    from clairai.weights.tensors import placed

    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    return Shipment(
        manifest, digest(manifest.tensors), nbytes, tuple(placed(manifest.tensors, buffers))
    )


def refuse_device(handle: bytes, nbytes: int) -> Any:
    """For an engine without a GPU; `check` has refused such a plan before."""
    raise AssertionError(
        f"a device buffer of {nbytes} bytes came to an engine on {CPU}: {handle!r}"
    )
