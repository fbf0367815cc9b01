"""Memory of an API server while slow clients read one capture, each at another point.

    python -m bench.capture_readers --mib 396 --readers 6

A server of its own process serves clairai's capture routes from a folder that is written first;
the engine behind them is a toy that knows the folder. Each client takes the start of the answer
and then nothing. Writes the server's memory before, while they all wait, and after they left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from clairai.server import capture_routes
from clairai.server.engine_rpc import ATTRIBUTE, EngineRpc, RouteRefusal, on_route_refusal
from clairai.store.row_block import Origin, RowBlock
from clairai.store.write import Writer
from clairai.wire.capture_messages import Captures, CaptureState, ConsumerStatus, FindCaptures
from clairai.wire.control_messages import Control
from clairai.wire.ring_messages import ROW
from scripts.numbers import stamp, table, write_section

STREAM: Final = 0xAB
WIDTH: Final = 4096
BLOCK_ROWS: Final = 256
DEADLINE_S: Final = 120.0
HEADING: Final = "Slow readers of captures"
RECEIVE_NBYTES: Final = 4096


@dataclass(frozen=True)
class ServerMemory:
    """Resident memory of the server, in bytes."""

    before: int
    while_read: int
    after: int

    @property
    def growth(self) -> int:
        return self.while_read - self.before


def write_capture(folder: Path, *, nbytes: int, num_points: int) -> None:
    """Random float32 rows of one request, the same number at each point."""
    source = np.random.default_rng(0)
    origin = Origin.of(
        model="m", weights="1", dtype="float32", width=WIDTH, encoder="raw", parameters={}
    )
    num_rows = nbytes // (4 * WIDTH * num_points)
    with Writer(folder, policy="block") as writer:
        for start in range(0, num_rows, BLOCK_ROWS):
            rows_N = np.zeros(min(BLOCK_ROWS, num_rows - start), ROW)
            rows_N["stream"] = STREAM
            rows_N["position"] = np.arange(start, start + len(rows_N))
            for point in range(num_points):
                values = source.random((len(rows_N), WIDTH), np.float32)
                writer.offer(RowBlock(origin, f"post_block.{point}", rows_N, {"values": values}))


class _ToyEngine:
    """Knows where captures are, and has forgotten which there were."""

    def __init__(self, folder: str) -> None:
        self._state = CaptureState((ConsumerStatus("fs", folder),), 0, 0, 0, 0, 0)

    async def collective_rpc(self, _method: str, *, args: tuple[bytes]) -> list[bytes]:
        control = msgspec.msgpack.decode(args[0], type=Control)
        is_asked = isinstance(control, FindCaptures)
        return [msgspec.msgpack.encode(Captures(((),)) if is_asked else self._state)]


def serve(folder: str, path: str) -> None:
    import uvicorn
    from fastapi import APIRouter, FastAPI

    app, router = FastAPI(), APIRouter(prefix="/v1")
    capture_routes.add_routes(router)
    app.include_router(router)
    app.add_exception_handler(RouteRefusal, on_route_refusal)
    setattr(app.state, ATTRIBUTE, EngineRpc(_ToyEngine(folder), is_shared=False))
    uvicorn.run(app, uds=path, log_level="warning")


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[tuple[int, str]]:
    """A server's process id and the path of its socket."""
    with contextlib.ExitStack() as stack:
        path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        command = [sys.executable, "-m", "bench.capture_readers", "--serve", str(folder), path]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.terminate)
        stack.enter_context(contextlib.closing(_connect(path, process)))
        yield process.pid, path


def _connect(path: str, process: subprocess.Popen[Any] | None = None) -> socket.socket:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_NBYTES)
        sock.settimeout(DEADLINE_S)
        try:
            sock.connect(path)
            return sock
        except OSError:
            sock.close()
            if time.monotonic() > deadline_s or (process is not None and process.poll()):
                raise
            time.sleep(0.05)


def ask(path: str, point: int | None, *, more: str = "") -> socket.socket:
    """A client that has sent its request."""
    sock = _connect(path)
    query = "" if point is None else f"?point=post_block.{point}"
    head = f"GET /v1/captures/{STREAM:016x}{query} HTTP/1.1\r\nHost: x\r\n{more}\r\n"
    sock.sendall(head.encode())
    return sock


def resident_nbytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def measure(*, nbytes: int, num_readers: int) -> ServerMemory:
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as clients:
        folder = Path(parent) / "captures"
        write_capture(folder, nbytes=nbytes, num_points=num_readers)
        with running_server(folder) as (process, path):
            with contextlib.closing(ask(path, 0, more="Range: bytes=0-9\r\n")) as first:
                assert b" 206 " in first.recv(100)
            before = resident_nbytes(process)
            for point in range(num_readers):
                sock = clients.enter_context(contextlib.closing(ask(path, point)))
                assert b" 200 " in sock.recv(1000)
            while_read = resident_nbytes(process)
            clients.close()
            with contextlib.closing(ask(path, 0, more="Range: bytes=0-9\r\n")) as last:
                assert b" 206 " in last.recv(100)
            return ServerMemory(before, while_read, resident_nbytes(process))


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--serve"]:
        serve(*arguments[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=396)
    parser.add_argument("--readers", type=int, default=6)
    given = parser.parse_args(arguments)
    began_s = time.monotonic()
    found = measure(nbytes=given.mib << 20, num_readers=given.readers)
    took = f"{time.monotonic() - began_s:.0f} s"
    sizes = [f"{size >> 20} MiB" for size in (found.before, found.while_read, found.after)]
    made = table(("before", "while all wait", "after they left"), [sizes])
    what = (
        f"Resident memory of an API server without a model: {given.readers} clients read a capture "
        f"of {given.mib} MiB, each at another point, and take no more than the start."
    )
    write_section(HEADING, [stamp("python -m bench.capture_readers", took=took), what, made])
    print(made)


if __name__ == "__main__":
    main(sys.argv[1:])
