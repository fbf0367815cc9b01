"""The one transfer that an engine expects, and the buffers that have arrived for it.

Runs in: the worker. Plans and commits come on its main thread, buffers on the socket's thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clairai.errors import WeightsError
from clairai.local.gpu_memory import HANDLE_BYTES
from clairai.local.shared_buffer import BufferCopier, open_shared
from clairai.weights.host_buffers import (
    MAX_COPIED_BYTES,
    CopiedBuffer,
    ReceivedBuffer,
    ReceivedHostBuffer,
)
from clairai.weights.manifest import CPU, Manifest, changes_model
from clairai.wire.weights_messages import BufferFilled, BufferOffer, BufferReceived, SharedBytes

OpenDeviceBuffer = Callable[[bytes, int], ReceivedBuffer]


@dataclass
class PendingTransfer:
    """What has arrived for one plan."""

    plan: Manifest
    buffers: list[ReceivedBuffer] = field(default_factory=list)  # opened so far
    num_read: int = 0  # of the buffers, in order
    checksums: dict[str, str] = field(default_factory=dict)  # by tensor, computed here
    is_done: threading.Event = field(default_factory=threading.Event)  # it is read no more
    reading: threading.Lock = field(default_factory=threading.Lock)  # held while one is read

    def close(self) -> None:
        """Close all buffers; from now on the sender may free or reuse its memory."""
        with self.reading:
            for buffer in self.buffers:
                buffer.close()
            self.buffers.clear()
        self.is_done.set()


class TransferTracker:
    """Tracks the transfer that is expected and the one that is being loaded."""

    def __init__(self, open_device: OpenDeviceBuffer, copier: BufferCopier) -> None:
        """`copier` copies small buffers in host memory."""
        self._open_device = open_device
        self._copier = copier
        self._expected: PendingTransfer | None = None
        self._taken: PendingTransfer | None = None
        self._lock = threading.Lock()

    def expect(self, plan: Manifest) -> None:
        """Accept buffers of this plan from now on, and of no other."""
        self._replace(PendingTransfer(plan))

    def forget(self, transfer: str) -> None:
        """Accept no more buffers of this transfer; another that is expected stays."""
        with self._lock:
            found = self._expected
            if found is None or found.plan.transfer != transfer:
                return
            self._expected = None
        found.close()

    def drop(self) -> None:
        """Forget the plan and its buffers; a transfer that is being loaded stays open."""
        self._replace(None)
        if self._taken is not None and self._taken.is_done.is_set():
            self._taken.close()

    def release(self, transfer: str, timeout_s: float) -> bool:
        """Drop a transfer, or wait until it has been loaded; False if that takes too long.

        A plan that has come meanwhile belongs to another sender, and stays.
        """
        with self._lock:
            dropped, taken = self._expected, self._taken
            if dropped is None or dropped.plan.transfer != transfer:
                dropped = None
            else:
                self._expected = None
        if dropped is not None:
            dropped.close()
        if taken is None or taken.plan.transfer != transfer:
            return True
        if not taken.is_done.wait(timeout_s):
            return False
        taken.close()
        return True

    def accept_offer(self, offer: BufferOffer, fds: Sequence[int]) -> BufferReceived | None:
        """Open a buffer and read it; None for a GPU buffer, which is read once it is full.

        Closes the descriptors in any case.
        """
        owned = list(fds)
        try:
            pending = self._find_expected(offer, owned)
            buffer = self._open(offer, owned, pending.plan)
        finally:
            for fd in owned:
                os.close(fd)
        try:
            _check_extent(buffer, pending.plan, offer.index)
            self._keep(pending, buffer)
        except BaseException:
            buffer.close()
            raise
        return None if offer.home == "device" else self._read(pending, offer.index)

    def read_full(self, full: BufferFilled) -> BufferReceived:
        """Read an open GPU buffer, once: its sender says that it is full."""
        with self._lock:
            pending = self._get(full.transfer)
            if full.index != pending.num_read or full.index >= len(pending.buffers):
                raise WeightsError(
                    f"buffer {full.index} is full, {len(pending.buffers)} have come and "
                    f"{pending.num_read} of them were read; send each once, in order"
                )
        return self._read(pending, full.index)

    def peek(self, transfer: str) -> PendingTransfer:
        """What has arrived for this transfer so far; it stays expected."""
        with self._lock:
            return self._get(transfer)

    def take(self, transfer: str) -> PendingTransfer:
        """Return what has arrived for this transfer, to load it; only once."""
        with self._lock:
            pending, before = self._get(transfer), self._taken
            self._expected, self._taken = None, pending
        if before is not None:
            before.close()  # of the same sender: another's was released when it left
        return pending

    def copy_shared(self, plan: Manifest, shared: SharedBytes) -> PendingTransfer:
        """Copy and read the one buffer of a plan now; an expected transfer is left alone."""
        _require_shareable(plan, shared)
        copied = CopiedBuffer(self._copier, open_shared(shared), shared.nbytes, plan.tensors)
        sums = copied.checksums(plan.tensors)
        named = dict(zip((each.name for each in plan.tensors), sums, strict=True))
        return PendingTransfer(plan, [copied], num_read=1, checksums=named)

    def finish(self, pending: PendingTransfer) -> None:
        """A taken transfer has been loaded, or will not be.

        GPU buffers are closed when the sender leaves: requests would wait for that now.
        """
        if pending.plan.device == CPU:
            pending.close()
        pending.is_done.set()

    def _get(self, transfer: str) -> PendingTransfer:
        if self._expected is None or self._expected.plan.transfer != transfer:
            raise WeightsError(
                f"transfer {transfer} is not planned, or was used or given up; plan it again"
            )
        return self._expected

    def _replace(self, pending: PendingTransfer | None) -> None:
        with self._lock:
            before, self._expected = self._expected, pending
        if before is not None:
            before.close()

    def _find_expected(self, offer: BufferOffer, fds: Sequence[int]) -> PendingTransfer:
        with self._lock:
            pending = self._expected
        if pending is None or pending.plan.transfer != offer.transfer:
            raise WeightsError("no such transfer is planned; POST /v1/weights/plan first")
        if offer.index != len(pending.buffers) or offer.index >= len(pending.plan.buffers):
            raise WeightsError(
                f"buffer {offer.index} came, {len(pending.buffers)} of {len(pending.plan.buffers)} "
                f"are here; send each once, in order"
            )
        planned = pending.plan.buffers[offer.index]
        if offer.nbytes != planned:
            raise WeightsError(
                f"buffer {offer.index} has {offer.nbytes} bytes, {planned} were planned"
            )
        _check_offer(offer, fds, is_on_host=pending.plan.device == CPU)
        return pending

    def _open(self, offer: BufferOffer, owned: list[int], plan: Manifest) -> ReceivedBuffer:
        if offer.home == "host":
            return ReceivedHostBuffer(owned.pop(), offer.nbytes)
        if offer.home == "copied":
            tensors = [tensor for tensor in plan.tensors if tensor.buffer == offer.index]
            return CopiedBuffer(self._copier, owned.pop(), offer.nbytes, tensors)
        return self._open_device(offer.handle, offer.nbytes)

    def _keep(self, pending: PendingTransfer, buffer: ReceivedBuffer) -> None:
        with self._lock:
            self._require_expected(pending)
            pending.buffers.append(buffer)

    def _read(self, pending: PendingTransfer, index: int) -> BufferReceived:
        """On the socket's thread, the only one that reads; the plan may change meanwhile."""
        tensors = [tensor for tensor in pending.plan.tensors if tensor.buffer == index]
        with pending.reading:  # a transfer that is expected here is not closed before the end
            self._require_expected(pending)
            buffer = pending.buffers[index]
            sums = buffer.checksums(tensors)
        with self._lock:
            self._require_expected(pending)
            pending.checksums.update(zip((each.name for each in tensors), sums, strict=True))
            pending.num_read += 1
        return BufferReceived(index, buffer.extent)

    def _require_expected(self, pending: PendingTransfer) -> None:
        if self._expected is not pending:
            raise WeightsError("another plan has come meanwhile; plan again")


def _require_shareable(plan: Manifest, shared: SharedBytes) -> None:
    """No model: the engine's main thread makes the copy between two steps."""
    if changes_model(plan) or plan.device != CPU or plan.buffers != (shared.nbytes,):
        raise WeightsError(
            f"{shared.nbytes} bytes are shared for buffers of {list(plan.buffers[:8])} bytes; "
            f"share one buffer in host memory, of probes and vectors alone, or plan and offer it"
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
