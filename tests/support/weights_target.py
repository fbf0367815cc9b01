"""An engine to attack: it takes weights through its real routes and its real socket.

Real: routes, manifest, checks, socket, buffers. Toy: the model, and vLLM between them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

from clairai.local.private_socket import Connection, encode_frame
from clairai.server import install_routes
from clairai.weights import Sender
from clairai.weights.manifest import Manifest, encode_manifest
from clairai.weights.pack import HostPacker, PackedBuffer, open_sources
from clairai.weights.socket_server import FROM_ENGINE
from clairai.wire.ring_messages import Refusal
from clairai.wire.weights_messages import BufferOffer
from tests.support.ring_engine import DEADLINE_S
from tests.support.weights import ToyLlm, engine, plan, weights


@dataclass
class Target:
    """`told` lists the calls that vLLM would have received."""

    folder: Path
    llm: ToyLlm
    client: TestClient
    told: list[str] = field(default_factory=list)

    def post(self, what: str, body: bytes) -> str:
        """The refusal of the routes; empty if they accepted it."""
        answer = self.client.post(f"/v1/weights/{what}", content=body)
        if answer.status_code == 200:
            return ""
        assert answer.status_code in (400, 409, 413), answer.text
        assert self.told == [], "a refusal pauses nothing"
        return str(answer.json()["error"]["message"])

    def plan(self, **given: Any) -> Manifest:
        return plan(epoch=self.llm.epoch, **given)

    def planned(self, **given: Any) -> Manifest:
        manifest = self.plan(**given)
        assert self.post("plan", encode_manifest(manifest)) == ""
        return manifest

    def pack(self, manifest: Manifest, index: int = 0, seed: int = 1) -> PackedBuffer:
        return HostPacker(open_sources(weights(seed), ExitStack()), manifest).pack(index)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(os.fspath(self.llm.updater.receiver.path))
            Connection(sock, FROM_ENGINE, max_fds=4).receive(DEADLINE_S)  # the greeting
            yield sock

    def offered(self, offer: BufferOffer | bytes, fds: tuple[int, ...] = ()) -> str:
        """The refusal of the socket; empty if it accepted the offer."""
        with self.connected() as sock:
            return said(sock, offer, fds)

    def is_untouched(self) -> bool:
        served = self.llm.updater.served.version == 0
        return served and all(
            torch.equal(self.llm.model[name], tensor) for name, tensor in weights(0).items()
        )

    def still_takes_honest_weights(self) -> bool:
        sent = Sender(self.llm, runtime_dir=str(self.folder)).send(weights(8))
        return sent.version == 1


def said(sock: socket.socket, offer: BufferOffer | bytes, fds: tuple[int, ...] = ()) -> str:
    frame = offer if isinstance(offer, bytes) else encode_frame(offer)
    socket.send_fds(sock, [frame], fds)
    if isinstance(offer, bytes):
        sock.shutdown(socket.SHUT_WR)
    try:
        answer, _ = Connection(sock, FROM_ENGINE, max_fds=4).receive(DEADLINE_S)
    except ConnectionError:
        return "hung up"
    return answer.reason if isinstance(answer, Refusal) else ""


def offer_of(manifest: Manifest, packed: PackedBuffer, **changes: Any) -> BufferOffer:
    made = BufferOffer(manifest.transfer, 0, manifest.buffers[0], packed.home)
    return msgspec.structs.replace(made, **changes)


@contextmanager
def target(folder: Path, step_publisher: Any = None) -> Iterator[Target]:
    with engine(folder, step_publisher) as llm:
        told: list[str] = []
        app = FastAPI()
        install_routes.attach(app)

        async def collective_rpc(method: str, args: tuple[bytes]) -> list[bytes]:
            return llm.collective_rpc(method, args)

        async def pause_generation(mode: str, clear_cache: bool) -> None:
            told.append(f"pause {mode} {clear_cache}")

        async def resume_generation() -> None:
            told.append("resume")

        parallel = SimpleNamespace(_api_process_count=1)
        client = SimpleNamespace(
            collective_rpc=collective_rpc,
            pause_generation=pause_generation,
            resume_generation=resume_generation,
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )
        install_routes.connect(client, app.state)
        with TestClient(app) as web:
            yield Target(folder, llm, web, told)
