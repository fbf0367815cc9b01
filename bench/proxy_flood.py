"""What a client that loops large bodies costs the others: latencies of small requests beside it.

A proxy as users start it, an upstream that answers at once, one quiet client, and one that sends
8 MiB bodies as fast as they are taken, from another address. Run: python -m bench.proxy_flood
"""

from __future__ import annotations

import argparse
import base64
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from scripts.numbers import stamp, table, write_section

SIZE: Final = 8 << 20
EVERY_S: Final = 0.02  # between two small requests
CHAT: Final = "/v1/chat/completions"
SMALL: Final = b'{"messages":[{"role":"user","content":"Hi"}]}'
_BASE64: Final = base64.b64encode(bytes(SIZE * 3 // 4 - 4096))
BODIES: Final = {
    "numbers": b'{"prompt":[' + b"0," * (SIZE // 2 - 16) + b"0]}",
    "token ids, as many as are taken": b'{"prompt":[' + b"151643," * ((1 << 20) - 16) + b"0]}",
    "strings": b'{"prompt":[' + b'"",' * (SIZE // 3 - 16) + b"0]}",
    "a vector in base64": b'{"messages":[],"clairai":{"steer":[{"vector":"' + _BASE64 + b'"}]}}',
}


class Upstream(BaseHTTPRequestHandler):
    """Takes any body and answers at once."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b'{"data":[]}')

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        self._answer(b'{"choices":[]}')

    def _answer(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self.wfile.write(f"{head}\r\n\r\n".encode() + body)  # in one packet

    def handle(self) -> None:
        with suppress(ConnectionError):  # the proxy hangs up when its client has
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    seconds = parser.parse_args().seconds
    began_s = time.monotonic()
    rows = []
    with proxy() as port:
        rows.append(["nobody", *_shown(measure(port, seconds)), "", ""])
        for name, body in BODIES.items():
            with flood(port, body) as counts:
                taken_ms = measure(port, seconds)
            rows.append([name, *_shown(taken_ms), str(counts[0]), str(counts[1])])
    head = ["beside it", "p50, ms", "p99, ms", "max, ms", "bodies taken", "refused"]
    shown = table(head, rows)
    print(shown)
    what = (
        "Latency of a small request that upstream answers at once, every 20 ms, while a client at "
        "another address loops bodies of up to 8 MiB. Bodies of too many values are refused with "
        "400, a client's bytes beyond 16 MiB a second with 429."
    )
    took = f"{time.monotonic() - began_s:.0f} s"
    command = stamp("python -m bench.proxy_flood", took=took)
    write_section("A client that floods the proxy", [command, what, shown])


@contextmanager
def proxy() -> Iterator[int]:
    """The port of a proxy in a process of its own, with its upstream in another."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    upstream = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    upstream.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as runtime:
        Path(runtime).chmod(0o700)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        command = [sys.executable, "-m", "clairai.cli", "proxy", "--upstream", url]
        command += ["--port", str(port), "--runtime-dir", runtime]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ))
        try:
            _await(port)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
            upstream.kill()


def _await(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError("the proxy did not start")


@contextmanager
def flood(port: int, body: bytes) -> Iterator[list[int]]:
    """How many bodies were taken, and how many refused, when it has ended."""
    counts: list[int] = [0, 0]
    context = multiprocessing.get_context("fork")
    made, is_over = context.Array("q", 2), context.Event()
    sender = context.Process(target=_send, args=(port, body, made, is_over), daemon=True)
    sender.start()
    try:
        yield counts
    finally:
        is_over.set()
        sender.join(30)
        counts[:] = made[:]


def _send(port: int, body: bytes, counts: Any, is_over: Any) -> None:
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(transport=transport, timeout=20) as client:
        while not is_over.is_set():
            try:
                answer = client.post(f"http://127.0.0.1:{port}{CHAT}", content=body)
                is_refused = answer.status_code in (400, 429, 503)
            except httpx.TransportError:  # closed before all was sent
                is_refused = True
            counts[int(is_refused)] += 1


def measure(port: int, seconds: float) -> list[float]:
    """Milliseconds of each small request."""
    taken_ms = []
    with httpx.Client(timeout=20, trust_env=False) as client:
        end_s = time.monotonic() + seconds
        while (start_s := time.monotonic()) < end_s:
            client.post(f"http://127.0.0.1:{port}{CHAT}", content=SMALL)
            taken_ms.append((time.monotonic() - start_s) * 1e3)
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - start_s)))
    return taken_ms


def _shown(taken_ms: list[float]) -> list[str]:
    return [f"{np.percentile(taken_ms, share):.1f}" for share in (50, 99, 100)]


if __name__ == "__main__":
    main()
