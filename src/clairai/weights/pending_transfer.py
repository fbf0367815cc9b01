"""Takes a plan and the buffers that come for it; gives them to the one who commits, once.

The plan and the commit come on the worker's main thread, buffers on the socket's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clairai.errors import WeightsError
from clairai.local.shared_buffer import BufferCopier, open_shared
from clairai.weights.host_buffers import (
    MAX_COPIED_BYTES,
    CopiedBuffer,
    ReceivedBuffer,
    ReceivedHostBuffer,
)
from clairai.weights.manifest import CPU, Manifest, changes_model
from clairai.wire.weights_messages import BufferFilled, BufferOffer, BufferReceived, SharedBytes

HANDLE_BYTES = 64
OpenDeviceBuffer = Callable[[bytes, int], ReceivedBuffer]


@dataclass
class PendingTransfer:
    """What has come for one plan."""

    plan: Manifest
    buffers: list[ReceivedBuffer] = field(default_factory=list)  # all that were opened
    num_read: int = 0  # of these, in order
    checksums: dict[str, str] = field(default_factory=dict)  # by tensor, as computed here
    is_done: threading.Event = field(default_factory=threading.Event)  # nobody will read it again
    reading: threading.Lock = field(default_factory=threading.Lock)  # none is closed meanwhile

    def close(self) -> None:
        """From now on its sender may do with its memory what it likes."""
        with self.reading:
            for buffer in self.buffers:
                buffer.close()
            self.buffers.clear()
        self.is_done.set()


class TransferTracker:
    """Room for one hand-over at a time."""

    def __init__(self, open_device: OpenDeviceBuffer, borrower: BufferCopier) -> None:
        """What is small and in host memory is copied by `borrower`."""
        self._open_device = open_device
        self._borrower = borrower
        self._cargo: PendingTransfer | None = None
        self._taken: PendingTransfer | None = None
        self._lock = threading.Lock()

    def expect(self, plan: Manifest) -> None:
        """From now on buffers of this plan are taken, and of no other."""
        self._replace(PendingTransfer(plan))

    def drop(self) -> None:
        """Forget the plan and what has come; what was taken and not loaded yet is not ours."""
        self._replace(None)
        if self._taken is not None and self._taken.is_done.is_set():
            self._taken.close()

    def let_go(self, transfer: str, timeout_s: float) -> bool:
        """Drop what came for it, and wait for one who has taken that; whether nobody reads it now.

        A plan that has come meanwhile is somebody else's, and stays.
        """
        with self._lock:
            dropped, taken = self._cargo, self._taken
            if dropped is None or dropped.plan.transfer != transfer:
                dropped = None
            else:
                self._cargo = None
        if dropped is not None:
            dropped.close()
        if taken is None or taken.plan.transfer != transfer:
            return True
        if not taken.is_done.wait(timeout_s):
            return False
        taken.close()
        return True

    def land(self, offer: BufferOffer, fds: Sequence[int]) -> BufferReceived | None:
        """Open a buffer, and read one that is full; takes the descriptors over, whatever happens.

        One of a GPU is said to be full later: None.
        """
        owned = list(fds)
        try:
            cargo = self._expected(offer, owned)
            buffer = self._open(offer, owned, cargo.plan)
        finally:
            for fd in owned:
                os.close(fd)
        try:
            _check_extent(buffer, cargo.plan, offer.index)
            self._keep(cargo, buffer)
        except BaseException:
            buffer.close()
            raise
        return None if offer.home == "device" else self._read(cargo, offer.index)

    def read(self, full: BufferFilled) -> BufferReceived:
        """Read a buffer of a GPU that was opened before, once: its sender says that it is full."""
        with self._lock:
            cargo = self._of(full.transfer)
            if full.index != cargo.num_read or full.index >= len(cargo.buffers):
                raise WeightsError(
                    f"buffer {full.index} is full, {len(cargo.buffers)} have come and "
                    f"{cargo.num_read} of them were read; send each once, in order"
                )
        return self._read(cargo, full.index)

    def look(self, transfer: str) -> PendingTransfer:
        """What has come for this transfer so far; it stays here."""
        with self._lock:
            return self._of(transfer)

    def take(self, transfer: str) -> PendingTransfer:
        """What has come for this transfer; a second time there is nothing."""
        with self._lock:
            cargo, before = self._of(transfer), self._taken
            self._cargo, self._taken = None, cargo
        if before is not None:
            before.close()  # of the same sender: another's would have been let go of
        return cargo

    def borrow(self, plan: Manifest, lent: SharedBytes) -> PendingTransfer:
        """What was lent for this plan, copied and read now; what else is expected stays so."""
        _require_shareable(plan, lent)
        copied = CopiedBuffer(self._borrower, open_shared(lent), lent.nbytes, plan.tensors)
        sums = copied.checksums(plan.tensors)
        named = dict(zip((each.name for each in plan.tensors), sums, strict=True))
        return PendingTransfer(plan, [copied], num_read=1, checksums=named)

    def done(self, cargo: PendingTransfer) -> None:
        """It has been loaded, or will not be. A GPU's is closed when its sender goes, not now.

        That takes milliseconds in which requests would wait.
        """
        if cargo.plan.device == CPU:
            cargo.close()
        cargo.is_done.set()

    def _of(self, transfer: str) -> PendingTransfer:
        if self._cargo is None or self._cargo.plan.transfer != transfer:
            raise WeightsError(
                f"transfer {transfer} is not planned, or was used or given up; plan it again"
            )
        return self._cargo

    def _replace(self, cargo: PendingTransfer | None) -> None:
        with self._lock:
            before, self._cargo = self._cargo, cargo
        if before is not None:
            before.close()

    def _expected(self, offer: BufferOffer, fds: Sequence[int]) -> PendingTransfer:
        with self._lock:
            cargo = self._cargo
        if cargo is None or cargo.plan.transfer != offer.transfer:
            raise WeightsError("no such transfer is planned; POST /v1/weights/plan first")
        if offer.index != len(cargo.buffers) or offer.index >= len(cargo.plan.buffers):
            raise WeightsError(
                f"buffer {offer.index} came, {len(cargo.buffers)} of {len(cargo.plan.buffers)} "
                f"are here; send each once, in order"
            )
        planned = cargo.plan.buffers[offer.index]
        if offer.nbytes != planned:
            raise WeightsError(
                f"buffer {offer.index} has {offer.nbytes} bytes, {planned} were planned"
            )
        _check_offer(offer, fds, is_on_host=cargo.plan.device == CPU)
        return cargo

    def _open(self, offer: BufferOffer, owned: list[int], plan: Manifest) -> ReceivedBuffer:
        if offer.home == "host":
            return ReceivedHostBuffer(owned.pop(), offer.nbytes)
        if offer.home == "copied":
            brought = [tensor for tensor in plan.tensors if tensor.buffer == offer.index]
            return CopiedBuffer(self._borrower, owned.pop(), offer.nbytes, brought)
        return self._open_device(offer.handle, offer.nbytes)

    def _keep(self, cargo: PendingTransfer, buffer: ReceivedBuffer) -> None:
        with self._lock:
            self._require_wanted(cargo)
            cargo.buffers.append(buffer)

    def _read(self, cargo: PendingTransfer, index: int) -> BufferReceived:
        """On the socket's thread, which alone opens and reads; the plan may change meanwhile."""
        tensors = [tensor for tensor in cargo.plan.tensors if tensor.buffer == index]
        with cargo.reading:  # what is still wanted now is not closed before we are done
            self._require_wanted(cargo)
            buffer = cargo.buffers[index]
            sums = buffer.checksums(tensors)
        with self._lock:
            self._require_wanted(cargo)
            cargo.checksums.update(zip((each.name for each in tensors), sums, strict=True))
            cargo.num_read += 1
        return BufferReceived(index, buffer.extent)

    def _require_wanted(self, cargo: PendingTransfer) -> None:
        if self._cargo is not cargo:
            raise WeightsError("another plan has come meanwhile; plan again")


def _require_shareable(plan: Manifest, lent: SharedBytes) -> None:
    """The engine's main thread copies it, between two steps: no model comes so."""
    if changes_model(plan) or plan.device != CPU or plan.buffers != (lent.nbytes,):
        raise WeightsError(
            f"{lent.nbytes} bytes are lent for buffers of {list(plan.buffers[:8])} bytes; lend one "
            f"buffer in host memory, of probes and vectors alone, or plan and offer it"
        )


def _check_offer(offer: BufferOffer, fds: Sequence[int], *, is_on_host: bool) -> None:
    homes = ("host", "copied") if is_on_host else ("device",)
    wanted = (1, 0) if is_on_host else (0, HANDLE_BYTES)
    if offer.home not in homes or (len(fds), len(offer.handle)) != wanted:
        raise WeightsError(
            f"a buffer in {homes[0]} memory comes with {wanted[0]} descriptors and {wanted[1]} "
            f"bytes of handle; {len(fds)} and {len(offer.handle)} came"
        )
    if offer.home == "copied" and offer.nbytes > MAX_COPIED_BYTES:
        raise WeightsError(
            f"buffer {offer.index} has {offer.nbytes} bytes, and at most {MAX_COPIED_BYTES} are "
            f"copied; seal it and send it as host memory"
        )


def _check_extent(buffer: ReceivedBuffer, plan: Manifest, index: int) -> None:
    if buffer.extent < plan.buffers[index]:
        raise WeightsError(
            f"buffer {index} claims {plan.buffers[index]} bytes and has {buffer.extent}; "
            f"do not trust this sender"
        )
