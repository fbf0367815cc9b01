"""Takes where tensors are and where the engine is; gives the way between them, and says why that.

By the GPU's own memory where both are on it, through the host's where they share a machine, and
over HTTP where they share neither; `through` asks for one of them, and is refused if it cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from clairai.errors import EngineGoneError, WeightsError
from clairai.points import quote
from clairai.ring.cuda import Gpu
from clairai.ring.folder import runtime_dir as meeting_folder
from clairai.serve.calls import Server
from clairai.weights.carriers import Carrier, OverHttp, OverSocket
from clairai.weights.manifest import CPU
from clairai.weights.pack import HOST
from clairai.weights.port import Port, is_there
from clairai.weights.sources import Item
from clairai.wire_weights import WeightsState

Home = Literal["device", "host", "http"]
Through = Literal["auto", "device", "host", "http"]
_ASKED: Final = "it was asked for"
_HERE: Final = "the engine is in this process, and CUDA opens no handle where it was made"


@dataclass(frozen=True)
class Route:
    """One way to one engine."""

    home: Home
    why: str
    device: torch.device  # where buffers are packed
    carrier: Carrier


@dataclass(frozen=True)
class Router:
    """`server` is None where the engine is reached by Python, and so on this machine."""

    server: Server | None
    runtime_dir: str | None
    through: Through

    def __post_init__(self) -> None:
        if self.through not in get_args(Through):
            ways = ", ".join(get_args(Through))
            raise WeightsError(f"through is {quote(self.through)}; give one of {ways}")
        if self.through == "http" and self.server is None:
            raise WeightsError("through http needs the address of a server; give one")

    def route(self, found: Sequence[Item], state: WeightsState) -> Route:
        """Its carrier is open."""
        if self.through == "http":
            return self._over_http(_ASKED)
        try:
            return self.by_socket(found, state)
        except EngineGoneError as error:
            if self.server is None or self.through != "auto":
                raise
            return self._over_http(f"the engine's socket is not here: {error.reason}")

    def by_socket(self, found: Sequence[Item], state: WeightsState) -> Route:
        """EngineGoneError if no engine of this epoch answers there."""
        port = Port(meeting_folder(self.runtime_dir), state.epoch)
        try:
            return self._over_socket(port, found, state.device)
        except BaseException:
            port.close()
            raise

    def lending(self, found: Sequence[Item], state: WeightsState) -> str | None:
        """Why the host's memory is the way, if the engine may copy it from this process."""
        if self.server is not None or self.through not in ("auto", "host"):
            return None
        if not is_there(meeting_folder(self.runtime_dir), state.epoch):
            return None
        if self.through == "host":
            return _ASKED
        device, why = home_of(found, state.device)
        return why if device == HOST else None

    def _over_http(self, why: str) -> Route:
        assert self.server is not None
        return Route("http", why, HOST, OverHttp(self.server))

    def _over_socket(self, port: Port, found: Sequence[Item], engine: str) -> Route:
        if self.through == "host":
            return Route("host", _ASKED, HOST, OverSocket(port))
        device, why = home_of(found, engine)
        if device != HOST and port.is_here:
            device, why = HOST, _HERE
        if self.through == "device" and device == HOST:
            raise WeightsError(
                f"nothing can go by the GPU's memory: {why}; leave `through` out, or say host"
            )
        return Route("host" if device == HOST else "device", why, device, OverSocket(port))


def home_of(found: Sequence[Item], engine: str) -> tuple[torch.device, str]:
    """The engine's GPU if a tensor is there, else the host's memory, which all can reach; and why.

    What else comes along (a probe, a vector) is copied to that GPU: it is less than the model.
    """
    if engine == CPU:
        return HOST, "the engine has no GPU"
    devices = {item.device for item in found if item.device.type == "cuda"}
    uuids = {device: Gpu(device.index).uuid for device in devices}
    for device, uuid in uuids.items():
        if uuid == engine:
            return device, "the tensors are on the engine's own GPU"
    if not uuids:
        return HOST, "the tensors are in host memory"
    return HOST, f"the tensors are on GPU {min(uuids.values())}, the engine is on {engine}"
