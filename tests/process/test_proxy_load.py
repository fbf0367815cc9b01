"""A proxy in a process of its own: its memory and descriptors, while clients hold all they can."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.proxy.proxy_settings import Limits
from tests.process.served import free_port, until

LIMITS = Limits()
MIB = 1 << 20
CHAT = "/v1/chat/completions"


class Upstream(BaseHTTPRequestHandler):
    """Takes any body and forgets it; a stream begins and does not end."""

    protocol_version = "HTTP/1.1"
    ended = threading.Event()

    def do_GET(self) -> None:
        self._answer(b'{"data": []}')

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        body = b""
        while left:
            part = self.rfile.read(min(left, 1 << 16))
            left -= len(part)
            body = body or part
        if b'"stream": true' in body:
            self._stream()
        else:
            self._answer(b'{"choices": []}')

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b'data: {"id":"1","choices":[]}\n\n')
        self.wfile.flush()
        self.ended.wait()
        self.close_connection = True

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the proxy hangs up when its client has
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class ProxyProcess:
    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory_mib(self, what: str) -> float:
        """VmRSS is its memory now, VmHWM the most that it ever had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{what}:"))
        return int(line.split()[1]) / 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=60, trust_env=False).status_code == 200
        return False

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{CHAT}", json=body, timeout=60, trust_env=False)


@contextmanager
def upstream() -> Iterator[str]:
    Upstream.ended.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        Upstream.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def proxy_process(runtime: Path, *, max_files: int | None = None) -> Iterator[ProxyProcess]:
    """`clairai proxy`, as a user starts it."""
    port = free_port()
    with upstream() as url:
        command = [sys.executable, "-m", "clairai.cli", "proxy", "--upstream", url]
        command += ["--port", str(port), "--runtime-dir", str(runtime)]
        if max_files is not None:
            command = ["prlimit", f"--nofile={max_files}", *command]
        # So that memory which is free is given back, and shows.
        environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        made = ProxyProcess(process, port)
        try:
            until(made.is_healthy)
            yield made
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def put_all_but_one_byte(proxy: ProxyProcess, held: ExitStack) -> bytes:
    """What the proxy says to a large file before it is whole; nothing, while it waits for more."""
    sock = held.enter_context(proxy.connect())
    nbytes = LIMITS.vector_bytes
    head = f"PUT /v1/steering/vectors/v HTTP/1.1\r\nHost: localhost\r\nContent-Length: {nbytes}\r\n"
    with contextlib.suppress(OSError):  # a refused one is not read to its end
        sock.sendall(f"{head}\r\n".encode() + bytes(nbytes - 1))
    sock.settimeout(0.2)
    with contextlib.suppress(OSError):
        return sock.recv(1 << 16)
    return b""


@pytest.mark.attack(240)
def test_held_uploads_leave_the_proxy_within_its_stated_memory(runtime: Path) -> None:
    with proxy_process(runtime) as proxy, ExitStack() as held, ThreadPoolExecutor(8) as clients:
        before = proxy.memory_mib("VmRSS")
        said = list(clients.map(lambda _: put_all_but_one_byte(proxy, held), range(8)))
        assert proxy.is_healthy()
        assert proxy.ask({"messages": []}).status_code == 200
        assert proxy.memory_mib("VmHWM") < before + 2 * LIMITS.bodies_bytes / MIB
    refused = [answer for answer in said if answer]
    assert len(refused) >= 6
    assert all(answer.startswith(b"HTTP/1.1 503") for answer in refused)
    assert all(b"retry-after: 1" in answer.lower() for answer in refused)


@pytest.mark.attack(241)
def test_a_long_answer_does_not_keep_its_requests_body(runtime: Path) -> None:
    """Ten streams of five megabytes each: the bodies are gone, the streams are not."""
    body: dict[str, Any] = {"stream": True, "messages": "A" * (5 * MIB)}
    with proxy_process(runtime) as proxy, ExitStack() as held:
        before = proxy.memory_mib("VmRSS")
        for scored in [{}, {"clairai": dict[str, Any]()}] * 5:
            raw = json.dumps(body | scored).encode()
            sock = held.enter_context(proxy.connect())
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
            sock.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
            assert sock.recv(12) == b"HTTP/1.1 200"
        until(lambda: proxy.memory_mib("VmRSS") < before + 25)


@pytest.mark.attack(242)
def test_health_is_answered_when_connections_have_all_descriptors(runtime: Path) -> None:
    with proxy_process(runtime, max_files=128) as proxy, ExitStack() as held:
        for _ in range(150):
            held.enter_context(proxy.connect())
        assert proxy.is_healthy()
        held.close()
        until(lambda: proxy.ask({"messages": []}).status_code == 200)
