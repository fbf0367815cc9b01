"""Takes a plan that came over HTTP and its buffers; gives them to the engine's socket, as a sender.

For a trainer that cannot reach that socket: on another machine, or another user. It runs beside the
engine, in the API server's process; the worker checks what it brings as it checks everybody's.
"""

from __future__ import annotations

from pathlib import Path

from clairai.errors import WeightsError
from clairai.weights.manifest import CPU, Manifest
from clairai.weights.port import Port
from clairai.weights.spool import Spool
from clairai.wire_weights import Offer


class Relay:
    """One hand-over at a time; its calls wait, so they belong on a thread."""

    def __init__(self) -> None:
        self._plan: Manifest | None = None
        self._folder: Path | None = None
        self._port: Port | None = None

    @property
    def transfer(self) -> str | None:
        """Which hand-over is expected, or on its way."""
        return None if self._plan is None else self._plan.transfer

    def expect(self, plan: Manifest, folder: Path) -> None:
        """The engine has taken this plan; `folder` is where its socket is."""
        self._plan, self._folder = plan, folder

    def spool(self, transfer: str, index: int) -> Spool:
        """Room for a buffer of the plan; WeightsError for any other."""
        plan = self._plan
        if plan is None or plan.transfer != transfer:
            raise WeightsError(
                f"transfer {transfer} is not planned here, or was used or given up; "
                f"POST /v1/weights/plan first, to the same process of the server"
            )
        if plan.device != CPU:
            raise WeightsError("its buffers lie on a GPU; plan them in host memory to upload them")
        if index >= len(plan.buffers):
            raise WeightsError(f"buffer {index} came, the plan has {len(plan.buffers)}")
        tensors = [tensor for tensor in plan.tensors if tensor.buffer == index]
        return Spool(index, tensors, plan.buffers[index])

    def deliver(self, index: int, spool: Spool) -> None:
        """Hand a full buffer over; returns once the engine has read it."""
        assert self._plan is not None
        assert self._folder is not None
        if self._port is None:
            self._port = Port(self._folder, self._plan.epoch)
        buffer = spool.finish()
        offer = Offer(self._plan.transfer, index, buffer.nbytes, "host")
        self._port.offer(offer, buffer.fds)

    def forget(self) -> None:
        """Give the hand-over up, or end it: the engine lets go of what it still has of it."""
        port, self._port, self._plan = self._port, None, None
        if port is not None:
            port.close()
