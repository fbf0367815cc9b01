"""Runs `clairai serve` as a user does, with a toy in the place of vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from clairai.launch import process_guard
from clairai.local.heartbeat import Beat, read_heartbeats
from tests.process import toy_vllm
from tests.support.ring_engine import until as until_within

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-that-must-not-be-seen"
NUM_FILES = 1024  # descriptors that a shell leaves a command, unless it asks for more


def until(condition: Callable[[], object]) -> None:
    """Patient: these are whole programs, and the machine may be busy."""
    until_within(condition, 60.0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Served:
    """One `clairai serve`, its output in a file."""

    process: subprocess.Popen[bytes]
    url: str
    runtime: Path
    output: Path
    gate: Path

    def said(self) -> str:
        return self.output.read_text()

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60, trust_env=False)

    def health(self) -> dict[str, Any]:
        """None of it while nobody listens."""
        try:
            return dict(self.get("/health", key="").json())
        except httpx.TransportError:
            return {"status": "silent"}

    def await_status(self, status: str) -> dict[str, Any]:
        until(lambda: self.health()["status"] == status or self._is_over())
        return self.health()

    def await_ready(self) -> None:
        until(lambda: "is served on" in self.said() or self._is_over())
        self.await_status("ready")

    def _is_over(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"it ended ({self.process.returncode}): {self.said()}")
        return False

    def engine_pids(self) -> list[int]:
        """Every process of the engine, the guard first."""
        mark = f"TOY_GATE={self.gate}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return sorted(set(found) - {self.process.pid})

    def server_pid(self) -> int:
        """The toy server itself, the guard's child."""
        parent_of = process_guard._parent_pids()
        (guard,) = [pid for pid in self.engine_pids() if parent_of[pid] == self.process.pid]
        (server,) = [pid for pid in self.engine_pids() if parent_of[pid] == guard]
        return server

    def beat_of(self, role: str) -> Beat:
        """The heartbeat of this process of the engine, once there is one."""

        def found() -> list[Beat]:
            folders = self.runtime.glob("s-*/beats")
            beats = [beat for folder in folders for beat in read_heartbeats(folder)]
            return [beat for beat in beats if beat.role == role]

        until(found)
        return found()[0]

    def end(self, number: signal.Signals = signal.SIGINT) -> float:
        """Ask it to stop; how long that took."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - began_s

    def check_nothing_left(self) -> None:
        """No process and no file but the log."""
        until(lambda: not self.engine_pids())
        left = [entry.name for entry in self.runtime.iterdir()]
        assert [name for name in left if not name.startswith("vllm-")] == []


class OpenStream:
    """A client in the middle of a streamed answer, on a thread of its own."""

    def __init__(self, served: Served, **fields: Any) -> None:
        self._served, self._fields = served, fields
        self.raw = b""
        self.ended_s: float | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        until(lambda: b'"content"' in self.raw)

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "model": "toy", "stream": True}
        url = f"{self._served.url}/v1/chat/completions"
        with (
            contextlib.suppress(httpx.TransportError),  # the service was ended with a test
            httpx.Client(timeout=120, trust_env=False) as client,
            client.stream("POST", url, json=body | self._fields) as answer,
        ):
            for part in answer.iter_bytes():
                self.raw += part
        self.ended_s = time.monotonic()

    def wait_for_error(self) -> dict[str, Any]:
        """The error that ends the stream; vLLM's own is followed by its usual last frame."""
        until(lambda: self.ended_s is not None)
        frames = [frame.removeprefix(b"data: ") for frame in self.raw.strip().split(b"\n\n")]
        last = [frame for frame in frames if frame != b"[DONE]"][-1]
        return dict(json.loads(last)["error"])


def _behave_as_in_a_shell() -> None:
    """It must not inherit that the tests run under nohup, or with more descriptors than usual."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))


def run_serve(
    command: Sequence[str],
    options: Sequence[str],
    variables: dict[str, str],
    *,
    port: int,
    output: Path,
) -> Served:
    """Start it; the caller ends it."""
    program = [sys.executable, "-m", "clairai.cli", *command, "--port", str(port)]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*program, *options],
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_behave_as_in_a_shell,
        )
    runtime, gate = Path(variables["CLAIRAI_RUNTIME_DIR"]), Path(variables["TOY_GATE"])
    return Served(process, f"http://127.0.0.1:{port}", runtime, output, gate)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts them; whatever a test did, they are ended after it."""
    packages = toy_vllm.install(tmp_path / "packages")
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 8}')
    runtime = tmp_path / "r"
    started: list[Served] = []

    def start(
        *options: str,
        behaviour: str = "",
        port: int | None = None,
        command: Sequence[str] = ("serve", str(model), "--points", "post_block.1"),
        **variables: str,
    ) -> Served:
        environ = {
            "PYTHONPATH": f"{packages}:{ROOT}:{ROOT / 'src'}",
            "CLAIRAI_RUNTIME_DIR": str(runtime),
            "TOY_VLLM": behaviour,
            "TOY_GATE": str(tmp_path / "gate"),
            **variables,
        }
        output = tmp_path / f"output-{len(started)}"
        made = run_serve(command, options, environ, port=port or free_port(), output=output)
        started.append(made)
        return made

    yield start
    for made in started:
        if made.process.poll() is None:
            made.end(signal.SIGKILL)
    for made in started:
        until(lambda made=made: not made.engine_pids())  # type: ignore[misc]
